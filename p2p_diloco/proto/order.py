"""The order of a ring around links that do not work. Pure and deterministic.

A bad edge costs nobody its place as long as some cycle avoids it. Exact search for small rings, repair by
swaps above; if no cycle avoids all bad edges, the peers with the most of them are left out, the fewest that
help. (Ring orders by measured speed are a matter of the data plane; they will come through here too.)
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from itertools import combinations

from p2p_diloco.identity import PeerId

Edge = frozenset[PeerId]
_EXACT = 10  # members up to which all orders may be tried: some 10^5 steps at worst
_EXACT_SUBSETS = 8  # members up to which all ways to leave some out are tried
_SWEEPS = 8


def ring_order(
    peers: Iterable[PeerId], bad: frozenset[Edge], keep: frozenset[PeerId] = frozenset()
) -> tuple[PeerId, ...]:
    """A cycle through as many of ``peers`` as possible whose neighbours are not in ``bad``.

    Peers in ``keep`` are left out last. Starts from the sorted order and changes no more than it must.
    """
    here = sorted(peers)
    if len(here) <= _EXACT_SUBSETS:
        return _fewest_out(here, bad, keep)
    while True:
        found = _cycle(here, bad)
        if found is not None or len(here) <= 1:
            return tuple(found or here)
        here.remove(_leave_out_first(here, bad, keep)[0])


def _fewest_out(here: list[PeerId], bad: frozenset[Edge], keep: frozenset[PeerId]) -> tuple[PeerId, ...]:
    candidates = _leave_out_first(here, bad, keep)
    for count in range(len(here)):
        for out in combinations(candidates, count):
            found = _cycle([peer for peer in here if peer not in out], bad)
            if found is not None:
                return tuple(found)
    return tuple(here)


def _leave_out_first(here: Sequence[PeerId], bad: frozenset[Edge], keep: frozenset[PeerId]) -> list[PeerId]:
    """In the order in which peers are left out: only those with bad edges help, those in ``keep`` come after
    others, then the one with the most bad edges, then the last one."""

    def cost(peer: PeerId) -> tuple[bool, bool, int, PeerId]:
        count = sum(1 for other in here if frozenset((peer, other)) in bad)
        return count > 0, peer not in keep, count, peer

    return sorted(here, key=cost, reverse=True)


def _cycle(here: Sequence[PeerId], bad: frozenset[Edge]) -> list[PeerId] | None:
    if not any(edge <= set(here) for edge in bad):
        return list(here)
    if len(here) <= 2:
        return None if frozenset(here) in bad else list(here)
    if len(here) <= _EXACT:
        return _search([here[0]], list(here[1:]), bad)
    return _repair(list(here), bad)


def _search(path: list[PeerId], rest: list[PeerId], bad: frozenset[Edge]) -> list[PeerId] | None:
    """Depth first, in sorted order: the first cycle is the least one."""
    if not rest:
        return None if frozenset((path[-1], path[0])) in bad else list(path)
    for index, peer in enumerate(rest):
        if frozenset((path[-1], peer)) not in bad:
            found = _search([*path, peer], rest[:index] + rest[index + 1 :], bad)
            if found is not None:
                return found
    return None


def _repair(order: list[PeerId], bad: frozenset[Edge]) -> list[PeerId] | None:
    """Reverse stretches of the ring as long as that removes bad edges (2-opt)."""
    count = len(order)

    def badness(index: int) -> int:
        return frozenset((order[index % count], order[(index + 1) % count])) in bad

    for _ in range(_SWEEPS):
        wrong = [i for i in range(count) if badness(i)]
        if not wrong:
            return order
        for i in wrong:
            for j in range(i + 2, i + count - 1):
                before = badness(i) + badness(j)
                low, high = i + 1, j
                stretch = [order[k % count] for k in range(low, high + 1)]
                for k, peer in zip(range(low, high + 1), reversed(stretch), strict=True):
                    order[k % count] = peer
                if badness(i) + badness(j) < before:
                    break
                for k, peer in zip(range(low, high + 1), stretch, strict=True):
                    order[k % count] = peer
    return order if not any(badness(i) for i in range(count)) else None


def fingers(me: PeerId, peers: Iterable[PeerId]) -> list[PeerId]:
    """Of these peers, those 1, 2, 4, 8... places after ``me`` on the circle of ids: if each passes news on to
    its own, all have it after about log2(n) hops (as in Chord, Stoica et al. 2001, section 4)."""
    circle = sorted(set(peers) - {me})
    start = bisect(circle, me)
    steps = (1 << i for i in range(len(circle).bit_length()))
    return [circle[(start + step - 1) % len(circle)] for step in steps if step <= len(circle)]
