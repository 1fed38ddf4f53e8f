"""Swarms under the checkers of `sim.checks`: a key that says two things, disks that are full or forgot, all
peers killed at one instant, and links that work one way only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from p2p_diloco.proto import events as ev
from p2p_diloco.proto.chain import Link
from p2p_diloco.sim.run import demand_liveness
from p2p_diloco.sim.tables import SETTLED, Swarm
from p2p_diloco.sim.world import SimPeer
from p2p_diloco.wire import messages as msg


def contributors(link: Link) -> set[bytes]:
    return {bytes(peer) for peer in link.contributors}


def voters_in(link: Link) -> set[bytes]:
    return {signed.public_key for signed in link.certificate.votes}


def on_first(swarm: Swarm, kind: str, act: Callable[[SimPeer, msg.Signed], None]) -> None:
    """Do something when a peer first says a statement of this kind after the swarm has settled."""
    done = False

    def on_send(peer: SimPeer, message: msg.Message) -> None:
        nonlocal done
        check(peer, message)
        if done or swarm.height < SETTLED or not isinstance(message, msg.Statement):
            return
        own = message.signed.public_key == peer.identity.public_key
        if own and message.signed.kind == kind:
            done = True
            act(peer, message.signed)

    check = swarm.world.on_send
    swarm.world.on_send = on_send


# --- a key that says two things ---


@pytest.mark.parametrize("seed", range(3))
def test_a_voter_that_signs_two_votes_is_banned_by_all_though_each_heard_only_one_and_newcomers_are_told(
    seed: int,
) -> None:
    swarm = Swarm.of(7, seed)
    world = swarm.world
    liars: list[SimPeer] = []

    def vote_again(liar: SimPeer, signed: msg.Signed) -> None:
        vote = msg.decode_body("vote", signed.body)
        assert isinstance(vote, msg.Vote)
        other = liar.live.statements.make(replace(vote, state_root=bytes(32)))
        liars.append(liar)
        for peer in world.peers[:3]:
            if peer is not liar:
                world.after(1, lambda p=peer: world.feed(p, ev.Received(liar.peer_id, msg.Statement(other))))

    on_first(swarm, "vote", vote_again)
    check = world.on_send

    def on_send(peer: SimPeer, message: msg.Message) -> None:
        if peer not in liars:  # the checker is right that the second vote is on no disk
            check(peer, message)

    world.on_send = on_send
    world.run_until(lambda: bool(liars))
    [liar] = liars
    honest = [peer for peer in world.peers if peer is not liar]
    world.run_until(lambda: all(p.live.members.banned() == [liar.peer_id] for p in honest), 30)
    height = swarm.height
    newcomer = world.add(seeds=[honest[-1].index])
    world.run_until(lambda: newcomer.live.members.banned() == [liar.peer_id], 30)
    world.run_until(lambda: all(p.live.chain.epoch >= height + 4 for p in honest), 120)
    for epoch in range(height + 2, height + 5):
        assert bytes(liar.peer_id) not in contributors(swarm.checker.links[epoch])
        assert liar.identity.public_key not in voters_in(swarm.checker.links[epoch])
    assert all(any("its key is banned" in text for text in peer.notices) for peer in honest)


def test_a_proof_that_proves_nothing_bans_nobody_and_one_with_a_forged_signature_closes_the_link() -> None:
    swarm = Swarm.of(4, 1)
    world = swarm.world
    swarm.settle()
    accused, accuser, judge = world.peers[1:4]
    said = accused.live.statements.make(msg.Abstain(9, bytes(32), "x", 0))
    same = msg.Equivocation(said, said)
    forged = msg.Equivocation(said, replace(said, signature=bytes(64)))
    world.feed(judge, ev.Received(accuser.peer_id, same))
    assert judge.live.members.banned() == []
    assert judge.live.members.usable(accuser.peer_id)
    world.feed(judge, ev.Received(accuser.peer_id, forged))
    assert judge.live.members.banned() == []
    world.run_for(0.1)
    assert not judge.live.members.usable(accuser.peer_id)
    demand_liveness(world, 60)


# --- disks ---


def test_a_voter_whose_disk_is_full_contributes_without_voting_and_votes_again_when_there_is_room() -> None:
    swarm = Swarm.of(4, 2)
    world = swarm.world
    swarm.settle()
    full = world.peers[1]
    full.store.full = True
    height = swarm.height
    swarm.settle(height + 5)
    without = [swarm.checker.links[epoch] for epoch in range(height + 2, height + 6)]
    assert all(bytes(full.peer_id) in contributors(link) for link in without)
    assert all(full.identity.public_key not in voters_in(link) for link in without)
    assert any("DEGRADED_DISK" in text for text in full.notices)
    assert "DEGRADED_DISK" in full.live.pending()
    full.store.full = False
    height = swarm.height
    swarm.settle(height + 40)
    again = [swarm.checker.links[epoch] for epoch in range(height + 20, height + 41)]
    assert any(full.identity.public_key in voters_in(link) for link in again)
    assert "DEGRADED_DISK" not in full.live.pending()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["vote", "promise"])
def test_a_voter_that_lost_its_vote_log_is_silent_in_the_epoch_in_which_it_spoke_and_votes_in_later_ones(
    kind: str, seed: int
) -> None:
    swarm = Swarm.of(5, seed)
    world = swarm.world
    victims: list[SimPeer] = []
    spoke = 0

    def lose_the_log(victim: SimPeer, signed: msg.Signed) -> None:
        nonlocal spoke
        victims.append(victim)
        body = msg.decode_body(signed.kind, signed.body)
        assert isinstance(body, msg.Vote | msg.Promise)
        spoke = body.epoch

        def lose() -> None:
            world.kill(victim)
            victim.store.records = [entry for entry in victim.disk if entry[0] == "certificate"]
            victim.store.forgot = True
            world.restart(victim)

        world.after(1, lose)

    if kind == "promise":  # somebody's death makes the others promise

        def lose_one(peer: SimPeer, signed: msg.Signed) -> None:
            other = next(p for p in world.peers if p is not peer)
            world.after(1, lambda: world.kill(other))
            world.after(5 * 10**9, lambda: world.restart(other))

        on_first(swarm, "view", lose_one)
    on_first(swarm, kind, lose_the_log)
    world.run_until(lambda: bool(victims))
    [victim] = victims
    world.run_for(0.01)
    lost = len(victim.disk)
    world.run_until(lambda: victim.live.chain.epoch >= spoke, 120)
    for name, data in victim.disk[lost:]:
        if name in ("vote", "promise", "abstain"):
            signed = msg.unpack_object(msg.VoteRecord, data).vote if name == "vote" else None
            signed = signed or msg.unpack_object(msg.Signed, data)
            assert getattr(msg.decode_body(name, signed.body), "epoch", 0) > spoke
    height = swarm.height
    world.run_until(lambda: swarm.height >= height + 12, 300)
    later = [swarm.checker.links[epoch] for epoch in range(height + 4, height + 13)]
    assert any(victim.identity.public_key in voters_in(link) for link in later)


# --- all at once ---


@pytest.mark.parametrize("kind", ["ready", "view", "vote"])
@pytest.mark.parametrize("seed", range(3))
def test_all_peers_killed_at_one_instant_go_on_from_their_disks_with_one_history(
    kind: str, seed: int
) -> None:
    swarm = Swarm.of(4, seed)
    world = swarm.world
    killed: list[int] = []

    def kill_all(peer: SimPeer, signed: msg.Signed) -> None:
        def strike() -> None:
            killed.append(swarm.height)
            for victim in world.peers:
                world.kill(victim)

        world.after(seed * 10_000_000, strike)  # 0, 10 and 20 ms later

    on_first(swarm, kind, kill_all)
    world.run_until(lambda: bool(killed))
    world.run_for(1)
    for peer in world.peers:
        world.restart(peer)
    took_s = demand_liveness(world, 120)
    print(f"seed {seed}, killed at the first {kind}: two epochs on after {took_s:.1f} s")
    assert swarm.height >= killed[0] + 2
    assert all(peer.live.chain.epoch >= killed[0] for peer in world.peers)


# --- links that work one way ---


@pytest.mark.parametrize("n", [4, 5, 8])
def test_a_link_that_loses_everything_one_way_costs_nobody_its_place_in_the_ring(n: int) -> None:
    swarm = Swarm.of(n, seed=4)
    world = swarm.world
    swarm.settle()
    order = sorted(world.peers, key=lambda peer: peer.peer_id)
    deaf, mute = order[1], order[2]  # neighbours in the plain order
    world.mute(mute, deaf)
    world.run_for(world.config.timeouts.stall_s + world.config.timeouts.idle_s)
    height = swarm.height
    swarm.settle(height + 6)
    for epoch in range(height + 2, height + 7):
        link = swarm.checker.links[epoch]
        assert len(contributors(link)) == n
        ring = [peer for peer, _ in link.members]
        place = ring.index(mute.peer_id)
        assert deaf.peer_id not in (ring[place - 1], ring[(place + 1) % n])
    for peer in world.peers:
        assert not [text for text in peer.notices if "is gone" in text]
    world.mend()
    demand_liveness(world, 60)


def test_in_a_ring_of_three_a_bad_edge_leaves_out_one_peer_that_follows_all_the_same() -> None:
    swarm = Swarm.of(3, seed=4)
    world = swarm.world
    swarm.settle()
    world.cut(world.peers[1], world.peers[2])
    world.run_for(40)
    height = swarm.height
    swarm.settle(height + 4)
    out = set[bytes]()
    for epoch in range(height + 2, height + 5):
        link = swarm.checker.links[epoch]
        assert len(contributors(link)) == 2
        out |= {bytes(peer.peer_id) for peer in world.peers} - contributors(link)
    assert len(out) == 1  # always the same one
    world.mend()
    demand_liveness(world, 60)
    height = swarm.height
    swarm.settle(height + 3)
    assert len(contributors(swarm.checker.links[height + 3])) == 3


def test_a_slow_edge_leaves_the_ring_once_its_sender_has_told_of_it() -> None:
    swarm = Swarm.of(5)
    swarm.settle(SETTLED)
    order = swarm.checker.links[SETTLED].contributors
    slow, sender = {order[0], order[1]}, next(p for p in swarm.world.peers if p.peer_id == order[0])
    swarm.world.feed(sender, ev.RateMeasured(order[1], 10))
    swarm.world.run_for(3.0)  # gossip
    swarm.settle(swarm.height + 2)
    after = swarm.checker.links[swarm.height].contributors
    assert sorted(after) == sorted(order), "nobody lost its place"
    assert slow not in [{a, b} for a, b in zip(after, [*after[1:], after[0]], strict=True)]
