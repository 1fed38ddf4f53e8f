"""The order of a ring that makes the most of its links, from measured rates. Pure and deterministic.

A ring is as fast as its slowest edge, so the best order is the cycle whose slowest edge is fastest (the
bottleneck travelling salesman). Exact for few peers: thresholds tried by bisection, each with the dynamic
programme of Held and Karp (1962) over sets of peers, kept as bit masks. Above that, the worst edge is moved
out of the way as long as something gets better.

A rate is known once traffic was held up on an edge. An edge without one counts as its reverse, or as fast
enough: so rings try what nobody has tried, one epoch each, and no probes are sent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from p2p_diloco.identity import PeerId
from p2p_diloco.proto.order import Edge

Rates = Mapping[tuple[PeerId, PeerId], int]  # (sender, receiver): kbit/s

_EXACT = 10  # members up to which the best cycle is found for sure: some ms at 10, four times that at 12
_STARTS = 8  # greedy orders that the heuristic begins with
_STEPS = 400_000  # what it may try in all, so that no set of rates holds up the event loop for long (guess)
_FAST = 1 << 40  # of an edge that was never slow
# The last order stays if the best one is not faster by this factor: rates that were measured differ from day
# to day by some percent, and another ring has other unknown edges (guess).
HYSTERESIS = 1.2


def fastest_order(
    base: tuple[PeerId, ...], rates: Rates, bad: frozenset[Edge], last: Sequence[PeerId] = ()
) -> tuple[PeerId, ...]:
    """The members of ``base`` in a better order, or ``base`` itself. ``last`` is the ring of the epoch
    before; it is kept while it has the same members and no other is clearly faster."""
    here = set(base)
    if len(base) < 3 or not any(a in here and b in here for a, b in rates):
        return base
    weights = _weights(base, rates, bad)
    count = len(base)
    places = {peer: place for place, peer in enumerate(base)}
    start, kept = list(range(count)), [places[peer] for peer in last if peer in places]
    valid = len(last) == count and set(last) == here
    best = _exact(weights) if count <= _EXACT else _improved([start, kept] if valid else [start], weights)
    if valid and HYSTERESIS * slowest(kept, weights) >= slowest(best, weights):
        best = kept
    elif slowest(start, weights) >= slowest(best, weights):
        best = start
    return tuple(base[place] for place in best)


def slowest(order: Sequence[int], weights: Sequence[Sequence[int]]) -> int:
    """The rate of the slowest edge of this cycle."""
    return min(weights[a][b] for a, b in zip(order, [*order[1:], order[0]], strict=True))


def _weights(base: Sequence[PeerId], rates: Rates, bad: frozenset[Edge]) -> list[list[int]]:
    def weight(a: PeerId, b: PeerId) -> int:
        if frozenset((a, b)) in bad:
            return 0
        return max(1, rates.get((a, b), rates.get((b, a), _FAST)))

    return [[weight(a, b) for b in base] for a in base]


def _exact(weights: Sequence[Sequence[int]]) -> list[int]:
    """A cycle with the largest possible slowest edge."""
    count = len(weights)
    levels = sorted({weights[a][b] for a in range(count) for b in range(count) if a != b})
    # The largest level at which a cycle exists; at the lowest one all edges are allowed.
    place = bisect_left(range(len(levels)), True, key=lambda i: _cycle(weights, levels[i]) is None)
    return _cycle(weights, levels[place - 1]) or list(range(count))


def _cycle(weights: Sequence[Sequence[int]], least: int) -> list[int] | None:
    """A cycle through all, by edges of at least this rate: `ends[mask]` are the members at which a path from
    the first one over just the members in ``mask`` can end."""
    count = len(weights)
    after = [sum(1 << b for b in range(count) if b != a and weights[a][b] >= least) for a in range(count)]
    ends = [0] * (1 << count)
    ends[1] = 1
    for mask in range(1, 1 << count, 2):
        for end in _bits(ends[mask]):
            for following in _bits(after[end] & ~mask):
                ends[mask | 1 << following] |= 1 << following
    mask = (1 << count) - 1
    closing = [end for end in _bits(ends[mask]) if after[end] & 1]
    if not closing:
        return None
    path = [closing[0]]
    while len(path) < count:
        mask ^= 1 << path[-1]
        path.append(next(end for end in _bits(ends[mask]) if after[end] >> path[-1] & 1))
    return path[::-1]


def _bits(mask: int) -> list[int]:
    """Places of the set bits, lowest first."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return found


def _improved(starts: Sequence[Sequence[int]], weights: Sequence[Sequence[int]]) -> list[int]:
    """The best that moving members away from the slowest edge makes of any of these orders, and of some that
    always go on to the fastest neighbour that is left."""
    count = len(weights)
    best, moves = list(starts[0]), _STEPS // count**2
    firsts = range(0, count, -(-count // _STARTS))
    for start in [*starts, *(_greedy(weights, first) for first in firsts)]:
        order = list(start)
        while moves > 0:
            moves -= 1
            better = _segment_moved(order, weights) or _swapped(order, weights)
            if better is None:
                break
            order = better
        if slowest(order, weights) > slowest(best, weights):
            best = order
    return best


def _greedy(weights: Sequence[Sequence[int]], first: int) -> list[int]:
    order = [first]
    rest = [b for b in range(len(weights)) if b != first]
    while rest:
        order.append(max(rest, key=lambda b: (weights[order[-1]][b], -b)))
        rest.remove(order[-1])
    return order


def _segment_moved(order: list[int], weights: Sequence[Sequence[int]]) -> list[int] | None:
    """Break the slowest edge and two others, and join the three pieces the other way round, which is the one
    way that keeps all directions; None unless the three new edges are all faster than the slowest one."""
    count = len(order)
    at = min(range(count), key=lambda i: weights[order[i]][order[(i + 1) % count]])
    ring = [*order[at + 1 :], *order[: at + 1]]  # the slowest edge closes it
    worst = weights[ring[-1]][ring[0]]
    for i in range(1, count - 1):
        if weights[ring[-1]][ring[i]] <= worst:
            continue
        for j in range(i + 1, count):
            if weights[ring[j - 1]][ring[0]] > worst and weights[ring[i - 1]][ring[j]] > worst:
                return [*ring[i:j], *ring[:i], *ring[j:]]
    return None


def _swapped(order: list[int], weights: Sequence[Sequence[int]]) -> list[int] | None:
    """Swap an end of the slowest edge with another member, if all edges that this makes are faster."""
    count = len(order)
    at = min(range(count), key=lambda i: weights[order[i]][order[(i + 1) % count]])
    worst = weights[order[at]][order[(at + 1) % count]]
    for end in (at, (at + 1) % count):
        for other in range(count):
            ring = list(order)
            ring[end], ring[other] = ring[other], ring[end]
            made = (end - 1, end, other - 1, other)
            if other != end and all(weights[ring[i % count]][ring[(i + 1) % count]] > worst for i in made):
                return ring
    return None
