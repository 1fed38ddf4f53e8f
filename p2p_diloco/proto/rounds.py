"""Finished chunks and finished rounds that this peer holds: what a later attempt reuses, and what others
that lack a result pull. Pure bookkeeping; payloads are opaque bytes, about one byte a value.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from p2p_diloco.numerics.digest import leaf_hash, merkle_root
from p2p_diloco.proto.plans import Plan, bits_of
from p2p_diloco.proto.ring import Finished, Ring
from p2p_diloco.wire.messages import MAX_REUSE, Holding

_ROUNDS = 3  # rounds kept in memory: the one that is voted on, and the two certified before it (guess)


@dataclass(frozen=True)
class Round:
    """All payloads of one result, and their leaf hashes, in chunk order."""

    epoch: int
    state_root: bytes
    hashes: tuple[bytes, ...]
    payloads: tuple[bytes, ...]

    @classmethod
    def of(cls, epoch: int, state_root: bytes, payloads: Iterable[bytes]) -> Round:
        held = tuple(payloads)
        return cls(epoch, state_root, tuple(leaf_hash(i, p) for i, p in enumerate(held)), held)

    def chunk_root(self) -> bytes:
        return merkle_root(self.hashes)


class Rounds:
    """Finished rounds by chunk root; the oldest go first."""

    def __init__(self, restored: Iterable[Round] = ()) -> None:
        self._held: OrderedDict[bytes, Round] = OrderedDict()
        for held in restored:
            self.add(held)

    def add(self, held: Round) -> None:
        root = held.chunk_root()
        self._held[root] = held
        self._held.move_to_end(root)
        while len(self._held) > _ROUNDS:
            self._held.popitem(last=False)

    def get(self, chunk_root: bytes) -> Round | None:
        return self._held.get(chunk_root)


class FinishedChunks:
    """Chunks that this peer holds complete in the current epoch, by the plan whose deltas they sum."""

    def __init__(self) -> None:
        self._plans: dict[bytes, Plan] = {}
        self._chunks: dict[bytes, dict[int, Finished]] = {}
        self._applied: dict[int, tuple[bytes, bytes]] = {}  # what the copy holds: payload hash, state leaf

    def take(self, ring: Ring) -> None:
        """Keep what an attempt that is over has finished."""
        for chunk, held in ring.finished.items():
            plan = ring.plan.plan_of(chunk)
            self._plans[plan.name] = plan
            self._chunks.setdefault(plan.name, {})[chunk] = held
        self._applied = dict(ring.applied)

    def copy_is_lost(self) -> None:
        """Something else went into the copy."""
        self._applied = {}

    def holdings(self) -> tuple[Holding, ...]:
        """What a promise shows: the newest plans first."""
        newest = sorted(self._plans.values(), key=lambda plan: (plan.attempt, plan.name), reverse=True)
        return tuple(Holding(plan.name, bits_of(self._chunks[plan.name])) for plan in newest[:MAX_REUSE])

    def plans(self) -> list[Plan]:
        return [self._plans[name] for name in sorted(self._plans)]

    def kept(self, plans: Mapping[int, Plan]) -> dict[int, Finished]:
        """Of the chunks that a view reuses from these plans, those that we hold."""
        found = {c: self._chunks.get(plan.name, {}).get(c) for c, plan in plans.items()}
        return {chunk: held for chunk, held in found.items() if held is not None}

    def applied(self, kept: Mapping[int, Finished]) -> dict[int, tuple[bytes, bytes]]:
        """Of these, those whose outer step the copy still holds."""
        return {
            chunk: self._applied[chunk]
            for chunk, held in kept.items()
            if chunk in self._applied and self._applied[chunk][0] == held.payload_hash
        }
