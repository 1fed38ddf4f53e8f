"""Votes and promises heard in the current epoch, and what they decide. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from p2p_diloco.identity import PeerId
from p2p_diloco.proto.chain import Chain, RunView
from p2p_diloco.proto.convene import CheckedPromise
from p2p_diloco.proto.plans import Plan
from p2p_diloco.wire.messages import Certificate, Signed, Vote

Value = tuple[int, bytes, bytes, bytes]  # attempt, view hash, chunk root, state root


class Ballots:
    """One epoch's ballots. `run_views`: checked views of rings by hash; a certificate needs the one it rests
    on, and later attempts may reuse what their rings finished."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._votes: dict[Value, dict[PeerId, Signed]] = {}
        self._first: dict[tuple[PeerId, int], bytes] = {}
        self._promises: dict[int, dict[PeerId, CheckedPromise]] = {}
        self.run_views: dict[bytes, RunView] = {}

    def add_vote(self, author: PeerId, vote: Vote, signed: Signed) -> None:
        """Count a voter's vote; of two in one attempt the first one heard counts (`conflicts` reports it)."""
        if author not in self._chain.voters:
            return
        if self._first.setdefault((author, vote.attempt), signed.digest()) == signed.digest():
            value = (vote.attempt, vote.view_hash, vote.chunk_root, vote.state_root)
            self._votes.setdefault(value, {})[author] = signed

    def heard(self, attempt: int) -> list[PeerId]:
        """Who voted in this attempt."""
        return sorted({v for value, votes in self._votes.items() if value[0] == attempt for v in votes})

    def voters_of(self, view_hash: bytes, chunk_root: bytes) -> list[PeerId]:
        """Who voted for this result, in any attempt: those that hold it."""
        found = [
            v for value, votes in self._votes.items() if value[1:3] == (view_hash, chunk_root) for v in votes
        ]
        return sorted(set(found))

    def add_promise(self, author: PeerId, promise: CheckedPromise) -> None:
        if promise.view is not None:
            self.add_view(self._chain.check_run_view(promise.view))
        self._promises.setdefault(promise.attempt, {})[author] = promise

    def add_view(self, view: RunView) -> None:
        self.run_views.setdefault(view.signed.digest(), view)

    def plans(self) -> list[Plan]:
        """The plans of all rings that were started or reused in this epoch, as far as we know."""
        found = {}
        for name in sorted(self.run_views):
            view = self.run_views[name]
            for plan in (view.plan, *(source.plan for source in view.sources)):
                found[plan.name] = plan
        return [found[name] for name in sorted(found)]

    def promises(self, attempt: int) -> dict[PeerId, CheckedPromise]:
        return self._promises.get(attempt, {})

    def decided(self, abstained: Mapping[PeerId, Signed]) -> Certificate | None:
        """The certificate, if some result has a quorum of votes and its view is known."""
        for value in sorted(self._votes):
            _, view_hash, chunk_root, state_root = value
            votes, view = self._votes[value], self.run_views.get(view_hash)
            if view is None or not self._chain.enough(abstained, votes):
                continue
            return Certificate(
                self._chain.epoch + 1,
                self._chain.head.digest,
                (view.signed,),
                chunk_root,
                state_root,
                tuple(votes[peer] for peer in sorted(votes)),
                tuple(abstained[peer] for peer in sorted(abstained)),
            )
        return None

    def can_decide(self, abstained: Iterable[PeerId], usable: Iterable[PeerId]) -> bool:
        """True if some result may still reach a quorum with the voters that are here."""
        gone, here = set(abstained), set(usable)
        if not self._votes:
            return self._chain.enough(gone, here)
        return any(self._chain.enough(gone, here | set(votes)) for votes in self._votes.values())
