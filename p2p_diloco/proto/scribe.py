"""What goes to the disk before it is said, and what happens when the disk refuses. Pure.

Everything is written in one order, one thing at a time. If a write fails the peer is *degraded*
(DEGRADED_DISK): it goes on training and contributing, but says nothing that must be remembered until the
disk takes the waiting records again; to the others it is a voter that is silent. What belongs to an epoch
that is over by then is dropped; certificates are written late, without gaps.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2p_diloco.proto.events import Effect, KeepRound, Notice, Persist
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.wire.messages import Signed

_RETRY_NS = 5_000_000_000  # between tries to write again (guess)


@dataclass(frozen=True)
class Entry:
    """One thing to write. ``signed`` is what may be said once it is written."""

    kind: str
    epoch: int
    data: bytes
    signed: Signed | None = None
    payloads: tuple[bytes, ...] = ()  # of kind ``round``; `data` is its state root


class Scribe:
    """`put` entries; feed every answer to `on_answer`, which tells whether the entry is on disk. One write
    is under way at a time, so that nothing is ever written before what it may rest on."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._waiting: list[Entry] = []  # the one being written first
        self._writing: Entry | None = None
        self._retry_ns = 0
        self._epoch = 0
        self.degraded = False

    def put(self, entry: Entry) -> list[Effect]:
        """Write an entry, after those that wait for the disk."""
        self._waiting.append(entry)
        return [] if self.degraded else self._next()

    def on_answer(self, entry: Entry, error: str, now_ns: int) -> tuple[bool, list[Effect]]:
        """The disk's answer: is the entry written, and what follows."""
        self._writing = None
        if error:
            return False, self._refused(entry, error, now_ns)
        if self._waiting and self._waiting[0] is entry:
            self._waiting.pop(0)
        effects: list[Effect] = []
        if self.degraded and not self._waiting:
            self.degraded = False
            effects.append(Notice("info", "the disk takes records again: voting as before"))
        return True, [*effects, *self._next()]

    def _refused(self, entry: Entry, error: str, now_ns: int) -> list[Effect]:
        self._retry_ns = now_ns + _RETRY_NS
        if self._waiting and self._waiting[0] is entry and self._is_settled(entry):
            self._waiting.pop(0)
        if self.degraded:
            return []
        self.degraded = True
        text = f"DEGRADED_DISK: cannot write the {entry.kind} of epoch {entry.epoch} to disk ({error})"
        return [Notice("error", f"{text}; training goes on, but nothing is voted until it can be written")]

    def tick(self, now_ns: int) -> list[Effect]:
        """Try again when it is time."""
        if not self.degraded or self._writing is not None or now_ns < self._retry_ns:
            return []
        if not self._waiting:  # see whether the disk works, with a record that binds to nothing
            self._waiting.append(Entry("probe", self._epoch, b""))
        return self._next()

    def begin(self, epoch: int) -> None:
        """Epochs below ``epoch`` are decided: what we would have said in them is of no use any more."""
        self._epoch = epoch
        self._waiting = [e for e in self._waiting if e is self._writing or not self._is_settled(e)]

    def _is_settled(self, entry: Entry) -> bool:
        return entry.epoch < self._epoch and entry.kind != "certificate"

    def _next(self) -> list[Effect]:
        if self._writing is not None or not self._waiting:
            return []
        entry = self._writing = self._waiting[0]
        job = self._jobs.add("persist", (entry,))
        if entry.kind == "round":
            return [KeepRound(job, entry.epoch, entry.data, entry.payloads)]
        return [Persist(job, entry.kind, entry.data)]

    def slept(self, gap_ns: int) -> None:
        """We were stopped for so long."""
        self._retry_ns += gap_ns

    def waiting(self) -> int:
        """How many entries wait for the disk, the one being written among them."""
        return len(self._waiting)
