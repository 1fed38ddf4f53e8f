"""Votes and promises heard in the current epoch, and what they decide. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from p2p_diloco.identity import PeerId, show
from p2p_diloco.proto.chain import Chain
from p2p_diloco.proto.convene import CheckedPromise
from p2p_diloco.proto.events import Effect, Notice
from p2p_diloco.wire.messages import Certificate, Signed, Vote

Value = tuple[int, bytes, bytes, bytes]  # attempt, view hash, chunk root, state root


class Ballots:
    """One epoch's ballots. `run_views`: views of rings by hash; a certificate needs the one it rests on."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._votes: dict[Value, dict[PeerId, Signed]] = {}
        self._first: dict[tuple[PeerId, int], bytes] = {}
        self._promises: dict[int, dict[PeerId, CheckedPromise]] = {}
        self.run_views: dict[bytes, Signed] = {}

    def add_vote(self, author: PeerId, vote: Vote, signed: Signed) -> list[Effect]:
        """Count a voter's vote; a second, different one in the same attempt is reported, not counted."""
        if author not in self._chain.voters:
            return []
        first = self._first.setdefault((author, vote.attempt), signed.digest())
        if first != signed.digest():
            text = f"peer {show(author)} voted twice in attempt {vote.attempt} of epoch {vote.epoch}"
            return [Notice("error", text)]
        value = (vote.attempt, vote.view_hash, vote.chunk_root, vote.state_root)
        self._votes.setdefault(value, {})[author] = signed
        return []

    def add_promise(self, author: PeerId, promise: CheckedPromise) -> None:
        if promise.view is not None:
            self.run_views.setdefault(promise.view.digest(), promise.view)
        self._promises.setdefault(promise.attempt, {})[author] = promise

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
                (view,),
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
