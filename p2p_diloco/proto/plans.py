"""What a ring of one attempt sums and what it takes over from earlier attempts. Pure data and functions.

A `Plan` is an attempt's ring as far as the content of its chunks depends on it: members in order, their
READYs, so their deltas and weights. Its name is signed into the receipt of every chunk that it finished.
A later attempt may reuse such chunks, each with the contributors of its own plan (docs/DESIGN.md, 8).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from p2p_diloco.identity import PeerId, peer_id_of
from p2p_diloco.wire.messages import MAX_REUSE, Holding, Ready, Receipt, Reuse, Signed


@dataclass(frozen=True)
class Plan:
    """One attempt's ring. `readies` in ring order; `bodies` are what they say."""

    epoch: int
    attempt: int
    readies: tuple[Signed, ...]
    bodies: tuple[Ready, ...]
    order: tuple[PeerId, ...]
    name: bytes

    @classmethod
    def of(cls, epoch: int, attempt: int, readies: Sequence[Signed], bodies: Sequence[Ready]) -> Plan:
        """The plan of checked READYs."""
        hasher = hashlib.sha256(b"p2p-diloco/plan\0" + epoch.to_bytes(8, "big") + attempt.to_bytes(8, "big"))
        for signed in readies:
            hasher.update(signed.digest())
        order = tuple(peer_id_of(signed.public_key) for signed in readies)
        return cls(epoch, attempt, tuple(readies), tuple(bodies), order, hasher.digest())

    @property
    def members(self) -> tuple[tuple[PeerId, Ready], ...]:
        return tuple(zip(self.order, self.bodies, strict=True))

    @property
    def weights(self) -> tuple[int, ...]:
        return tuple(body.weight for body in self.bodies)

    @property
    def total_weight(self) -> int:
        return sum(body.weight for body in self.bodies)

    def owner(self, chunk: int) -> int:
        """Index of the member that completes this chunk."""
        return chunk % len(self.order)

    def owner_key(self, chunk: int) -> bytes:
        return self.readies[self.owner(chunk)].public_key

    def receipt(self, chunk: int, payload_hash: bytes) -> Receipt:
        """What the owner of a finished chunk signs. All members contribute to each chunk of a ring."""
        everyone = bits_of(range(len(self.order)))
        return Receipt(self.epoch, self.name, chunk, payload_hash, everyone)


@dataclass(frozen=True)
class Source:
    """Chunks that a view takes over from an earlier attempt."""

    plan: Plan
    chunks: tuple[int, ...]


@dataclass(frozen=True)
class Trip:
    """How one reused chunk gets to the ring members that lack it: from the member at index ``start`` to the
    ``hops`` members after it. No hops: everybody holds it."""

    plan: Plan
    start: int
    hops: int


def bits_of(chunks: Iterable[int]) -> bytes:
    """A bit map with these bits set; at least one byte long."""
    value = 0
    for chunk in chunks:
        value |= 1 << chunk
    return value.to_bytes(max(1, (value.bit_length() + 7) // 8), "little")


def chunks_in(bitmap: bytes) -> tuple[int, ...]:
    """The set bits in order."""
    return tuple(
        8 * place + bit for place, byte in enumerate(bitmap) if byte for bit in range(8) if byte >> bit & 1
    )


def held_by(finished: Mapping[PeerId, Sequence[Holding]], plan: bytes) -> dict[int, list[PeerId]]:
    """Which peers said that they hold which chunks of a plan."""
    holders: dict[int, list[PeerId]] = {}
    for peer in sorted(finished):
        for holding in finished[peer]:
            if holding.plan == plan:
                for chunk in chunks_in(holding.chunks):
                    holders.setdefault(chunk, []).append(peer)
    return holders


def choose_reuse(
    plans: Iterable[Plan], finished: Mapping[PeerId, Sequence[Holding]], chunks: int
) -> tuple[Reuse, ...]:
    """What the next attempt should take over: each chunk from the newest plan that somebody holds it of.
    ``finished``: what the members of the new ring hold."""
    taken: set[int] = set()
    chosen: list[Reuse] = []
    for plan in sorted(plans, key=lambda plan: (plan.attempt, plan.name), reverse=True):
        here = [c for c in sorted(held_by(finished, plan.name)) if c not in taken and c < chunks]
        if here and len(chosen) < MAX_REUSE:
            taken.update(here)
            chosen.append(Reuse(plan.attempt, plan.readies, bits_of(here)))
    return tuple(chosen)


def trips(
    sources: Iterable[Source], ring: Sequence[PeerId], finished: Mapping[PeerId, Sequence[Holding]]
) -> dict[int, Trip]:
    """The trip of every reused chunk; the same on every member, since all of it comes from the view. Raises
    KeyError with the chunk's number if no member of the ring holds it."""
    places = {peer: index for index, peer in enumerate(ring)}
    found: dict[int, Trip] = {}
    for source in sources:
        holders = held_by(finished, source.plan.name)
        for chunk in source.chunks:
            at = [places[peer] for peer in holders.get(chunk, ()) if peer in places]
            if not at:
                raise KeyError(chunk)
            lacking = [place for place in range(len(ring)) if place not in at]
            start = min(at, key=lambda here: (_farthest(here, lacking, len(ring)), here))
            found[chunk] = Trip(source.plan, start, _farthest(start, lacking, len(ring)))
    return found


def _farthest(start: int, lacking: Iterable[int], count: int) -> int:
    return max(((place - start) % count for place in lacking), default=0)
