"""The order of a ring around links that do not work, against all orders where there are few peers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from p2p_diloco.identity import PeerId
from p2p_diloco.proto.order import Edge, fingers, ring_order


def peers(count: int) -> list[PeerId]:
    return [PeerId(bytes([i]) * 32) for i in range(count)]


def edges(here: Sequence[PeerId]) -> list[Edge]:
    return [frozenset(pair) for pair in itertools.combinations(here, 2)]


def bad_edges(here: Sequence[PeerId], *pairs: tuple[int, int]) -> frozenset[Edge]:
    return frozenset(frozenset((here[a], here[b])) for a, b in pairs)


def works(order: Sequence[PeerId], bad: frozenset[Edge]) -> bool:
    """True if no two neighbours of this ring are a bad edge."""
    if len(order) < 2:
        return True
    return all(frozenset(pair) not in bad for pair in zip(order, [*order[1:], order[0]], strict=True))


def possible(here: Sequence[PeerId], bad: frozenset[Edge]) -> bool:
    """Brute force: does any ring hold all of them?"""
    return any(works((here[0], *rest), bad) for rest in itertools.permutations(here[1:]))


def most(here: Sequence[PeerId], bad: frozenset[Edge]) -> int:
    """Brute force: how many of them fit into one ring at most."""
    sizes = range(len(here), 0, -1)
    return next(k for k in sizes if any(possible(some, bad) for some in itertools.combinations(here, k)))


def test_without_a_bad_edge_the_ring_is_sorted() -> None:
    for count in range(20):
        here = peers(count)
        shuffled = random.Random(count).sample(here, count)
        assert ring_order(shuffled, frozenset()) == tuple(here)
        elsewhere = bad_edges(peers(40), (30, 31), (0, 30))
        assert ring_order(shuffled, elsewhere) == tuple(here), "edges of peers that are not here"


@pytest.mark.parametrize("count", [4, 5, 6, 7, 8, 11, 16])
def test_a_single_bad_edge_costs_nobody_its_place(count: int) -> None:
    here = peers(count)
    for edge in edges(here):
        order = ring_order(here, frozenset((edge,)))
        assert sorted(order) == here
        assert works(order, frozenset((edge,)))


def test_of_two_peers_with_a_bad_edge_one_stays_and_it_is_the_one_to_keep() -> None:
    here = peers(2)
    bad = bad_edges(here, (0, 1))
    assert len(ring_order(here, bad)) == 1
    for one in here:
        assert ring_order(here, bad, frozenset((one,))) == (one,)


def test_of_three_peers_with_a_bad_edge_exactly_one_is_left_out_and_none_to_keep_if_avoidable() -> None:
    here = peers(3)
    for one, two in itertools.combinations(here, 2):
        bad = frozenset((frozenset((one, two)),))
        [third] = set(here) - {one, two}
        for keep in ((), (one,), (two,), (third,), (one, third), (two, third)):
            order = ring_order(here, bad, frozenset(keep))
            assert len(order) == 2
            assert works(order, bad)
            assert set(keep) <= set(order)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_a_peer_without_a_bad_edge_is_not_left_out_in_place_of_one_with_it(count: int) -> None:
    """Two voters whose link is broken, and newcomers that reach both: one voter goes, nobody else. (With
    four or more peers, one voter is cut off from all the others.)"""
    here = peers(count)
    keep = frozenset(here[:2])
    bad = bad_edges(here, (0, 1), *((0, other) for other in range(2, count - 1)))
    order = ring_order(here, bad, keep)
    assert most(here, bad) == count - 1
    assert len(order) == count - 1


def test_no_more_peers_are_left_out_than_must_be() -> None:
    here = peers(6)
    bad = bad_edges(here, (0, 1), (0, 3), (0, 4), (1, 3), (1, 4), (3, 5))
    assert most(here, bad) == 5
    assert len(ring_order(here, bad)) == 5


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6, 7])
def test_a_ring_of_all_is_found_exactly_if_there_is_one(count: int) -> None:
    here = peers(count)
    generator = random.Random(count)
    for _ in range(60):
        bad = frozenset(generator.sample(edges(here), generator.randint(0, len(edges(here)))))
        order = ring_order(here, bad)
        assert works(order, bad)
        assert (len(order) == count) == possible(here, bad)


def test_the_order_changes_no_more_than_it_must() -> None:
    here = peers(8)
    order = ring_order(here, bad_edges(here, (6, 7)))
    assert order[:5] == tuple(here[:5])


@pytest.mark.parametrize("count", [11, 16, 40])
def test_larger_rings_are_repaired(count: int) -> None:
    here = peers(count)
    generator = random.Random(count)
    for bad_count in (1, 2, 3, 5, 8):
        for _ in range(20):
            bad = frozenset(generator.sample(edges(here), bad_count))
            order = ring_order(here, bad)
            assert sorted(order) == here
            assert works(order, bad)


def test_a_large_ring_leaves_out_a_peer_that_nobody_reaches_and_no_other() -> None:
    here = peers(14)
    bad = bad_edges(here, *((5, other) for other in range(14) if other != 5))
    order = ring_order(here, bad)
    assert set(here) - set(order) == {here[5]}
    assert works(order, bad)


def test_the_order_depends_on_nothing_but_peers_and_edges() -> None:
    generator = random.Random(3)
    for count in (4, 7, 12):
        here = peers(count)
        bad = generator.sample(edges(here), count)
        keep = generator.sample(here, count // 2)
        first = ring_order(here, frozenset(bad), frozenset(keep))
        for _ in range(5):
            generator.shuffle(bad)
            generator.shuffle(keep)
            shuffled = generator.sample(here, count)
            assert ring_order(shuffled, frozenset(bad), frozenset(keep)) == first


def test_two_groups_that_do_not_reach_each_other_give_a_ring_of_one_of_them() -> None:
    here = peers(9)
    bad = bad_edges(here, *itertools.product(range(4), range(4, 9)))
    order = ring_order(here, bad)
    assert set(order) == set(here[4:])
    assert works(order, bad)


def test_everybody_cut_off_from_everybody_leaves_a_ring_of_one() -> None:
    here = peers(6)
    assert len(ring_order(here, frozenset(edges(here)))) == 1
    assert len(ring_order(here, frozenset(edges(here)), frozenset(here[2:3]))) == 1
    assert ring_order(here, frozenset(edges(here)), frozenset(here[2:3])) == (here[2],)


# --- whom to tell ---


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9, 31, 64, 100, 256])
def test_news_passed_on_to_fingers_reaches_all_in_few_hops_and_copies(count: int) -> None:
    here = peers(count)
    for start in (here[0], here[-1], here[count // 3]):
        told, front, hops, copies = {start}, [start], 0, 0
        while front:
            aims = [aim for peer in front for aim in fingers(peer, here)]
            copies += len(aims)
            front = sorted(set(aims) - told)
            told |= set(front)
            hops += bool(front)
        assert told == set(here)
        assert hops <= count.bit_length()
        assert copies <= count * count.bit_length()


def test_fingers_are_others_and_no_peer_twice() -> None:
    assert fingers(peers(1)[0], []) == []
    here = peers(20)
    for me in here:
        found = fingers(me, here)
        assert me not in found
        assert len(found) == len(set(found)) == 5
    assert fingers(here[0], here[1:2]) == [here[1]]
