"""What is kept of finished rounds, and for how long; pulls of a round instead of a state."""

from __future__ import annotations

import pytest

from p2p_diloco.numerics.digest import leaf_hash, merkle_root
from p2p_diloco.proto.catchup import CatchUp
from p2p_diloco.proto.events import Close, Compute, FrameIn, Send
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.rounds import Round, Rounds
from p2p_diloco.wire.messages import GetChunk, GetLeaves, Leaves

S = 1_000_000_000
A, B = bytes([1]) * 32, bytes([2]) * 32
STATE = bytes([9]) * 32


def made(epoch: int, chunks: int = 3) -> Round:
    return Round.of(epoch, bytes([epoch]) * 32, [bytes([epoch, chunk]) for chunk in range(chunks)])


def test_a_round_is_named_by_the_root_of_its_payloads() -> None:
    held = made(4)
    assert held.hashes == tuple(leaf_hash(i, payload) for i, payload in enumerate(held.payloads))
    assert held.chunk_root() == merkle_root(held.hashes)
    assert Round.of(5, STATE, held.payloads).chunk_root() == held.chunk_root()
    assert made(4, 2).chunk_root() != held.chunk_root()


def test_the_newest_three_rounds_are_kept_and_one_that_comes_again_counts_as_new() -> None:
    rounds = Rounds([made(1), made(2)])
    rounds.add(made(3))
    rounds.add(made(1))
    rounds.add(made(4))
    assert rounds.get(made(2).chunk_root()) is None
    for epoch in (1, 3, 4):
        assert rounds.get(made(epoch).chunk_root()) == made(epoch)


def pull(held: Round, donors: list[bytes]) -> tuple[CatchUp, Jobs]:
    root, chunks = held.chunk_root(), len(held.payloads)
    jobs = Jobs()
    return CatchUp(root, held.epoch, chunks, donors, 15.0, jobs, "round", held.state_root), jobs


def answer(machine: CatchUp, jobs: Jobs, effects: list, good: bool = True) -> list:
    """Do the jobs among these effects at once; what they lead to."""
    found = []
    for effect in effects:
        if not isinstance(effect, Compute):
            found.append(effect)
            continue
        entry = jobs.take(effect.job)
        assert entry is not None
        found.append(effect)
        found += answer(machine, jobs, machine.on_computed(entry[1], good, "", S), good)
    return found


def test_a_pulled_round_is_replayed_chunk_by_chunk_and_ends_with_its_payloads() -> None:
    held = made(7)
    machine, jobs = pull(held, [A, B])
    [asked] = machine.start(0)
    assert isinstance(asked, Send)
    assert asked.message == GetLeaves(held.chunk_root(), 0)
    leaves = Leaves(held.chunk_root(), 0, 3, b"".join(held.hashes))
    effects = answer(machine, jobs, machine.on_leaves(asked.peer, leaves, S))
    assert [e.op for e in effects if isinstance(e, Compute)] == ["replay_begin"]
    requests = [(e.peer, e.message.chunk) for e in effects if isinstance(e, Send)]
    assert sorted(chunk for _, chunk in requests) == [0, 1, 2]
    done = []
    for donor, chunk in requests:
        frame = FrameIn(donor, "state", held.chunk_root(), chunk, 0, 0, held.payloads[chunk])
        done += answer(machine, jobs, machine.on_frame(frame, S))
    ops = [e.op for e in done if isinstance(e, Compute)]
    assert ops == ["replay_chunk"] * 3 + ["replay_finish"]
    assert [e.arguments for e in done if isinstance(e, Compute)][-1] == (held.state_root,)
    assert machine.state == "done"
    assert (machine.hashes(), machine.round_payloads()) == (held.hashes, held.payloads)


def test_a_round_at_hand_needs_no_donor() -> None:
    held = made(7)
    machine, jobs = pull(held, [])
    effects = answer(machine, jobs, machine.start_with(held.hashes, held.payloads))
    assert not [e for e in effects if isinstance(e, Send)]
    assert machine.state == "done"


def test_a_damaged_round_at_hand_fails_and_a_wrong_chunk_of_a_donor_costs_the_donor() -> None:
    held = made(7)
    machine, jobs = pull(held, [])
    [begin] = machine.start_with(held.hashes, held.payloads)
    entry = jobs.take(begin.job)
    assert entry is not None
    answer(machine, jobs, machine.on_computed(entry[1], True, "", S), good=False)
    assert (machine.state, machine.failed) == ("failed", "the round at hand is damaged")

    machine, jobs = pull(held, [A])
    machine.start(0)
    leaves = Leaves(held.chunk_root(), 0, 3, b"".join(held.hashes))
    asked = answer(machine, jobs, machine.on_leaves(A, leaves, S))
    first = next(e.message for e in asked if isinstance(e, Send) and isinstance(e.message, GetChunk))
    frame = FrameIn(A, "state", held.chunk_root(), first.chunk, 0, 0, b"wrong")
    effects = answer(machine, jobs, machine.on_frame(frame, S), good=False)
    assert [e.peer for e in effects if isinstance(e, Close)] == [A]
    assert machine.state == "failed"
    with pytest.raises(KeyError):
        machine.round_payloads()
