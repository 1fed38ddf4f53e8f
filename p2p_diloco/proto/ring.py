"""One attempt's ring all-reduce as chunk routes. Pure; payloads pass through it as opaque bytes.

A chunk with owner ``o`` starts at the peer after ``o``, visits every member once (each hop decodes, adds
its own weighted delta in fp32 and encodes) and ends at ``o``, which divides and encodes the mean once.
That payload then goes round once more verbatim, and everybody, the owner too, applies its decoded bytes.
A peer only ever sends to its right neighbour. Chunks flow independently; a starter keeps at most
``window_chunks`` of its chunks unfinished, which bounds memory everywhere on the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import PeerId, show
from p2p_diloco.proto.events import Compute, Effect, FrameIn, SendFrame
from p2p_diloco.proto.jobs import Jobs


@dataclass(frozen=True)
class RingPlan:
    """What a view fixes: the ring in order, each member's weight, and the number of chunks."""

    view_hash: bytes
    order: tuple[PeerId, ...]
    weights: tuple[int, ...]
    chunks: int

    @property
    def total_weight(self) -> int:
        return sum(self.weights)

    def owner(self, chunk: int) -> int:
        """Index of the member that completes this chunk."""
        return chunk % len(self.order)

    def starter(self, chunk: int) -> int:
        return (self.owner(chunk) + 1) % len(self.order)

    def position(self, chunk: int, member: int) -> int:
        """How many members handle the chunk before this one, on either trip."""
        return (member - self.starter(chunk)) % len(self.order)

    def weight_before(self, chunk: int, position: int) -> int:
        """The weight that a partial sum must carry after ``position`` members."""
        start = self.starter(chunk)
        return sum(self.weights[(start + i) % len(self.order)] for i in range(position))


class Ring:
    """Our part of one attempt. `done` once every chunk's mean is applied to the copy."""

    def __init__(self, plan: RingPlan, me: PeerId, window_chunks: int, jobs: Jobs, now_ns: int) -> None:
        self.plan = plan
        self.index = plan.order.index(me)
        self.right = plan.order[(self.index + 1) % len(plan.order)]
        self.left = plan.order[(self.index - 1) % len(plan.order)]
        self.weight = plan.weights[self.index]
        self._jobs = jobs
        self._window = window_chunks
        self._to_start = [c for c in range(plan.chunks) if plan.starter(c) == self.index][::-1]
        self._unfinished = 0  # our own starts whose mean has not come back
        self._reduced: set[int] = set()
        self._gathered: set[int] = set()
        self.applied: dict[int, tuple[bytes, bytes]] = {}  # chunk -> (payload hash, state leaf)
        self.finite = True
        self.started_ns = self.progress_ns = now_ns

    @property
    def done(self) -> bool:
        return len(self.applied) == self.plan.chunks

    def phase(self) -> str:
        """reduce until our first mean arrives, gather until the last is applied (named failpoints use it)."""
        return "gather" if self._gathered else "reduce"

    def start(self) -> list[Effect]:
        return self._fill_window()

    def on_frame(self, frame: FrameIn, now_ns: int) -> list[Effect]:
        """A frame of this view from a neighbour; raises ProtocolViolation if it does not fit its route."""
        plan = self.plan
        if frame.peer != self.left:
            raise ProtocolViolation(f"ring frame from {show(frame.peer)}, who is not our left neighbour")
        if frame.chunk >= plan.chunks:
            raise ProtocolViolation(f"ring frame for chunk {frame.chunk} of {plan.chunks}")
        position = plan.position(frame.chunk, self.index)
        if frame.hop != position:
            raise ProtocolViolation(f"chunk {frame.chunk} came with hop {frame.hop} instead of {position}")
        self.progress_ns = now_ns
        if frame.kind == "reduce":
            return self._on_reduce(frame, position)
        return self._on_gather(frame, position)

    def _on_reduce(self, frame: FrameIn, position: int) -> list[Effect]:
        plan = self.plan
        if position == 0 or frame.chunk in self._reduced:
            raise ProtocolViolation(f"chunk {frame.chunk} was already started here")
        if frame.weight != plan.weight_before(frame.chunk, position):
            raise ProtocolViolation(f"chunk {frame.chunk} carries weight {frame.weight}, not its members'")
        self._reduced.add(frame.chunk)
        if position == len(plan.order) - 1:
            arguments = (frame.chunk, self.weight, plan.total_weight, frame.payload)
            return [self._compute("finish", arguments, ("mean", frame.chunk))]
        sent = frame.weight + self.weight
        arguments3 = (frame.chunk, self.weight, frame.payload)
        return [self._compute("hop", arguments3, ("partial", frame.chunk, position + 1, sent))]

    def _on_gather(self, frame: FrameIn, position: int) -> list[Effect]:
        plan = self.plan
        if plan.owner(frame.chunk) == self.index or frame.chunk in self._gathered:
            raise ProtocolViolation(f"the mean of chunk {frame.chunk} came twice")
        if frame.weight != plan.total_weight:
            raise ProtocolViolation(f"the mean of chunk {frame.chunk} has weight {frame.weight}")
        self._gathered.add(frame.chunk)
        effects: list[Effect] = []
        if position + 1 < len(plan.order) - 1:
            effects.append(self._frame("gather", frame.chunk, position + 1, frame.weight, frame.payload))
        effects.append(self._compute("apply", (frame.chunk, frame.payload), ("applied", frame.chunk)))
        if plan.starter(frame.chunk) == self.index:
            self._unfinished -= 1
            effects += self._fill_window()
        return effects

    def on_computed(self, note: tuple[Any, ...], result: Any, now_ns: int) -> list[Effect]:
        """A worker finished one of our jobs; ``note`` is what was remembered with it."""
        self.progress_ns = now_ns
        what, chunk = note[0], note[1]
        if what == "partial":
            return [self._frame("reduce", chunk, note[2], note[3], result)]
        if what == "mean":
            return self._on_mean(chunk, result)
        payload_hash, leaf, finite = result
        self.applied[chunk] = (payload_hash, leaf)
        self.finite = self.finite and finite
        return []

    def _on_mean(self, chunk: int, payload: bytes) -> list[Effect]:
        self._gathered.add(chunk)
        effects: list[Effect] = []
        if len(self.plan.order) > 1:
            effects.append(self._frame("gather", chunk, 0, self.plan.total_weight, payload))
        else:
            self._unfinished -= 1
            effects += self._fill_window()
        effects.append(self._compute("apply", (chunk, payload), ("applied", chunk)))
        return effects

    def _fill_window(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._to_start and self._unfinished < self._window:
            chunk = self._to_start.pop()
            self._unfinished += 1
            self._reduced.add(chunk)
            if len(self.plan.order) == 1:
                effects.append(self._compute("single", (chunk,), ("mean", chunk)))
            else:
                note = ("partial", chunk, 1, self.weight)
                effects.append(self._compute("first", (chunk, self.weight), note))
        return effects

    def _compute(self, op: str, arguments: tuple[Any, ...], note: tuple[Any, ...]) -> Compute:
        return Compute(self._jobs.add("ring", (self.plan.view_hash, *note)), op, arguments)

    def _frame(self, kind: str, chunk: int, hop: int, weight: int, payload: bytes) -> SendFrame:
        return SendFrame(self.right, kind, self.plan.view_hash, chunk, hop, weight, payload)

    def missing(self) -> Sequence[int]:
        """Chunks not applied yet (for messages)."""
        return [c for c in range(self.plan.chunks) if c not in self.applied]
