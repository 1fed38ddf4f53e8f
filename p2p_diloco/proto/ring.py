"""One attempt's ring all-reduce as chunk routes. Pure; payloads pass through it as opaque bytes.

A chunk with owner ``o`` starts at the peer after ``o``, visits every member once (each hop decodes, adds
its own weighted delta in fp32 and encodes) and ends at ``o``, which divides and encodes the mean once.
That payload then goes round once more verbatim, with the owner's receipt in front, and everybody, the owner
too, applies its decoded bytes. A chunk that an earlier attempt finished makes only such a second trip, to
those who lack it. A peer only ever sends to its right neighbour. Chunks flow independently; a starter keeps
at most ``window_chunks`` of its chunks unfinished, which bounds memory everywhere on the ring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import PeerId, show
from p2p_diloco.proto.events import Compute, Effect, FrameIn, SendFrame
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.plans import Plan, Trip
from p2p_diloco.proto.statements import RECEIPT_BYTES, Statements


@dataclass(frozen=True)
class Finished:
    """A chunk's mean as its owner made it: the receipt's signature, the payload, and its leaf hash."""

    receipt: bytes
    payload: bytes
    payload_hash: bytes

    @property
    def packet(self) -> bytes:
        """What travels."""
        return self.receipt + self.payload


@dataclass(frozen=True)
class RingPlan:
    """What a view fixes: the ring, the number of chunks, and the trips of those that are reused."""

    view_hash: bytes
    plan: Plan
    chunks: int
    trips: Mapping[int, Trip] = field(default_factory=dict)

    @property
    def order(self) -> tuple[PeerId, ...]:
        return self.plan.order

    @property
    def weights(self) -> tuple[int, ...]:
        return self.plan.weights

    @property
    def total_weight(self) -> int:
        return self.plan.total_weight

    def plan_of(self, chunk: int) -> Plan:
        """Whose deltas this chunk sums."""
        trip = self.trips.get(chunk)
        return self.plan if trip is None else trip.plan

    def owner(self, chunk: int) -> int:
        """Index of the member that completes this chunk."""
        return self.plan.owner(chunk)

    def starter(self, chunk: int) -> int:
        return (self.owner(chunk) + 1) % len(self.order)

    def position(self, chunk: int, member: int) -> int:
        """How many members handle the chunk before this one, on either trip; on the only trip of a reused
        chunk those after the member that it starts from."""
        trip = self.trips.get(chunk)
        first = self.starter(chunk) if trip is None else trip.start + 1
        return (member - first) % len(self.order)

    def weight_before(self, chunk: int, position: int) -> int:
        """The weight that a partial sum must carry after ``position`` members."""
        start = self.starter(chunk)
        return sum(self.weights[(start + i) % len(self.order)] for i in range(position))

    def hops(self, chunk: int) -> int:
        """How many members the finished chunk is sent to."""
        trip = self.trips.get(chunk)
        return len(self.order) - 1 if trip is None else trip.hops


class Ring:
    """Our part of one attempt. `done` once every chunk's mean is applied to the copy. ``kept``: chunks that
    we hold from earlier attempts; ``applied``: those of them that are in the copy already."""

    def __init__(
        self,
        plan: RingPlan,
        statements: Statements,
        window_chunks: int,
        jobs: Jobs,
        now_ns: int,
        kept: Mapping[int, Finished] | None = None,
        applied: Mapping[int, tuple[bytes, bytes]] | None = None,
    ) -> None:
        self.plan = plan
        self.index = plan.order.index(statements.me)
        self.right = plan.order[(self.index + 1) % len(plan.order)]
        self.left = plan.order[(self.index - 1) % len(plan.order)]
        self.weight = plan.weights[self.index]
        self._statements, self._jobs = statements, jobs
        self._window = window_chunks
        fresh = [c for c in range(plan.chunks) if c not in plan.trips]
        self._to_start = [c for c in fresh if plan.starter(c) == self.index][::-1]
        self._unfinished = 0  # our own starts whose mean has not come back
        self._reduced: set[int] = set()
        self._gathered: set[int] = set()
        self._passed: set[int] = set()  # means that came from the left
        self._applying: dict[int, tuple[bytes, bytes]] = {}  # receipt and payload
        self.finished: dict[int, Finished] = dict(kept or {})
        self.applied: dict[int, tuple[bytes, bytes]] = dict(applied or {})  # payload hash, state leaf
        self.finite = True
        self.started_ns = self.progress_ns = now_ns

    @property
    def done(self) -> bool:
        return len(self.applied) == self.plan.chunks

    def phase(self) -> str:
        """reduce until our first mean arrives, gather until the last is applied (named failpoints use it)."""
        return "gather" if self._gathered else "reduce"

    def start(self) -> list[Effect]:
        """Send reused chunks to those who lack them, apply those that we hold, start fresh ones."""
        effects: list[Effect] = []
        for chunk in sorted(self.plan.trips):
            trip, held = self.plan.trips[chunk], self.finished.get(chunk)
            if held is None:
                continue
            self._gathered.add(chunk)
            if trip.start == self.index and trip.hops:
                effects.append(self._frame("gather", chunk, 0, trip.plan.total_weight, held.packet))
            if chunk not in self.applied:
                effects.append(self._apply(chunk, held.receipt, held.payload))
        return [*effects, *self._fill_window()]

    def lacks(self) -> int | None:
        """A reused chunk that we were to start a trip of, or that nobody sends us, and do not hold."""
        for chunk, trip in self.plan.trips.items():
            if chunk not in self.finished and (self.index - trip.start) % len(self.plan.order) > trip.hops:
                return chunk
            if chunk not in self.finished and trip.start == self.index:
                return chunk
        return None

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
        if position == 0 or frame.chunk in self._reduced or frame.chunk in plan.trips:
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
        plan, chunk = self.plan, frame.chunk
        fresh = chunk not in plan.trips
        if chunk in self._passed or position >= plan.hops(chunk):
            raise ProtocolViolation(f"the mean of chunk {chunk} came twice, or to one who has it")
        if frame.weight != plan.plan_of(chunk).total_weight or len(frame.payload) < RECEIPT_BYTES:
            raise ProtocolViolation(f"the mean of chunk {chunk} has weight {frame.weight}")
        self._gathered.add(chunk)
        self._passed.add(chunk)
        effects: list[Effect] = []
        if position + 1 < plan.hops(chunk):
            effects.append(self._frame("gather", chunk, position + 1, frame.weight, frame.payload))
        if chunk not in self.finished:
            receipt, payload = frame.payload[:RECEIPT_BYTES], frame.payload[RECEIPT_BYTES:]
            effects.append(self._apply(chunk, receipt, payload))
        if fresh and plan.starter(chunk) == self.index:
            self._unfinished -= 1
            effects += self._fill_window()
        return effects

    def on_computed(self, note: tuple[Any, ...], result: Any, now_ns: int) -> list[Effect]:
        """A worker finished one of our jobs; ``note`` is what was remembered with it. Raises
        ProtocolViolation for a mean without its owner's receipt."""
        self.progress_ns = now_ns
        what, chunk = note[0], note[1]
        if what == "partial":
            return [self._frame("reduce", chunk, note[2], note[3], result)]
        if what == "mean":
            return self._on_mean(chunk, *result)
        payload_hash, leaf, finite = result
        signature, payload = self._applying.pop(chunk)
        plan = self.plan.plan_of(chunk)
        if chunk not in self.finished:
            receipt = plan.receipt(chunk, payload_hash)
            if not self._statements.is_receipt(receipt, plan.owner_key(chunk), signature):
                raise ProtocolViolation(f"the mean of chunk {chunk} has no receipt of its owner")
            self.finished[chunk] = Finished(signature, payload, payload_hash)
        self.applied[chunk] = (payload_hash, leaf)
        self.finite = self.finite and finite
        return []

    def _on_mean(self, chunk: int, payload: bytes, payload_hash: bytes) -> list[Effect]:
        """We own this chunk and its mean is encoded: sign its receipt, and apply the bytes as all do."""
        receipt = self._statements.sign_receipt(self.plan.plan.receipt(chunk, payload_hash))
        self._gathered.add(chunk)
        effects: list[Effect] = []
        if len(self.plan.order) > 1:
            effects.append(self._frame("gather", chunk, 0, self.plan.total_weight, receipt + payload))
        else:
            self._unfinished -= 1
            effects += self._fill_window()
        return [*effects, self._apply(chunk, receipt, payload)]

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

    def _apply(self, chunk: int, receipt: bytes, payload: bytes) -> Compute:
        self._applying[chunk] = (receipt, payload)
        return self._compute("apply", (chunk, payload), ("applied", chunk))

    def _compute(self, op: str, arguments: tuple[Any, ...], note: tuple[Any, ...]) -> Compute:
        return Compute(self._jobs.add("ring", (self.plan.view_hash, *note)), op, arguments)

    def _frame(self, kind: str, chunk: int, hop: int, weight: int, payload: bytes) -> SendFrame:
        return SendFrame(self.right, kind, self.plan.view_hash, chunk, hop, weight, payload)

    def missing(self) -> Sequence[int]:
        """Chunks not applied yet (for messages)."""
        return [c for c in range(self.plan.chunks) if c not in self.applied]
