"""Routes of chunks round the ring: everybody adds once, nobody sends anywhere but right."""

from __future__ import annotations

import random
from collections import deque

import pytest

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.proto.events import Compute, FrameIn, SendFrame
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.ring import Ring, RingPlan

TAG = bytes(32)


def peers(count: int) -> list[bytes]:
    return [bytes([i]) * 32 for i in range(count)]


def run_ring(count: int, chunks: int, window: int, seed: int) -> dict[bytes, dict[int, bytes]]:
    """All members of a ring; payloads are sets of who added (as sorted bytes). Returns what each applied."""
    generator = random.Random(seed)
    order = tuple(peers(count))
    plan = RingPlan(TAG, order, tuple(range(1, count + 1)), chunks)
    jobs = {p: Jobs() for p in order}
    rings = {p: Ring(plan, p, window, jobs[p], 0) for p in order}
    todo: deque = deque((p, e) for p in order for e in rings[p].start())
    result: dict[bytes, dict[int, bytes]] = {p: {} for p in order}
    most = 0
    while todo:
        todo.rotate(-generator.randrange(len(todo)))
        peer, effect = todo.popleft()
        most = max(most, len(todo))
        if isinstance(effect, SendFrame):
            assert effect.peer == order[(order.index(peer) + 1) % count]
            frame = FrameIn(
                peer, effect.kind, effect.tag, effect.chunk, effect.hop, effect.weight, effect.payload
            )
            todo.extend((effect.peer, e) for e in rings[effect.peer].on_frame(frame, 1))
            continue
        assert isinstance(effect, Compute)
        me = bytes([order.index(peer)])
        entry = jobs[peer].take(effect.job)
        assert entry is not None
        answer: object
        match effect.op:
            case "first" | "single":
                answer = me
            case "hop":
                answer = bytes(sorted(effect.arguments[2] + me))
            case "finish":
                assert effect.arguments[2] == plan.total_weight
                answer = b"mean" + bytes(sorted(effect.arguments[3] + me))
            case _:
                result[peer][effect.arguments[0]] = effect.arguments[1]
                answer = (b"h", b"l", True)
        todo.extend((peer, e) for e in rings[peer].on_computed(entry[1][1:], answer, 2))
    assert all(ring.done for ring in rings.values())
    # Each open chunk is one frame on its way and at most one apply per member.
    assert most <= count * window * (count + 1)
    return result


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("chunks", [0, 1, 7, 40])
def test_every_member_adds_once_to_every_chunk_and_all_apply_the_same_bytes(count: int, chunks: int) -> None:
    for seed in range(5):
        applied = run_ring(count, chunks, window=4, seed=seed)
        for chunk in range(chunks):
            assert {applied[p][chunk] for p in applied} == {b"mean" + bytes(range(count))}
        assert all(len(found) == chunks for found in applied.values())


def test_a_ring_of_one_applies_its_own_mean() -> None:
    assert run_ring(1, 5, window=2, seed=0) == {bytes(32): {c: b"\x00" for c in range(5)}}


def ring_of_three() -> tuple[Ring, tuple[bytes, ...]]:
    order = tuple(peers(3))
    return Ring(RingPlan(TAG, order, (1, 2, 3), 6), order[1], 4, Jobs(), 0), order


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peer": 2}, "left neighbour"),
        ({"chunk": 6}, "chunk 6 of 6"),
        ({"hop": 2}, "hop 2"),
        ({"weight": 99}, "weight"),
    ],
)
def test_a_frame_that_does_not_fit_its_route_is_a_violation(change: dict[str, int], words: str) -> None:
    ring, order = ring_of_three()
    # chunk 2: owner 2, starter 0, so member 1 gets it with one contribution.
    values = {"peer": 0, "chunk": 2, "hop": 1, "weight": 1, **change}
    source, route = order[values["peer"]], (values["chunk"], values["hop"], values["weight"])
    frame = FrameIn(source, "reduce", TAG, *route, b"x")
    with pytest.raises(ProtocolViolation, match=words):
        ring.on_frame(frame, 0)


def test_a_partial_sum_or_a_mean_that_comes_twice_is_a_violation() -> None:
    ring, order = ring_of_three()
    frame = FrameIn(order[0], "reduce", TAG, 2, 1, 1, b"x")
    ring.on_frame(frame, 0)
    with pytest.raises(ProtocolViolation, match="already"):
        ring.on_frame(frame, 0)
    mean = FrameIn(order[0], "gather", TAG, 2, 1, 6, b"m")
    ring.on_frame(mean, 0)
    with pytest.raises(ProtocolViolation, match="twice"):
        ring.on_frame(mean, 0)
