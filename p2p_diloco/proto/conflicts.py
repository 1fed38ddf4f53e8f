"""Two statements by one key that no honest peer makes: portable proof of equivocation. Pure.

The contradictions, all within one epoch on one head: two votes or two views in one attempt; a promise that
hides a vote cast below it; an abstention and a vote (unless the rules void that abstention).
"""

from __future__ import annotations

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import PeerId
from p2p_diloco.proto.chain import Chain
from p2p_diloco.proto.statements import Statements
from p2p_diloco.wire.messages import Abstain, Body, Equivocation, Promise, Signed, View, Vote, decode_body

_KEPT = 64  # statements remembered per author, kind and epoch
# What each kind of statement may contradict.
_AGAINST = {
    "vote": ("vote", "promise", "abstain"),
    "promise": ("vote",),
    "abstain": ("vote",),
    "view": ("view",),
}


def contradiction(
    statements: Statements, first: Signed, second: Signed, lowest_voter: PeerId | None = None
) -> str:
    """What is wrong with this pair, in a few words; empty if they may both be said.

    ``lowest_voter``: whose abstention may be void (docs/DESIGN.md, 8); it is never convicted by one. Raises
    ProtocolViolation if a signature or a body is bad.
    """
    author, one = statements.check(first)
    other_author, other = statements.check(second)
    if author != other_author or first.digest() == second.digest():
        return ""
    if _place(one) != _place(other) or _place(one) is None:
        return ""
    return _compare(one, other, author == lowest_voter) or _compare(other, one, author == lowest_voter)


def _place(body: Body) -> tuple[int, bytes] | None:
    return (body.epoch, body.previous) if isinstance(body, Vote | Promise | Abstain | View) else None


def _compare(one: Body, other: Body, may_unsay: bool) -> str:
    match one, other:
        case Vote(attempt=attempt), Vote() if other.attempt == attempt:
            return f"voted twice in attempt {attempt} of epoch {one.epoch}"
        case View(attempt=attempt), View() if other.attempt == attempt:
            return f"sent two views of attempt {attempt} of epoch {one.epoch}"
        case Vote(attempt=attempt), Promise() if attempt < other.attempt and _reported(other) < attempt:
            return f"hid its vote in attempt {attempt} of epoch {one.epoch} from a promise"
        case Vote(), Abstain() if not may_unsay:
            return f"voted and abstained in epoch {one.epoch}"
    return ""


def _reported(promise: Promise) -> int:
    """The attempt of the vote that a promise shows, -1 without one."""
    if not promise.vote:
        return -1
    try:
        vote = decode_body("vote", promise.vote[0].body)
    except ProtocolViolation:
        return -1
    return vote.attempt if isinstance(vote, Vote) else -1


class Witness:
    """Remembers what each key said in the current epoch and the one before it, whose last statements are
    still on their way when it is decided, and finds contradictions."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements
        self.convicted: list[tuple[PeerId, Equivocation, str]] = []
        self._said: dict[tuple[PeerId, str], list[tuple[int, Signed]]] = {}
        self._before: dict[tuple[PeerId, str], list[tuple[int, Signed]]] = {}

    def note(self, author: PeerId, signed: Signed, chain: Chain, epoch: int) -> None:
        """Take in a checked statement of this epoch; a contradiction goes to `convicted`."""
        voters = chain.link(epoch - 1).voters
        caught = self.hear(author, signed, voters[0] if voters else author)
        if caught is not None:
            self.convicted.append((author, Equivocation(caught[0], signed), caught[1]))

    def turn(self) -> None:
        """A new epoch: what was said before the last one is settled."""
        self._said, self._before = {}, self._said

    def hear(self, author: PeerId, signed: Signed, lowest_voter: PeerId) -> tuple[Signed, str] | None:
        """Take in a checked statement; the earlier one that it contradicts, and how, if there is one."""
        if signed.kind not in _AGAINST:
            return None
        _, body = self._statements.check(signed)
        attempt = getattr(body, "attempt", 0)
        for kind in _AGAINST[signed.kind]:
            key = (author, kind)
            for earlier_attempt, earlier in (*self._said.get(key, ()), *self._before.get(key, ())):
                if kind == signed.kind and earlier_attempt != attempt:
                    continue  # most of what is kept, after many attempts
                why = contradiction(self._statements, earlier, signed, lowest_voter)
                if why:
                    return earlier, why
        said = self._said.setdefault((author, signed.kind), [])
        if len(said) < _KEPT:
            said.append((attempt, signed))
        return None
