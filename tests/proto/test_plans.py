"""What a ring sums and takes over: bit maps, plans, the choice of what is reused, and its trips."""

from __future__ import annotations

import random

import pytest
from support.statements import Cast

from p2p_diloco.identity import PeerId
from p2p_diloco.proto.plans import Plan, Source, Trip, bits_of, choose_reuse, chunks_in, held_by, trips
from p2p_diloco.wire.messages import MAX_REUSE, Holding, Receipt


@pytest.fixture(scope="module")
def cast() -> Cast:
    return Cast(5)


def holding(plan: Plan, *chunks: int) -> Holding:
    return Holding(plan.name, bits_of(chunks))


def ids(cast: Cast) -> list[PeerId]:
    return [speaker.me for speaker in cast.speak]


def test_a_bit_map_gives_back_its_chunks_in_order_and_is_never_empty() -> None:
    generator = random.Random(1)
    for size in range(200):
        chunks = generator.sample(range(700), size)
        assert chunks_in(bits_of(chunks)) == tuple(sorted(chunks))
    assert bits_of([]) == b"\x00"
    assert bits_of([0]) == b"\x01"
    assert bits_of([7, 8, 8]) == b"\x80\x01"
    assert chunks_in(b"") == ()
    assert chunks_in(b"\x01\x00\x00") == (0,), "zeros at the end change nothing"


def test_a_plan_is_named_by_its_epoch_its_attempt_and_its_readies_in_order(cast: Cast) -> None:
    plan = cast.plan([0, 1, 2])
    assert cast.plan([0, 1, 2]) == plan
    others = [
        cast.plan([1, 0, 2]),
        cast.plan([0, 1]),
        cast.plan([0, 1, 2], attempt=1),
        cast.plan([0, 1, 2], weights=(10, 10, 11)),
        Plan.of(plan.epoch + 1, 0, plan.readies, plan.bodies),
    ]
    assert len({plan.name, *(other.name for other in others)}) == 6


def test_a_plan_knows_its_members_weights_and_owners(cast: Cast) -> None:
    plan = cast.plan([2, 0, 1], weights=(3, 4, 5))
    assert plan.order == (cast.speak[2].me, cast.speak[0].me, cast.speak[1].me)
    assert plan.weights == (3, 4, 5)
    assert plan.total_weight == 12
    assert [plan.owner(chunk) for chunk in range(5)] == [0, 1, 2, 0, 1]
    assert plan.owner_key(4) == cast.speak[0].public_key
    assert plan.receipt(4, bytes(32)) == Receipt(1, plan.name, 4, bytes(32), b"\x07")


def test_a_receipt_holds_for_one_chunk_of_one_plan_by_its_owner_only(cast: Cast) -> None:
    plan, other = cast.plan([0, 1, 2]), cast.plan([0, 1, 2], attempt=1)
    signature = cast.speak[1].sign_receipt(plan.receipt(1, bytes(32)))
    judge = cast.speak[4]
    assert judge.is_receipt(plan.receipt(1, bytes(32)), plan.owner_key(1), signature)
    for receipt, key in (
        (plan.receipt(4, bytes(32)), plan.owner_key(4)),
        (plan.receipt(1, bytes([1]) * 32), plan.owner_key(1)),
        (other.receipt(1, bytes(32)), plan.owner_key(1)),
        (plan.receipt(1, bytes(32)), plan.owner_key(0)),
    ):
        assert not judge.is_receipt(receipt, key, signature)
    assert not judge.is_receipt(plan.receipt(1, bytes(32)), plan.owner_key(1), bytes(64))


def test_holders_are_those_who_say_so_of_this_plan(cast: Cast) -> None:
    plan, other = cast.plan([0, 1]), cast.plan([0, 1], attempt=1)
    a, b, c = ids(cast)[:3]
    finished = {c: (holding(plan, 4),), a: (holding(plan, 1, 4), holding(other, 9)), b: (holding(other, 1),)}
    assert held_by(finished, plan.name) == {1: [a], 4: [a, c]}
    assert held_by(finished, bytes(32)) == {}


