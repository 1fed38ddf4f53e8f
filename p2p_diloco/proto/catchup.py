"""Pulling a certified state from several donors at once: leaves first, then hash-checked chunks. Pure.

One `CatchUp` is one target root. Of kind ``state`` it pulls the state itself (8 bytes a value); of kind
``round`` the payloads of the round that leads to it from the state that we hold (about 1 byte a value),
named by their chunk root. Chunks are spread over the donors, a few at a time each; a donor that
dies, refuses or is silent costs only the chunks it owed; one whose chunk does not match its leaf is not
asked again. The worker table installs chunks into the copy and checks the whole digest at the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from p2p_diloco.identity import PeerId, show
from p2p_diloco.numerics.digest import merkle_root
from p2p_diloco.proto.events import Close, Compute, Effect, FrameIn, Notice, Send
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.wire.messages import GetChunk, GetLeaves, Gone, Leaves

_S = 1_000_000_000
_PER_DONOR = 4  # chunks asked of one donor at once: hides the round trip, bounds its queue (guess)
_STRIKES = 8  # requests that a donor may let run out (guess: two rounds of its slots)


class CatchUp:
    """States: leaves -> chunks -> finishing -> done, or failed. `failed` says why in one line."""

    def __init__(
        self,
        root: bytes,
        epoch: int,
        chunks: int,
        donors: Iterable[PeerId],
        request_s: float,
        jobs: Jobs,
        kind: str = "state",
        state_root: bytes = b"",
    ) -> None:
        self.root, self.epoch = root, epoch
        self.kind, self.state_root = kind, state_root or root
        self.payloads: dict[int, bytes] = {}  # of kind round: what was pulled
        self.state = "leaves"
        self.failed = ""
        self._chunks, self._jobs = chunks, jobs
        self._wait_ns = round(request_s * _S)
        self._donors = list(donors)
        self._banned: list[PeerId] = []
        self._leaves: list[bytes] = []
        self._leaf_donor: PeerId | None = None
        self._leaf_deadline_ns = 0
        self._todo: list[int] = []
        self._asked: dict[int, tuple[PeerId, int]] = {}  # chunk -> donor, deadline
        self._installing: dict[int, PeerId] = {}
        self._have = 0
        self._strikes: dict[PeerId, int] = {}
        self.bytes_received = 0
        self.donors_used: list[PeerId] = []

    def next_wake_ns(self) -> int | None:
        times = [deadline for _, deadline in self._asked.values()]
        if self._leaf_donor is not None and self.state == "leaves":
            times.append(self._leaf_deadline_ns)
        return min(times) if times else None

    def start(self, now_ns: int) -> list[Effect]:
        if self._chunks == 0:
            return self._install_begin()
        return self._ask_leaves(now_ns)

    def start_with(self, hashes: tuple[bytes, ...], payloads: tuple[bytes, ...]) -> list[Effect]:
        """Take a round that is at hand."""
        self._leaves = list(hashes)
        self.payloads = dict(enumerate(payloads))
        self._local = True
        return self._install_begin()

    _local = False

    def add_donors(self, donors: Iterable[PeerId], now_ns: int) -> list[Effect]:
        """More peers hold this state now."""
        for donor in donors:
            if donor not in self._donors and donor not in self._banned:
                self._donors.append(donor)
        if self.state == "leaves" and self._leaf_donor is None:
            return self._ask_leaves(now_ns)
        return self._ask_chunks(now_ns)

    def _ask_leaves(self, now_ns: int) -> list[Effect]:
        if not self._donors:
            return self._fail("no donor is left")
        donor = self._donors[0]
        self._leaf_donor, self._leaf_deadline_ns = donor, now_ns + self._wait_ns
        return [Send(donor, GetLeaves(self.root, len(self._leaves)))]

    def on_leaves(self, peer: PeerId, message: Leaves, now_ns: int) -> list[Effect]:
        if self.state != "leaves" or peer != self._leaf_donor or message.root != self.root:
            return []
        hashes = [message.hashes[i : i + 32] for i in range(0, len(message.hashes), 32)]
        sound = (
            len(message.hashes) % 32 == 0
            and bool(hashes)
            and message.total == self._chunks
            and message.start == len(self._leaves)
            and len(self._leaves) + len(hashes) <= self._chunks
        )
        if not sound:
            return self._ban(peer, "sent a leaf list that does not fit", now_ns)
        self._leaves += hashes
        if len(self._leaves) < self._chunks:
            return self._ask_leaves(now_ns)
        if merkle_root(self._leaves) != self.root:
            self._leaves = []
            return self._ban(peer, "sent leaves that do not hash to the certified root", now_ns)
        self._leaf_donor = None
        return self._install_begin()

    def _install_begin(self) -> list[Effect]:
        self.state = "chunks"
        self._todo = list(range(self._chunks))[::-1]
        op = "install_begin" if self.kind == "state" else "replay_begin"
        arguments = (self.epoch, self.root, tuple(self._leaves))
        return [Compute(self._jobs.add("catchup", (self.root, "begin", -1)), op, arguments)]

    def _ask_chunks(self, now_ns: int) -> list[Effect]:
        if self.state != "chunks" or self._jobs.has("catchup", (self.root, "begin", -1)):
            return []
        if self._local:
            return self._replay_local()
        if not self._donors and (self._todo or self._asked):
            return self._fail("no donor is left")
        effects: list[Effect] = []
        for _ in range(_PER_DONOR):
            for donor in self._donors:
                load = sum(1 for who, _ in self._asked.values() if who == donor)
                load += sum(1 for who in self._installing.values() if who == donor)
                if self._todo and load < _PER_DONOR:
                    chunk = self._todo.pop()
                    self._asked[chunk] = (donor, now_ns + self._wait_ns)
                    effects.append(Send(donor, GetChunk(self.root, chunk)))
        return [*effects, *self._maybe_finish()]

    def _replay_local(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._todo:
            chunk = self._todo.pop()
            self._installing[chunk] = PeerId(b"")
            job = self._jobs.add("catchup", (self.root, "chunk", chunk))
            effects.append(Compute(job, "replay_chunk", (chunk, self.payloads[chunk])))
        return [*effects, *self._maybe_finish()]

    def on_frame(self, frame: FrameIn, now_ns: int) -> list[Effect]:
        """A state chunk; one that was not asked for is dropped (it may be late)."""
        asked = self._asked.get(frame.chunk)
        if self.state != "chunks" or frame.tag != self.root or asked is None or asked[0] != frame.peer:
            return []
        del self._asked[frame.chunk]
        self._installing[frame.chunk] = frame.peer
        self.bytes_received += len(frame.payload)
        job = self._jobs.add("catchup", (self.root, "chunk", frame.chunk))
        if self.kind == "round":
            self.payloads[frame.chunk] = frame.payload
        op = "install_chunk" if self.kind == "state" else "replay_chunk"
        return [Compute(job, op, (frame.chunk, frame.payload))]

    def on_computed(self, note: tuple[Any, ...], result: Any, error: str, now_ns: int) -> list[Effect]:
        if note[0] != self.root or self.state in ("done", "failed"):
            return []
        if note[1] == "chunk":
            donor = self._installing.pop(note[2])
            if self._local:
                if error or not result:
                    return self._fail(error or "the round at hand is damaged")
                self._have += 1
                return self._maybe_finish()
            if error or not result:
                self._todo.append(note[2])
                return self._ban(donor, f"sent a chunk {note[2]} that does not match its leaf", now_ns)
            self._have += 1
            if donor not in self.donors_used:
                self.donors_used.append(donor)
            return self._ask_chunks(now_ns)
        if error:
            return self._fail(error)
        if note[1] == "finish":
            self.state = "done"
            return []
        return self._ask_chunks(now_ns)

    def _maybe_finish(self) -> list[Effect]:
        if self.state != "chunks" or self._have < self._chunks:
            return []
        self.state = "finishing"
        job = self._jobs.add("catchup", (self.root, "finish", -1))
        if self.kind == "round":
            return [Compute(job, "replay_finish", (self.state_root,))]
        return [Compute(job, "install_finish")]

    def round_payloads(self) -> tuple[bytes, ...]:
        """The payloads of a finished pull of kind round, in chunk order."""
        return tuple(self.payloads[chunk] for chunk in range(self._chunks))

    def hashes(self) -> tuple[bytes, ...]:
        """The leaves that were pulled."""
        return tuple(self._leaves)

    def slept(self, gap_ns: int) -> None:
        """We were stopped for so long: no donor was slow meanwhile."""
        self._leaf_deadline_ns += gap_ns
        self._asked = {chunk: (who, due + gap_ns) for chunk, (who, due) in self._asked.items()}

    def on_gone(self, peer: PeerId, message: Gone, now_ns: int) -> list[Effect]:
        """A donor does not hold the state, or is busy: its chunk goes back, and it is not asked again
        before others were."""
        if message.root != self.root:
            return []
        if message.why == "busy" and self.state == "chunks":
            asked = self._asked.get(message.chunk)
            if asked is not None and asked[0] == peer:
                self._asked[message.chunk] = (peer, now_ns + self._wait_ns // 10)
            return []
        return self.lose_donor(peer, now_ns)

    def lose_donor(self, peer: PeerId, now_ns: int) -> list[Effect]:
        """This donor is of no more use; what it owed is asked elsewhere."""
        if peer in self._donors:
            self._donors.remove(peer)
        for chunk in [c for c, (who, _) in self._asked.items() if who == peer]:
            del self._asked[chunk]
            self._todo.append(chunk)
        if self.state == "leaves" and self._leaf_donor == peer:
            self._leaf_donor = None
            self._leaves = []
            return self._ask_leaves(now_ns)
        return self._ask_chunks(now_ns)

    def on_tick(self, now_ns: int) -> list[Effect]:
        if self.state == "leaves" and self._leaf_donor is not None and now_ns >= self._leaf_deadline_ns:
            return self.lose_donor(self._leaf_donor, now_ns)
        late = [(c, who) for c, (who, deadline) in self._asked.items() if now_ns >= deadline]
        effects: list[Effect] = []
        for chunk, donor in late:
            self._asked.pop(chunk, None)
            self._todo.append(chunk)
            self._strikes[donor] = self._strikes.get(donor, 0) + 1
            if donor in self._donors:  # slow: others first, and not for ever
                self._donors.remove(donor)
                if self._strikes[donor] < _STRIKES:
                    self._donors.append(donor)
        return [*effects, *self._ask_chunks(now_ns)] if late else []

    def _ban(self, peer: PeerId, why: str, now_ns: int) -> list[Effect]:
        self._banned.append(peer)
        effects: list[Effect] = [
            Notice("error", f"donor {show(peer)} {why}: not asked again"),
            Close(peer, why),
        ]
        return [*effects, *self.lose_donor(peer, now_ns)]

    def _fail(self, why: str) -> list[Effect]:
        self.state, self.failed = "failed", why
        return []
