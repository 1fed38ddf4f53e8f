"""Our vote, our promises and our abstention in the current epoch: the part that must never forget. Pure.

Single-decree Paxos per epoch with the attempt as ballot. Each statement is written and fsynced before it
leaves; if it cannot be written, it is not said. After a restart the log gives back what this peer had said.
The attempts that it convened are part of it: an attempt must have one view, since votes for two results in
one attempt would leave a later convener no way to tell which of them may have been decided.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import PeerId
from p2p_diloco.proto.scribe import Entry
from p2p_diloco.proto.statements import Statements
from p2p_diloco.wire.messages import (
    Abstain,
    Convened,
    Holding,
    Promise,
    Signed,
    Vote,
    VoteRecord,
    pack_object,
    unpack_object,
)

LogRecord = tuple[str, bytes]  # kind (vote, promise, abstain, convened) and data


class Acceptor:
    """What we said in the epoch after ``previous``. `begin` moves it on to the next epoch. Through the epoch
    ``silent_through`` nothing is said: the log was lost, and what it held may bind us there."""

    def __init__(self, statements: Statements, log: Iterable[LogRecord], silent_through: int = 0) -> None:
        self._statements = statements
        self._silent_through = silent_through
        self._log = list(log)  # what an earlier life wrote; used when its epoch comes
        self.epoch = 0
        self.previous = b""
        self.promised = 0
        self.convened = -1  # the highest attempt whose view we made
        self.vote: VoteRecord | None = None
        self.vote_attempt = -1
        self.abstention: Signed | None = None

    def begin(self, epoch: int, previous: bytes) -> None:
        """Forget the last epoch and take up what an earlier life said in this one."""
        self.epoch, self.previous = epoch, previous
        self.promised, self.vote, self.vote_attempt, self.convened = 0, None, -1, -1
        self.abstention = None
        for kind, data in self._log:
            try:
                self._restore(kind, data)
            except ProtocolViolation:
                continue  # of another run or version: it binds nothing here
        if epoch > 0:
            self._log = [entry for entry in self._log if not self._is_old(entry)]

    @property
    def silent(self) -> bool:
        return self.epoch <= self._silent_through

    def may_vote(self, attempt: int) -> bool:
        free = attempt >= self.promised and attempt > self.vote_attempt and self.abstention is None
        return free and not self.silent

    def may_convene(self, attempt: int) -> bool:
        return attempt > self.convened and not self.silent

    def cast(self, attempt: int, view: Signed, chunk_root: bytes, state_root: bytes) -> Entry:
        """Vote: what must be written before the vote in it is sent."""
        body = Vote(self.epoch, self.previous, attempt, view.digest(), chunk_root, state_root)
        record = VoteRecord(self._statements.make(body), view)
        self.vote, self.vote_attempt = record, attempt
        self.promised = max(self.promised, attempt)
        return Entry("vote", self.epoch, pack_object(record), record.vote)

    def promise(
        self, attempt: int, finished: tuple[Holding, ...] = (), unreachable: tuple[PeerId, ...] = ()
    ) -> Entry | None:
        """Promise to take part in no attempt below ``attempt``, and show our highest vote; None if we may
        say nothing (we keep to it all the same)."""
        self.promised = max(self.promised, attempt)
        if self.silent or self.abstention is not None:
            return None
        vote = (self.vote.vote,) if self.vote else ()
        view = (self.vote.view,) if self.vote else ()
        body = Promise(self.epoch, self.previous, attempt, vote, view, finished, unreachable)
        signed = self._statements.make(body)
        return Entry("promise", self.epoch, pack_object(signed), signed)

    def convene(self, attempt: int, view: Signed) -> Entry:
        """Make the one view of this attempt."""
        self.convened = attempt
        return Entry("convened", self.epoch, pack_object(Convened(self.epoch, self.previous, attempt)), view)

    def abstain(self, reason: str, leaving: bool) -> Entry | None:
        """Say that we never vote in this epoch; None if we have voted, or said it, or may say nothing."""
        if self.vote is not None or self.abstention is not None or self.silent:
            return None
        body = Abstain(self.epoch, self.previous, reason[:128], int(leaving))
        signed = self._statements.make(body)
        self.abstention = signed
        return Entry("abstain", self.epoch, pack_object(signed), signed)

    def void_abstention(self) -> None:
        """Everyone else has abstained too, and we are the lowest voter: our abstention no longer counts."""
        self.abstention = None

    def _restore(self, kind: str, data: bytes) -> None:
        if kind == "vote":
            record = unpack_object(VoteRecord, data)
            author, body = self._statements.check(record.vote)
            if author == self._statements.me and isinstance(body, Vote) and self._is_now(body):
                self.promised = max(self.promised, body.attempt)
                if body.attempt > self.vote_attempt:
                    self.vote, self.vote_attempt = record, body.attempt
            return
        if kind == "convened":
            convened = unpack_object(Convened, data)
            if self._is_now(convened):
                self.convened = max(self.convened, convened.attempt)
            return
        signed = unpack_object(Signed, data)
        author, statement = self._statements.check(signed)
        if author != self._statements.me:
            return
        if isinstance(statement, Promise) and self._is_now(statement):
            self.promised = max(self.promised, statement.attempt)
        if isinstance(statement, Abstain) and self._is_now(statement):
            self.abstention = signed

    def _is_now(self, body: Vote | Promise | Abstain | Convened) -> bool:
        return body.epoch == self.epoch and body.previous == self.previous

    def _is_old(self, entry: LogRecord) -> bool:
        kind, data = entry
        try:
            if kind == "convened":
                return unpack_object(Convened, data).epoch < self.epoch
            signed = unpack_object(VoteRecord, data).vote if kind == "vote" else unpack_object(Signed, data)
            _, body = self._statements.check(signed)
        except ProtocolViolation:
            return True
        return isinstance(body, Vote | Promise | Abstain) and body.epoch < self.epoch