def test_each_chunk_is_reused_from_the_newest_plan_that_somebody_holds_it_of(cast: Cast) -> None:
    old, new = cast.plan([0, 1, 2]), cast.plan([0, 1], attempt=2)
    a, b = ids(cast)[:2]
    finished = {a: (holding(old, 0, 1, 2),), b: (holding(new, 1, 5), holding(old, 3))}
    chosen = choose_reuse([old, new], finished, 6)
    assert [(reuse.attempt, chunks_in(reuse.chunks)) for reuse in chosen] == [(2, (1, 5)), (0, (0, 2, 3))]
    assert [reuse.readies for reuse in chosen] == [new.readies, old.readies]
    assert choose_reuse([new, old, new], finished, 6) == chosen, "neither order nor repetition matters"


def test_chunks_that_do_not_exist_and_plans_that_nobody_knows_are_not_reused(cast: Cast) -> None:
    known, unknown = cast.plan([0, 1]), cast.plan([1, 0])
    a = ids(cast)[0]
    finished = {a: (holding(known, 2, 6, 700), holding(unknown, 1))}
    [reuse] = choose_reuse([known], finished, 6)
    assert chunks_in(reuse.chunks) == (2,)
    assert choose_reuse([known], {}, 6) == ()
    assert choose_reuse([known], {a: (holding(known, 6),)}, 6) == ()


def test_no_more_plans_are_reused_than_a_view_may_name_and_they_are_the_newest(cast: Cast) -> None:
    plans = [cast.plan([0, 1], attempt=attempt) for attempt in range(MAX_REUSE + 3)]
    a = ids(cast)[0]
    finished = {a: tuple(holding(plan, plan.attempt) for plan in plans)}
    chosen = choose_reuse(plans, finished, 100)
    assert [reuse.attempt for reuse in chosen] == [6, 5, 4, 3]


def test_a_plan_of_which_all_is_taken_already_does_not_use_up_a_place(cast: Cast) -> None:
    plans = [cast.plan([0, 1], attempt=attempt) for attempt in range(6)]
    a = ids(cast)[0]
    finished = {a: (*(holding(plan, 1) for plan in plans[1:]), holding(plans[0], 2))}
    assert [reuse.attempt for reuse in choose_reuse(plans, finished, 10)] == [5, 0]


def reached(trip: Trip, count: int) -> list[int]:
    return [(trip.start + hop) % count for hop in range(1, trip.hops + 1)]


def test_a_trip_reaches_all_who_lack_the_chunk_by_the_fewest_hops(cast: Cast) -> None:
    ring, plan = ids(cast), cast.plan([0, 1, 2])
    generator = random.Random(2)
    for _ in range(200):
        at = sorted(generator.sample(range(5), generator.randint(1, 5)))
        finished = {ring[place]: (holding(plan, 3),) for place in at}
        trip = trips([Source(plan, (3,))], ring, finished)[3]
        lacking = set(range(5)) - set(at)
        assert trip.start in at
        assert lacking <= set(reached(trip, 5))
        assert trip.start not in reached(trip, 5)
        if lacking:
            assert reached(trip, 5)[-1] in lacking, "nobody after the last one who lacks it"
            shortest = min(max((place - start) % 5 for place in lacking) for start in at)
            assert trip.hops == shortest
        else:
            assert trip.hops == 0


def test_each_reused_chunk_has_the_trip_of_its_own_source(cast: Cast) -> None:
    old, new = cast.plan([0, 1, 2]), cast.plan([0, 1], attempt=1)
    ring = ids(cast)[:3]
    finished = {
        ring[0]: (holding(new, 0), holding(old, 7)),
        ring[2]: (holding(old, 7, 8),),
        ids(cast)[4]: (holding(old, 7),),  # not in this ring
    }
    found = trips([Source(new, (0,)), Source(old, (7, 8))], ring, finished)
    assert found == {0: Trip(new, 0, 2), 7: Trip(old, 0, 1), 8: Trip(old, 2, 2)}
    assert trips([], ring, finished) == {}


def test_a_chunk_that_no_member_of_the_ring_holds_has_no_trip(cast: Cast) -> None:
    plan, other = cast.plan([0, 1, 2]), cast.plan([0, 1], attempt=1)
    ring = ids(cast)[:3]
    elsewhere = {ids(cast)[4]: (holding(plan, 4),), ring[0]: (holding(other, 4), holding(plan, 3))}
    with pytest.raises(KeyError) as missing:
        trips([Source(plan, (3, 4))], ring, elsewhere)
    assert missing.value.args == (4,)
