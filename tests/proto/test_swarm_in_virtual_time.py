"""Whole swarms of the real machines under a virtual clock: agreement, failures, joining."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from p2p_diloco.config import AgreementConfig, CodecConfig, InnerConfig, PeerConfig, RunConfig
from p2p_diloco.proto import events as ev
from p2p_diloco.sim.world import SimPeer, World


def make_world(
    peers: int,
    seed: int = 1,
    values: int = 20_000,
    codec: str = "int8",
    min_peers: int = 0,
    **agreement: object,
) -> World:
    run = RunConfig(
        inner=InnerConfig(steps=10),
        codec=CodecConfig(kind=codec),
        agreement=AgreementConfig(min_peers=min_peers or peers, **agreement),
    )
    world = World(run, PeerConfig(), values, seed, seeded_delta(values, seed))
    world.add(founder=True)
    for _ in range(peers - 1):
        world.add()
    return world


def seeded_delta(values: int, seed: int) -> Callable[[SimPeer, int], np.ndarray]:
    def delta(peer: SimPeer, epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, peer.index, epoch]).standard_normal(values).astype(np.float32)

    return delta


def at_epoch(world: World, epoch: int, peers: list[SimPeer] | None = None) -> Callable[[], bool]:
    chosen = peers or world.peers
    return lambda: all(
        p.alive and p.live.chain.epoch >= epoch and p.live.epoch.state != "joining" for p in chosen
    )


def assert_one_history(world: World) -> None:
    """No two peers ever hold different certificates for an epoch, and those at one epoch hold one state."""
    live = [peer for peer in world.peers if peer.alive]
    height = min(peer.live.chain.epoch for peer in live)
    for epoch in range(height + 1):
        assert len({peer.live.chain.link(epoch).digest for peer in live}) == 1, world.report()
    for peer in live:
        if peer.live.epoch.state == "training":
            assert peer.table.state.root == peer.live.chain.head.certificate.state_root


@pytest.mark.parametrize("peers", [1, 2, 3, 5, 8])
def test_a_swarm_certifies_five_epochs_with_one_history(peers: int) -> None:
    world = make_world(peers)
    world.run_until(at_epoch(world, 5))
    assert_one_history(world)
    for link in (world.peers[0].live.chain.link(e) for e in range(1, 6)):
        assert len(link.contributors) == peers


@pytest.mark.parametrize("values", [0, 1, 7])
def test_tiny_vectors_are_averaged_too(values: int) -> None:
    world = make_world(3, values=values)
    world.run_until(at_epoch(world, 3))
    assert_one_history(world)


def reference_mean(world: World, epoch: int, peers: dict[bytes, SimPeer]) -> np.ndarray:
    """Weighted mean of the original deltas of the contributors that the certificate names."""
    link = next(p for p in world.peers if p.alive).live.chain.link(epoch)
    mean = np.zeros(world.layout.total_values, np.float64)
    for chunk in range(world.layout.chunks):  # one that a later attempt reused has its own contributors
        start, stop = world.layout.bounds(chunk)
        members = link.plan_of(chunk)
        for peer, ready in members:
            mean[start:stop] += ready.weight * world.delta_of(peers[peer], epoch)[start:stop].astype(float)
        mean[start:stop] /= sum(ready.weight for _, ready in members)
    return mean


def kill_at(world: World, victim: SimPeer, matches: Callable[[ev.Effect], bool], nth: int = 0) -> list[str]:
    """Kill ``victim`` just before it would carry out the nth matching effect; returns a list that tells."""
    seen: list[str] = []
    count = [0]

    def on_effect(peer: SimPeer, effect: ev.Effect) -> bool:
        if peer is victim and not seen and matches(effect):
            if count[0] == nth:
                seen.append(type(effect).__name__)
                world.kill(peer)
                return False
            count[0] += 1
        return True

    world.on_effect = on_effect
    return seen


def frame_of(kind: str, epoch: int, peer: SimPeer) -> Callable[[ev.Effect], bool]:
    return lambda e: isinstance(e, ev.SendFrame) and e.kind == kind and peer.live.chain.epoch == epoch - 1


def vote_of(epoch: int, peer: SimPeer) -> Callable[[ev.Effect], bool]:
    return lambda e: isinstance(e, ev.Persist) and e.kind == "vote" and peer.live.chain.epoch == epoch - 1


def statement_of(kind: str, epoch: int, peer: SimPeer) -> Callable[[ev.Effect], bool]:
    def matches(effect: ev.Effect) -> bool:
        message = getattr(effect, "message", None)
        signed = getattr(message, "signed", None)
        own = signed is not None and signed.public_key == peer.identity.public_key
        return own and signed.kind == kind and peer.live.chain.epoch == epoch - 1

    return matches


POINTS = {
    "reduce": (frame_of, "reduce"),
    "gather": (frame_of, "gather"),
    "ready": (statement_of, "ready"),
    "view": (statement_of, "view"),
    "vote": (statement_of, "vote"),
}


@pytest.mark.parametrize("nth", [0, 1, 4])
@pytest.mark.parametrize("point", [*POINTS, "vote_persisted"])
@pytest.mark.parametrize("peers", [3, 5])
def test_after_a_kill_at_any_point_the_survivors_certify_the_mean_of_those_named(
    peers: int, point: str, nth: int
) -> None:
    for seed in range(3):
        world = make_world(peers, seed=seed, codec="fp32")
        world.run_until(at_epoch(world, 1))
        victim = world.peers[seed % peers]
        if point == "vote_persisted":
            matches = vote_of(3, victim)
        else:
            maker, kind = POINTS[point]
            matches = maker(kind, 3, victim)
        killed = kill_at(world, victim, matches, nth)
        survivors = [peer for peer in world.peers if peer is not victim]
        world.run_until(at_epoch(world, 6, survivors))
        if not killed:
            continue  # this peer had nothing of the kind to send (it did not convene, or sent fewer)
        assert_one_history(world)
        by_id = {peer.peer_id: peer for peer in world.peers}
        mean = reference_mean(world, 3, by_id)
        contributors = survivors[0].live.chain.link(3).contributors
        assert len(contributors) >= peers - 1
        assert np.isfinite(mean).all()


def test_the_certified_state_equals_a_single_process_reference_after_a_kill_in_the_ring() -> None:
    world = make_world(4, seed=5, codec="fp32", values=60_000)
    start = world.peers[0].table.state.anchor.astype(np.float64).copy()
    victim = world.peers[2]
    world.run_until(at_epoch(world, 1))
    killed = kill_at(world, victim, frame_of("gather", 2, victim), 1)
    survivors = [peer for peer in world.peers if peer is not victim]
    world.run_until(at_epoch(world, 4, survivors))
    assert killed
    by_id = {peer.peer_id: peer for peer in world.peers}
    height = survivors[0].live.chain.epoch
    anchor, momentum = start, np.zeros_like(start)
    for epoch in range(1, height + 1):
        mean = reference_mean(world, epoch, by_id)
        momentum = 0.9 * momentum + mean
        anchor = anchor - 0.7 * (mean + 0.9 * momentum)
    world.run_until(at_epoch(world, height, survivors))
    holder = next(p for p in survivors if p.table.state.epoch == height)
    np.testing.assert_allclose(holder.table.state.anchor, anchor, rtol=1e-4, atol=1e-4)


def test_the_founder_killed_does_not_end_the_run_and_a_newcomer_joins_through_another() -> None:
    world = make_world(3)
    world.run_until(at_epoch(world, 2))
    world.kill(world.peers[0])
    survivors = world.peers[1:]
    world.run_until(at_epoch(world, 4, survivors))
    newcomer = world.add(seeds=[2])
    reached = newcomer.live.chain.epoch
    world.run_until(
        lambda: any(
            newcomer.peer_id in newcomer.live.chain.link(e).contributors
            for e in range(reached, newcomer.live.chain.epoch + 1)
        )
    )
    assert_one_history(world)


def test_a_late_joiner_pulls_the_state_from_more_than_one_donor_and_contributes() -> None:
    world = make_world(3, values=300_000)
    world.run_until(at_epoch(world, 2))
    newcomer = world.add()
    world.run_until(lambda: any(newcomer.peer_id in link.contributors for link in newcomer.live.chain._links))
    caught_up = [values for kind, values in newcomer.metrics if kind == "caught_up"]
    assert len(caught_up[0]["donors"]) >= 2
    assert_one_history(world)


def test_a_newcomer_votes_only_after_two_certificates() -> None:
    world = make_world(2)
    world.run_until(at_epoch(world, 2))
    newcomer = world.add()
    chain = world.peers[0].live.chain
    world.run_until(lambda: newcomer.peer_id in chain.head.contributors)
    first = chain.epoch
    world.run_until(lambda: chain.epoch >= first + 1)
    assert newcomer.peer_id not in chain.link(first).voters
    assert newcomer.peer_id in chain.link(first + 1).voters


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("peers", [1, 2, 3])
def test_a_peer_whose_delta_is_not_finite_sits_the_epoch_out_and_the_divisor_is_right(
    bad: float, peers: int
) -> None:
    for seed in range(4):
        world = make_world(peers, seed=seed, codec="fp32", values=5000)
        good = world.delta_of
        rounds = [0]
        sick = world.peers[seed % peers]

        def delta(peer: SimPeer, epoch: int) -> np.ndarray:
            values = good(peer, epoch).copy()
            if peer is sick and epoch == 3 and rounds[0] == 0:
                rounds[0] += 1
                values[1234] = bad
            return values

        world.delta_of = delta
        world.run_until(at_epoch(world, 5))
        world.delta_of = good
        assert_one_history(world)
        assert any("not finite" in text for text in sick.notices)
        link = sick.live.chain.link(3)
        if peers > 1:
            assert sick.peer_id not in link.contributors
            assert sum(link.weights) == sum(100 + p.index for p in world.peers if p is not sick)


def test_a_peer_that_leaves_is_not_waited_for() -> None:
    for leaver in range(2):
        world = make_world(2, seed=leaver)
        world.run_until(at_epoch(world, 2))
        gone = world.peers[leaver]
        world.feed(gone, ev.LeaveRequested("test"))
        rest = [peer for peer in world.peers if peer is not gone]
        world.run_until(at_epoch(world, 5, rest))
        assert gone.stopped == "test"


def test_a_peer_that_was_killed_comes_back_and_contributes_again() -> None:
    world = make_world(3)
    world.run_until(at_epoch(world, 2))
    lost = world.peers[1]
    world.kill(lost)
    rest = [world.peers[0], world.peers[2]]
    world.run_until(at_epoch(world, 4, rest))
    world.start(lost)
    world.run_until(lambda: lost.peer_id in world.peers[0].live.chain.head.contributors)
    assert_one_history(world)


def test_one_of_two_peers_goes_on_only_if_it_is_the_lowest_and_says_so_otherwise() -> None:
    for lost in range(2):
        world = make_world(2, seed=3)
        world.run_until(at_epoch(world, 2))
        world.kill(world.peers[lost])
        other = world.peers[1 - lost]
        lowest = min(world.peers, key=lambda p: p.peer_id)
        if other is lowest:
            world.run_until(at_epoch(world, 4, [other]))
            continue
        world.run_until(lambda: any("QuorumLost" in text for text in other.notices))
        before = other.live.chain.epoch
        world.run_for(120)
        assert other.live.chain.epoch == before
        world.start(world.peers[lost])
        world.run_until(at_epoch(world, before + 2))
        assert_one_history(world)


def test_the_same_seed_gives_the_same_history() -> None:
    digests = []
    for _ in range(2):
        world = make_world(4, seed=11)
        world.run_until(at_epoch(world, 3))
        digests.append((world.steps, world.now_ns, world.peers[0].live.chain.link(3).digest))
    assert digests[0] == digests[1]


def test_a_joiner_that_is_hundreds_of_epochs_late_fetches_the_whole_chain() -> None:
    world = make_world(1, values=100)
    world.round_ns = (1_000_000, 2_000_000)
    world.run_until(at_epoch(world, 600), limit_s=3000)
    world.round_ns = (500_000_000, 2_000_000_000)
    newcomer = world.add()
    world.run_until(lambda: newcomer.peer_id in newcomer.live.chain.head.contributors, limit_s=3000)
    assert_one_history(world)
