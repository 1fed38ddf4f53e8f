"""What users of other systems reported, each done to a simulated swarm under the rules of DESIGN section 8.

Every world here has a `Checker`: two certificates of an epoch, an id twice in a ring, or a state that is not
the mean of the contributors' original deltas end the test at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from p2p_diloco.config import CodecConfig, InnerConfig, PeerConfig, RunConfig
from p2p_diloco.numerics.int8 import BLOCK
from p2p_diloco.proto import events as ev
from p2p_diloco.proto.chain import Link
from p2p_diloco.sim.checks import Checker
from p2p_diloco.sim.faults import Plan
from p2p_diloco.sim.run import demand_liveness, make_world
from p2p_diloco.sim.tables import SETTLED, Swarm
from p2p_diloco.sim.world import SimPeer, World
from p2p_diloco.wire import messages as msg


def sides_of(link: Link) -> set[bytes]:
    return {bytes(peer) for peer in link.contributors}


def sees(peer: SimPeer, others: Sequence[SimPeer], *status: str) -> bool:
    """True if this peer's membership holds all these as alive (or in one of these other states too)."""
    members = [peer.live.members.get(other.peer_id) for other in others if other is not peer]
    return all(member is not None and member.status in ("alive", *status) for member in members)


# --- four peers start at once while the link between the two seeds is cut ---


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("crossed", [False, True], ids=["each_knows_one_seed", "each_knows_both_seeds"])
def test_four_peers_that_start_while_their_two_seeds_cannot_reach_each_other_become_one_ring(
    seed: int, crossed: bool
) -> None:
    world = make_world(Plan(peers=4, min_peers=4), seed)
    checker = Checker(world)
    founder = world.add(founder=True)
    second = world.add(seeds=[])
    world.cut(founder, second)
    world.introduce(second, founder)
    joiners = [world.add(seeds=[0, 1] if crossed else [index]) for index in range(2)]
    world.run_for(10)
    if not crossed:  # two islands: one of them holds the founder, the other one must not go ahead without
        assert checker.certificates_seen == 0
        assert not sees(founder, [second])
    world.mend()
    began = world.now_ns
    everybody = [founder, second, *joiners]
    world.run_until(lambda: all(sees(peer, everybody) for peer in everybody), 15)
    height = max(checker.links, default=0)
    world.run_until(lambda: all(peer.live.chain.epoch >= height + 2 for peer in everybody), 60)
    print(f"seed {seed}: two epochs on, all of them, {(world.now_ns - began) / 1e9:.1f} s after healing")
    assert len(checker.links[1].contributors) == 4  # the run began with all four, cut or not
    assert len(checker.links[max(checker.links)].contributors) == 4


# --- ten peers split 5/5 across a sync ---


@pytest.mark.parametrize("kind", ["reduce", "gather", "ready", "vote"])
def test_of_ten_peers_split_in_halves_during_a_sync_one_half_goes_on_and_the_other_adopts_its_epochs(
    kind: str,
) -> None:
    swarm = Swarm.of(10, seed=5)
    world = swarm.world
    order = sorted(world.peers, key=lambda peer: peer.peer_id)
    one, other = order[::2], order[1::2]
    cut_ns = 0

    def on_effect(peer: SimPeer, effect: ev.Effect) -> bool:
        nonlocal cut_ns
        signed = getattr(getattr(effect, "message", None), "signed", None)
        found = getattr(effect, "kind", "") == kind or getattr(signed, "kind", "") == kind
        if not cut_ns and swarm.height == SETTLED and found:
            cut_ns = world.now_ns
            world.after(1, lambda: [world.cut(a, b) for a in one for b in other])
        return True

    world.on_effect = on_effect
    swarm.settle()
    world.run_until(lambda: cut_ns > 0)
    world.run_for(5)  # what was decided when the cut came has arrived
    before = [max(peer.live.chain.epoch for peer in side) for side in (one, other)]
    world.run_for(60)
    gained = [
        max(peer.live.chain.epoch for peer in side) - height
        for side, height in zip((one, other), before, strict=True)
    ]
    assert gained[0] > 5  # it holds the lowest id
    assert gained[1] == 0
    assert all("quorum" in "\n".join(peer.notices).lower() for peer in other)
    world.mend()
    demand_liveness(world, 120)
    world.run_until(lambda: len(swarm.checker.links[swarm.height].contributors) == 10, 60)


# --- killed right after joining ---


@pytest.mark.parametrize("seed", range(3))
def test_a_peer_killed_right_after_joining_is_gone_within_one_ttl_and_costs_nobody_an_epoch(
    seed: int,
) -> None:
    swarm = Swarm.of(4, seed)
    world = swarm.world
    swarm.settle()
    newcomer = world.add()
    name = newcomer.peer_id
    swarm_peers = world.peers[:4]
    world.run_until(lambda: all(sees(peer, [newcomer]) for peer in swarm_peers), 30)
    world.kill(newcomer)
    began, height = world.now_ns, swarm.height
    gossip = world.config.gossip
    ttl_s = gossip.probe_s + gossip.probe_timeout_s + gossip.suspicion_s

    def gone() -> bool:
        return all(p.live.members.get(name).status == "dead" for p in swarm_peers)

    world.run_until(gone, ttl_s)
    print(f"seed {seed}: gone after {(world.now_ns - began) / 1e9:.1f} s")
    swarm.settle(height + 3)
    for epoch in range(height + 2, height + 4):
        assert sides_of(swarm.checker.links[epoch]) == {bytes(peer.peer_id) for peer in swarm_peers}


