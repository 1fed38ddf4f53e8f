"""Ring orders by speed, against all orders where there are few peers."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from p2p_diloco.identity import PeerId
from p2p_diloco.proto.speed import HYSTERESIS, Rates, fastest_order


def peers(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(bytes([i]) * 32) for i in range(count))


def draw(here: tuple[PeerId, ...], seed: int, known: float = 1.0) -> dict[tuple[PeerId, PeerId], int]:
    dice = random.Random(seed)
    pairs = list(itertools.permutations(here, 2))
    return {pair: dice.choice([10, 50, 100, 200, 500, 1000]) for pair in pairs if dice.random() < known}


def slowest(order: tuple[PeerId, ...], rates: Rates) -> int:
    """Of the edges that somebody measured."""
    ring = zip(order, [*order[1:], order[0]], strict=True)
    return min((rates[edge] for edge in ring if edge in rates), default=1 << 40)


def best(here: tuple[PeerId, ...], rates: Rates) -> int:
    """Brute force."""
    return max(slowest((here[0], *rest), rates) for rest in itertools.permutations(here[1:]))


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7])
def test_no_order_has_a_faster_slowest_edge(count: int) -> None:
    here = peers(count)
    for seed in range(20):
        rates = draw(here, seed)
        order = fastest_order(here, rates, frozenset())
        assert sorted(order) == sorted(here)
        assert slowest(order, rates) * HYSTERESIS >= best(here, rates)
        if slowest(here, rates) * HYSTERESIS < best(here, rates):
            assert slowest(order, rates) == best(here, rates)


def test_above_ten_peers_the_heuristic_is_near_the_best_and_never_worse_than_by_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = []
    for seed in range(30):
        here = peers(9)
        rates = draw(here, seed)
        exact = slowest(fastest_order(here, rates, frozenset()), rates)
        with monkeypatch.context() as patch:
            patch.setattr("p2p_diloco.proto.speed._EXACT", 2)
            found = slowest(fastest_order(here, rates, frozenset()), rates)
        assert found >= slowest(here, rates)
        shares.append(min(1.0, found / exact))
    assert statistics.mean(shares) > 0.9, shares
    for count in (11, 14, 40, 64, 256):
        here = peers(count)
        rates = draw(here, count)
        order = fastest_order(here, rates, frozenset())
        assert sorted(order) == sorted(here)
        assert slowest(order, rates) > slowest(here, rates)


def test_without_a_rate_nothing_changes_and_one_or_two_have_no_choice() -> None:
    here = peers(6)
    assert fastest_order(here, {}, frozenset()) == here
    elsewhere = {(PeerId(b"x" * 32), here[0]): 5}
    assert fastest_order(here, elsewhere, frozenset()) == here
    for count in (0, 1, 2):
        few = peers(count)
        assert fastest_order(few, draw(few, 1), frozenset()) == few


def test_an_edge_that_nobody_measured_is_tried_and_its_reverse_speaks_for_it() -> None:
    here = peers(4)
    a, b, c, d = here
    order = fastest_order(here, {(a, b): 10}, frozenset())
    edges = set(zip(order, [*order[1:], order[0]], strict=True))
    assert (a, b) not in edges
    assert (b, a) not in edges, "measured one way, and supposed to be alike the other"
    both = {(a, b): 10, (b, a): 1000, (c, d): 10, (d, c): 1000}
    order = fastest_order(here, both, frozenset())
    assert slowest(order, both) == 1 << 40 or slowest(order, both) == 1000


def test_the_last_order_stays_until_another_is_clearly_faster() -> None:
    here = peers(5)
    rates = {edge: 100 for edge in itertools.permutations(here, 2)}
    last = (here[0], here[3], here[1], here[4], here[2])
    assert fastest_order(here, rates, frozenset(), last) == last
    rates[last[0], last[1]] = 85
    assert fastest_order(here, rates, frozenset(), last) == last, "a sixth is no reason to change"
    rates[last[0], last[1]] = 70
    changed = fastest_order(here, rates, frozenset(), last)
    assert slowest(changed, rates) == 100
    fewer = here[:4]
    assert sorted(fastest_order(fewer, rates, frozenset(), last)) == sorted(fewer), "who left is not in it"


def test_a_link_that_turns_slow_is_left_out_once_it_is_measured_again() -> None:
    here = peers(6)
    rates = {edge: 500 for edge in itertools.permutations(here, 2)}
    last = fastest_order(here, rates, frozenset(), here)
    rates[last[2], last[3]] = 20
    after = fastest_order(here, rates, frozenset(), last)
    assert (last[2], last[3]) not in set(zip(after, [*after[1:], after[0]], strict=True))
    assert slowest(after, rates) == 500


def test_no_speed_brings_a_broken_link_back_into_the_ring() -> None:
    for count in (5, 12):
        here = peers(count)
        rates = draw(here, 3)
        bad = frozenset({frozenset((here[0], here[2])), frozenset((here[1], here[3]))})
        rates.update({edge: 100_000 for edge in itertools.permutations(here, 2) if frozenset(edge) in bad})
        order = fastest_order(here, rates, bad)
        assert all(frozenset(edge) not in bad for edge in zip(order, [*order[1:], order[0]], strict=True))


def test_all_peers_come_to_the_same_order_whatever_they_heard_first() -> None:
    here = peers(8)
    rates = draw(here, 9, known=0.6)
    backwards = dict(reversed(list(rates.items())))
    assert fastest_order(here, rates, frozenset()) == fastest_order(here, backwards, frozenset())
