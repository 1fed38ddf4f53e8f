"""Routes of chunks round the ring: everybody adds once, nobody sends anywhere but right."""

from __future__ import annotations

import random
from collections import deque

import pytest

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.proto.events import Compute, FrameIn, SendFrame
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.plans import Plan, Trip
from p2p_diloco.proto.ring import Finished, Ring, RingPlan
from p2p_diloco.proto.statements import RECEIPT_BYTES, Statements
from p2p_diloco.sim.signer import ToyIdentity
from p2p_diloco.wire.messages import Ready

TAG = bytes(32)
RUN = bytes(32)


def people(count: int) -> list[Statements]:
    """In the order of their ids."""
    made = [Statements(ToyIdentity(bytes([i])), RUN) for i in range(count)]
    return sorted(made, key=lambda statements: statements.me)


def plan_of(members: list[Statements], attempt: int = 0) -> Plan:
    """A plan in which the i-th member has weight i + 1."""
    bodies = [Ready(1, TAG, TAG, i + 1, TAG) for i in range(len(members))]
    readies = [member.make(body) for member, body in zip(members, bodies, strict=True)]
    return Plan.of(1, attempt, readies, bodies)


def run_ring(count: int, chunks: int, window: int, seed: int) -> dict[bytes, dict[int, bytes]]:
    """All members of a ring; payloads are sets of who added (as sorted bytes). Returns what each applied."""
    members = people(count)
    plan = RingPlan(TAG, plan_of(members), chunks)
    return drive(members, plan, window, seed, {})


def drive(
    members: list[Statements], plan: RingPlan, window: int, seed: int, kept: dict[bytes, dict[int, Finished]]
) -> dict[bytes, dict[int, bytes]]:
    """Carry effects out in a seeded order until nothing is left to do."""
    generator = random.Random(seed)
    order, count = plan.order, len(plan.order)
    jobs = {p: Jobs() for p in order}
    rings = {m.me: Ring(plan, m, window, jobs[m.me], 0, kept.get(m.me)) for m in members}
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
            case "first":
                answer = me
            case "single":
                answer = (me, b"h")
            case "hop":
                answer = bytes(sorted(effect.arguments[2] + me))
            case "finish":
                assert effect.arguments[2] == plan.total_weight
                answer = (b"mean" + bytes(sorted(effect.arguments[3] + me)), b"h")
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
    assert run_ring(1, 5, window=2, seed=0) == {people(1)[0].me: {c: b"\x00" for c in range(5)}}


def finished(chunk: int, plan: Plan, members: list[Statements], payload: bytes) -> Finished:
    """What an earlier attempt left behind of a chunk."""
    owner = members[plan.owner(chunk)]
    return Finished(owner.sign_receipt(plan.receipt(chunk, b"h")), payload, b"h")


@pytest.mark.parametrize("seed", range(5))
def test_a_reused_chunk_is_not_summed_again_and_reaches_only_those_who_lack_it(seed: int) -> None:
    members = people(5)
    old = plan_of(members, 0)
    held = {c: finished(c, old, members, b"old%d" % c) for c in (0, 3, 4)}
    # Chunk 0 is held by all, 3 by members 1 and 2, 4 by member 4 alone.
    owners = {0: (0, 1, 2, 3, 4), 3: (1, 2), 4: (4,)}
    kept = {m.me: {c: held[c] for c in owners if i in owners[c]} for i, m in enumerate(members)}
    trips = {0: Trip(old, 0, 0), 3: Trip(old, 2, 3), 4: Trip(old, 4, 4)}
    plan = RingPlan(TAG, plan_of(members, 1), 8, trips)
    applied = drive(members, plan, 4, seed, kept)
    for found in applied.values():
        assert [found[c] for c in (0, 3, 4)] == [b"old0", b"old3", b"old4"]
        assert {found[c] for c in (1, 2, 5, 6, 7)} == {b"mean" + bytes(range(5))}


def test_a_mean_without_the_receipt_of_its_owner_is_a_violation() -> None:
    ring, order = ring_of_three()
    mean = FrameIn(order[0], "gather", TAG, 2, 1, 6, bytes(RECEIPT_BYTES) + b"m")
    compute = [e for e in ring.on_frame(mean, 0) if isinstance(e, Compute)]
    assert compute[0].arguments == (2, b"m")
    with pytest.raises(ProtocolViolation, match="receipt"):
        ring.on_computed(("applied", 2), (b"h", b"l", True), 0)


def ring_of_three() -> tuple[Ring, tuple[bytes, ...]]:
    members = people(3)
    plan = RingPlan(TAG, plan_of(members), 6)
    return Ring(plan, members[1], 4, Jobs(), 0), plan.order


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
    mean = FrameIn(order[0], "gather", TAG, 2, 1, 6, bytes(RECEIPT_BYTES) + b"m")
    ring.on_frame(mean, 0)
    with pytest.raises(ProtocolViolation, match="twice"):
        ring.on_frame(mean, 0)
