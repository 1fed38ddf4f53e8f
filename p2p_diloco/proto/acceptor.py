"""Our vote, our promises and our abstention in the current epoch: the part that must never forget. Pure.

Single-decree Paxos per epoch with the attempt as ballot. Each of the three statements is written and
fsynced (`Persist`) before it leaves; if it cannot be written, it is not said. After a restart the log
gives back what this peer had said, so a copy of its key never says two different things.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.proto.events import Effect, Notice, Persist
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.statements import Statements
from p2p_diloco.wire.messages import (
    Abstain,
    Promise,
    Signed,
    Vote,
    VoteRecord,
    pack_object,
    unpack_object,
)

LogRecord = tuple[str, bytes]  # kind (vote, promise, abstain) and data


class Acceptor:
    """What we said in the epoch after ``previous``. `begin` moves it on to the next epoch."""

    def __init__(self, statements: Statements, jobs: Jobs, log: Iterable[LogRecord]) -> None:
        self._statements = statements
        self._jobs = jobs
        self._log = list(log)  # what an earlier life wrote; used when its epoch comes
        self.epoch = 0
        self.previous = b""
        self.promised = 0
        self.vote: VoteRecord | None = None
        self.vote_attempt = -1
        self.abstention: Signed | None = None
        self.pending_abstention = False

    def begin(self, epoch: int, previous: bytes) -> None:
        """Forget the last epoch and take up what an earlier life said in this one."""
        self.epoch, self.previous = epoch, previous
        self.promised, self.vote, self.vote_attempt = 0, None, -1
        self.abstention, self.pending_abstention = None, False
        for kind, data in self._log:
            try:
                self._restore(kind, data)
            except ProtocolViolation:
                continue  # of another run or version: it binds nothing here
        if epoch > 0:
            self._log = [entry for entry in self._log if not self._is_old(entry)]

    def may_vote(self, attempt: int) -> bool:
        return attempt >= self.promised and attempt > self.vote_attempt and self.abstention is None

    def cast(self, attempt: int, view: Signed, chunk_root: bytes, state_root: bytes) -> list[Effect]:
        """Vote; the answer to the returned effect carries the signed vote to send."""
        body = Vote(self.epoch, self.previous, attempt, view.digest(), chunk_root, state_root)
        record = VoteRecord(self._statements.make(body), view)
        self.vote, self.vote_attempt = record, attempt
        self.promised = max(self.promised, attempt)
        return [self._persist("vote", pack_object(record), record.vote)]

    def promise(self, attempt: int) -> list[Effect]:
        """Promise to take part in no attempt below ``attempt``, and show our highest vote."""
        self.promised = attempt
        vote = (self.vote.vote,) if self.vote else ()
        view = (self.vote.view,) if self.vote else ()
        signed = self._statements.make(Promise(self.epoch, self.previous, attempt, vote, view))
        return [self._persist("promise", pack_object(signed), signed)]

    def abstain(self, reason: str, leaving: bool) -> list[Effect]:
        """Say that we never vote in this epoch; only possible as long as we have not voted."""
        if self.vote is not None or self.abstention is not None or self.pending_abstention:
            return []
        self.pending_abstention = True
        body = Abstain(self.epoch, self.previous, reason[:128], int(leaving))
        signed = self._statements.make(body)
        self.abstention = signed
        return [self._persist("abstain", pack_object(signed), signed)]

    def void_abstention(self) -> None:
        """Everyone else has abstained too, and we are the lowest voter: our abstention no longer counts."""
        self.abstention = None

    def _persist(self, kind: str, data: bytes, signed: Signed) -> Persist:
        return Persist(self._jobs.add("persist", (kind, self.epoch, signed)), kind, data)

    def _restore(self, kind: str, data: bytes) -> None:
        if kind == "vote":
            record = unpack_object(VoteRecord, data)
            author, body = self._statements.check(record.vote)
            if author == self._statements.me and isinstance(body, Vote) and self._is_now(body):
                self.promised = max(self.promised, body.attempt)
                if body.attempt > self.vote_attempt:
                    self.vote, self.vote_attempt = record, body.attempt
            return
        signed = unpack_object(Signed, data)
        author, statement = self._statements.check(signed)
        if author != self._statements.me:
            return
        if isinstance(statement, Promise) and self._is_now(statement):
            self.promised = max(self.promised, statement.attempt)
        if isinstance(statement, Abstain) and self._is_now(statement):
            self.abstention = signed

    def _is_now(self, body: Vote | Promise | Abstain) -> bool:
        return body.epoch == self.epoch and body.previous == self.previous

    def _is_old(self, entry: LogRecord) -> bool:
        kind, data = entry
        try:
            signed = unpack_object(VoteRecord, data).vote if kind == "vote" else unpack_object(Signed, data)
            _, body = self._statements.check(signed)
        except ProtocolViolation:
            return True
        return isinstance(body, Vote | Promise | Abstain) and body.epoch < self.epoch


def failed_to_persist(kind: str, error: str) -> Notice:
    """What the user is told when the disk refuses a record."""
    return Notice("error", f"cannot write the {kind} to disk ({error}): this peer keeps silent in this epoch")
