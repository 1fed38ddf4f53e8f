"""The ring of the attempt that runs, if one does: its frames, its jobs, and what it leaves behind. Pure.

The agreement starts one per view and hears how it ends; it does not see chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.proto.convene import CheckedView
from p2p_diloco.proto.events import Close, Compute, Effect, FrameIn
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.ring import Ring, RingPlan
from p2p_diloco.proto.rounds import FinishedChunks
from p2p_diloco.proto.statements import Statements

_MAX_HELD_FRAMES = 4096  # frames that came before their VIEW
_MAX_HELD_BYTES = 256 << 20  # and their bytes: more than the windows of a ring of ten hold (guess)


@dataclass
class Step:
    """What one event did: effects, and how the ring ended if it did (`failed`, or chunk and state root)."""

    effects: list[Effect] = field(default_factory=list)
    failed: str = ""
    roots: tuple[bytes, bytes] | None = None


class RingRun:
    """At most one ring at a time. Frames that come before their view wait, within bounds."""

    def __init__(self, statements: Statements, chunks: int, window_chunks: int, jobs: Jobs) -> None:
        self._statements, self._jobs = statements, jobs
        self.chunks, self._window = chunks, window_chunks
        self._held: list[FrameIn] = []
        self._dead_tags: list[bytes] = []  # views whose attempts are over
        self._rooted = False  # the roots of this ring were asked for
        self.ring: Ring | None = None
        self.finished = FinishedChunks()

    def reset(self) -> None:
        """A new epoch: what was finished in the last one is settled. A running ring stays (`finishing`)."""
        self._held = []
        self.finished = FinishedChunks()

    def start(self, view: CheckedView, now_ns: int) -> Step:
        """Start the ring of a run-mode view; fails if it wants something of us that we do not have."""
        run = view.run_view
        if any(chunk >= self.chunks for chunk in view.trips):
            return Step(failed="the view reuses chunks that do not exist")
        plan = RingPlan(run.signed.digest(), run.plan, self.chunks, view.trips)
        kept = self.finished.kept({chunk: trip.plan for chunk, trip in view.trips.items()})
        applied = self.finished.applied(kept)
        self.ring = Ring(plan, self._statements, self._window, self._jobs, now_ns, kept, applied)
        self._rooted = False
        lacking = self.ring.lacks()
        if lacking is not None:
            return Step(failed=f"the view takes us for a holder of chunk {lacking}")
        job = self._jobs.add("ring", (plan.view_hash, "begin", -1))
        return Step([Compute(job, "begin", (tuple(sorted(applied)),))])

    def beginning(self) -> bool:
        ring = self.ring
        return ring is not None and self._jobs.has("ring", (ring.plan.view_hash, "begin", -1))

    def drop(self) -> None:
        """The attempt is over; keep what it finished."""
        if self.ring is not None:
            self.finished.take(self.ring)
            self._dead_tags = [*self._dead_tags[-15:], self.ring.plan.view_hash]
            self.ring = None

    def on_frame(self, frame: FrameIn, now_ns: int) -> Step:
        """A reduce or gather frame; held if its VIEW has not come yet, dropped if its attempt is over."""
        ring = self.ring
        if ring is not None and frame.tag == ring.plan.view_hash and not self.beginning():
            try:
                return self._progress(ring.on_frame(frame, now_ns))
            except ProtocolViolation as violation:
                return Step([Close(frame.peer, str(violation))], str(violation))
        if frame.tag in self._dead_tags:
            return Step()
        if len(self._held) >= _MAX_HELD_FRAMES or self.held_bytes() > _MAX_HELD_BYTES:
            return Step([Close(frame.peer, "sends ring frames of a view that never came")])
        self._held.append(frame)
        return Step()

    def held_bytes(self) -> int:
        return sum(len(waiting.payload) for waiting in self._held)

    def on_computed(self, note: tuple[Any, ...], result: Any, error: str, now_ns: int) -> Step:
        """A job of this ring is done."""
        ring = self.ring
        assert ring is not None
        if error:
            return Step([Close(ring.left, error)], error)
        if note[1] == "begin":
            return self._begin(ring, result, now_ns)
        if note[1] == "roots":
            return Step(roots=result)
        try:
            return self._progress(ring.on_computed(note[1:], result, now_ns))
        except ProtocolViolation as violation:
            return Step([Close(ring.left, str(violation))], str(violation))

    def _begin(self, ring: Ring, kept: tuple[int, ...], now_ns: int) -> Step:
        """The copy is ready; ``kept`` are the chunks whose outer step it still holds."""
        ring.applied = {chunk: ring.applied[chunk] for chunk in kept}
        effects = ring.start()
        held, self._held = self._held, []
        for frame in held:
            step = self.on_frame(frame, now_ns)
            effects += step.effects
            if step.failed:
                return Step(effects, step.failed)
        return self._progress(effects)

    def _progress(self, effects: list[Effect]) -> Step:
        ring = self.ring
        if ring is None or not ring.done or self._rooted or self._jobs.open_of("ring"):
            return Step(effects)  # a ring that is done may still pass chunks on
        self._rooted = True
        hashes = tuple(ring.applied[chunk][0] for chunk in range(ring.plan.chunks))
        leaves = tuple(ring.applied[chunk][1] for chunk in range(ring.plan.chunks))
        job = self._jobs.add("ring", (ring.plan.view_hash, "roots", -1))
        return Step([*effects, Compute(job, "roots", (hashes, leaves))])

    def payloads(self) -> tuple[bytes, ...]:
        """All means of a ring that is done, in chunk order."""
        assert self.ring is not None
        return tuple(self.ring.finished[chunk].payload for chunk in range(self.ring.plan.chunks))
