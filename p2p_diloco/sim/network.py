"""The simulated internet: who is linked to whom, and what happens to what they send.

A link is like a TLS connection: ordered per direction and lane, broken as a whole. On top of that come
faults that real links do not have (single control messages lost, doubled, replayed from long ago), because
the protocol must not rest on their absence. Everything is drawn from one seeded generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

Pair = tuple[int, int]
_KEPT = 256  # messages remembered for replay


@dataclass
class Rates:
    """What happens to single control messages, as chances between 0 and 1, and how long trips take."""

    loss: float = 0.0
    duplicate: float = 0.0
    replay: float = 0.0
    delay_ns: tuple[int, int] = (2_000_000, 30_000_000)


@dataclass
class Network:
    """Pure bookkeeping; the world schedules. Indices are those of `World.peers`."""

    random: random.Random
    rates: Rates = field(default_factory=Rates)
    links: set[frozenset[int]] = field(default_factory=set)
    cut: set[frozenset[int]] = field(default_factory=set)
    mute: dict[Pair, int] = field(default_factory=dict)  # what i sends to j vanishes; since when
    clogged: dict[Pair, int] = field(default_factory=dict)  # nothing arrives before this time
    _ready: dict[tuple[int, int, str], int] = field(default_factory=dict)
    _kept: list[Callable[[], None]] = field(default_factory=list)

    def linked(self, one: int, other: int) -> bool:
        return frozenset((one, other)) in self.links

    def dialable(self, one: int, other: int) -> bool:
        """True if a handshake gets through: both directions must work."""
        if frozenset((one, other)) in self.cut:
            return False
        return (one, other) not in self.mute and (other, one) not in self.mute

    def arrival_ns(self, source: int, target: int, lane: str, now_ns: int) -> int:
        """When what is sent now arrives: after everything sent before it on the same lane."""
        key = (source, target, lane)
        due = now_ns + self.random.randint(*self.rates.delay_ns)
        due = max(due, self._ready.get(key, 0) + 1, self.clogged.get((source, target), 0) + 1)
        self._ready[key] = due
        return due

    def lost(self, source: int, target: int) -> bool:
        """True if this control message never arrives."""
        if (source, target) in self.mute:
            return True
        return self.rates.loss > 0 and self.random.random() < self.rates.loss

    def extras(self, deliver: Callable[[], None]) -> list[Callable[[], None]]:
        """Deliveries that come on top of this one: itself again, or something from the past."""
        rates, more = self.rates, []
        if rates.duplicate and self.random.random() < rates.duplicate:
            more.append(deliver)
        if rates.replay:
            if self._kept and self.random.random() < rates.replay:
                more.append(self.random.choice(self._kept))
            if len(self._kept) < _KEPT:
                self._kept.append(deliver)
            else:
                self._kept[self.random.randrange(_KEPT)] = deliver
        return more

    def heal(self) -> None:
        """Everything works from now on; links that broke may be dialled again."""
        self.cut.clear()
        self.mute.clear()
        self.clogged.clear()
        self.rates = Rates()
        self._kept.clear()