# --- one of eight stopped for 5 s again and again ---


def test_one_of_eight_that_stops_for_5_s_again_and_again_never_makes_others_evict_each_other() -> None:
    swarm = Swarm.of(8, seed=3)
    world = swarm.world
    swarm.settle()
    sick, healthy = world.peers[2], [peer for peer in world.peers if peer.index != 2]
    check, evictions = world.watch, list[str]()

    def watch(peer: SimPeer) -> None:
        check(peer)
        if peer.alive and peer is not sick and not sees(peer, healthy, "suspect"):
            evictions.append(f"{world.now_ns / 1e9:.1f} s: peer {peer.index} dropped a healthy one")

    world.watch = watch
    height = swarm.height
    for _ in range(10):
        world.pause(sick, 5)
        world.run_for(7)
    assert evictions == []
    without = [
        (epoch, peer.index)
        for epoch in range(height + 1, swarm.height + 1)
        for peer in healthy
        if bytes(peer.peer_id) not in sides_of(swarm.checker.links[epoch])
    ]
    assert without == []  # nor does a ring leave one out
    assert swarm.height - height >= 10
    demand_liveness(world, 120)


# --- an identity file copied to a second host ---


@pytest.mark.parametrize("seed", range(5))
def test_an_identity_that_runs_on_two_hosts_is_never_twice_in_a_ring_and_stops_nobody(seed: int) -> None:
    swarm = Swarm.of(5, seed)
    world = swarm.world
    swarm.settle()
    original = world.peers[1 + seed % 4]
    others = [peer for peer in world.peers if peer is not original]
    copy = world.add_copy(original)
    height = swarm.height
    world.run_until(lambda: all(p.live.chain.epoch >= height + 12 for p in others), 300)
    for link in swarm.checker.links.values():
        ids = [bytes(peer) for peer, _ in link.members]
        assert len(ids) == len(set(ids))
    told = [text for peer in (original, copy, *others) for text in peer.notices if "own key" in text]
    print(f"seed {seed}: {told[:2]}")


# --- a retry gives the mean of the survivors' original deltas ---


@pytest.mark.parametrize("offset", [0, 1, 2, 4, 6, 9, 11])
def test_a_retry_gives_the_mean_of_the_survivors_original_deltas_wherever_the_ring_broke(offset: int) -> None:
    """Worked out here from the deltas alone, in float64: the outer step is a plain one of rate 1."""
    values, peers = 8 * BLOCK, 4
    run = RunConfig.model_validate(
        {
            "inner": InnerConfig(steps=10),
            "codec": CodecConfig(kind="fp32"),
            "outer": {"lr": 1.0, "momentum": 0.0},
            "agreement": {"min_peers": peers},
            "chunk_values": BLOCK,
        }
    )

    def delta(peer: SimPeer, epoch: int) -> np.ndarray:
        return np.random.default_rng([peer.index, epoch]).standard_normal(values).astype(np.float32)

    world = World(run, PeerConfig(), values, 11 + offset, delta, toy_keys=True)
    checker = Checker(world)
    for index in range(peers):
        world.add(founder=index == 0)

    def all_train(epoch: int) -> bool:
        machines = [peer.live for peer in world.peers if peer.alive]
        return all(m.chain.epoch == epoch and m.epoch.state == "training" for m in machines)

    def settled() -> bool:
        newest = max(checker.links, default=0)
        return newest >= SETTLED and all_train(newest)

    world.run_until(settled)
    height = max(checker.links)
    anchor = world.peers[0].table.state.anchor.copy()
    victim, sent = world.peers[2], 0

    def on_effect(peer: SimPeer, effect: ev.Effect) -> bool:
        nonlocal sent
        if peer is not victim or not isinstance(effect, ev.SendFrame) or max(checker.links) != height:
            return True
        sent += 1
        if sent <= offset:
            return True
        world.kill(victim)
        return False

    world.on_effect = on_effect
    survivors = [peer for peer in world.peers if peer is not victim]
    goal = height + 1
    first = survivors[0]
    world.run_until(lambda: first.live.chain.epoch == goal and first.live.epoch.state == "training")
    assert not victim.alive, f"only {sent} frames"
    link = checker.links[goal]
    moved = first.table.state.anchor.astype(np.float64) - anchor
    for chunk in range(world.layout.chunks):
        start, stop = world.layout.bounds(chunk)
        members = link.plan_of(chunk)
        total = sum(ready.weight for _, ready in members)
        by_id = {peer.peer_id: peer for peer in world.peers}
        mean = sum(
            ready.weight * delta(by_id[who], goal)[start:stop].astype(np.float64) for who, ready in members
        )
        np.testing.assert_allclose(-moved[start:stop], mean / total, atol=2e-5)
    view = msg.decode_body("view", link.certificate.view[0].body)
    assert isinstance(view, msg.View)
    if view.attempt > 0:  # a later attempt may also adopt what the first ring gave
        fresh = [bytes(peer) for peer, _ in link.members]
        assert bytes(victim.peer_id) not in fresh
