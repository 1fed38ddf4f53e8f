"""The certificate chain: who took part, who may vote next, and whether a certificate is valid.

Certificate 0 is genesis: no votes, one member (the founder). Each later certificate is valid by a
quorum of equal votes of the voters that the one before it names. Pure functions of the chain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import PeerId, peer_id_of, show
from p2p_diloco.proto.plans import Plan, Source, chunks_in
from p2p_diloco.proto.statements import Statements
from p2p_diloco.wire.messages import (
    ZERO,
    Abstain,
    Certificate,
    Genesis,
    Ready,
    Signed,
    View,
    Vote,
)


def genesis_certificate(genesis: Genesis) -> Certificate:
    """Certificate 0: decided by the genesis record itself."""
    return Certificate(0, genesis.run_id(), (), ZERO, genesis.state_root, (), ())


def rank(epoch: int, previous: bytes, peers: Iterable[PeerId]) -> list[PeerId]:
    """``peers`` in the hash order of this epoch; nobody can choose its place beforehand."""

    def key(peer: PeerId) -> bytes:
        return hashlib.sha256(b"p2p-diloco/rank\0" + epoch.to_bytes(8, "big") + previous + peer).digest()

    return sorted(set(peers), key=key)


def quorum_reached(
    voters: Sequence[PeerId], abstained: Iterable[PeerId], signers: Iterable[PeerId], rule: str = "majority"
) -> bool:
    """True if ``signers`` decide for ``voters`` of whom ``abstained`` will never vote in this epoch.

    More than half of those left; an exact half only with the lowest of them; or more than two thirds. If all
    have abstained, the lowest voter's abstention is void: it knows that no vote can be out there.
    Any two quorums share a voter, whatever abstentions each counted, since an abstainer has no vote
    (docs/DESIGN.md, section 8).
    """
    left = sorted(set(voters) - set(abstained))
    if not left:
        left = sorted(set(voters))[:1]
    if not left:
        return False
    present = set(signers) & set(left)
    if rule == "two_thirds":
        return 3 * len(present) > 2 * len(left)
    if 2 * len(present) == len(left):
        return left[0] in present
    return 2 * len(present) > len(left)


@dataclass(frozen=True)
class RunView:
    """A checked run-mode VIEW: the ring that it starts, and what it takes over from earlier attempts."""

    signed: Signed
    plan: Plan
    sources: tuple[Source, ...]

    def plan_of(self, chunk: int) -> Plan:
        """Whose deltas are summed in this chunk."""
        for source in self.sources:
            if chunk in source.chunks:
                return source.plan
        return self.plan


@dataclass(frozen=True)
class Link:
    """One checked certificate with what follows from it. `contributors`, in ring order, and their `weights`
    are those of the attempt that was certified; chunks taken over from an earlier attempt have their own
    (`plan_of`)."""

    certificate: Certificate
    digest: bytes
    contributors: tuple[PeerId, ...]
    weights: tuple[int, ...]
    voters: tuple[PeerId, ...]
    view: RunView | None = None

    @property
    def members(self) -> tuple[tuple[PeerId, Ready], ...]:
        return () if self.view is None else self.view.plan.members

    def plan_of(self, chunk: int) -> tuple[tuple[PeerId, Ready], ...]:
        """The members whose deltas are summed in this chunk, in ring order; empty for genesis."""
        return () if self.view is None else self.view.plan_of(chunk).members


class Chain:
    """All checked certificates from genesis to the head."""

    def __init__(self, genesis: Genesis, statements: Statements, quorum: str = "majority") -> None:
        self.genesis = genesis
        self.quorum = quorum
        self._statements = statements
        first = genesis_certificate(genesis)
        founder = peer_id_of(genesis.founder)
        self._links = [Link(first, first.digest(), (founder,), (1,), (founder,))]

    @property
    def head(self) -> Link:
        return self._links[-1]

    @property
    def epoch(self) -> int:
        return len(self._links) - 1

    @property
    def voters(self) -> tuple[PeerId, ...]:
        """Who decides the next epoch."""
        return self.head.voters

    @property
    def members(self) -> tuple[PeerId, ...]:
        """Who contributed to the head: the candidates for convening the next epoch."""
        return self.head.contributors

    def link(self, epoch: int) -> Link:
        return self._links[epoch]

    def certificates(self, start: int, limit: int) -> tuple[Certificate, ...]:
        return tuple(link.certificate for link in self._links[start : start + limit])

    def conveners(self) -> list[PeerId]:
        return rank(self.epoch + 1, self.head.digest, self.members)

    def convener(self, attempt: int) -> PeerId:
        order = self.conveners()
        return order[attempt % len(order)]

    def enough(self, abstained: Iterable[PeerId], signers: Iterable[PeerId]) -> bool:
        return quorum_reached(self.voters, abstained, signers, self.quorum)

    def append(self, certificate: Certificate) -> Link:
        """Check the next certificate and take it as the head; raise ProtocolViolation otherwise."""
        link = self.check(certificate)
        self._links.append(link)
        return link

    def check(self, certificate: Certificate) -> Link:
        """What `append` would add, without adding it."""
        epoch, head = self.epoch + 1, self.head
        if certificate.epoch != epoch or certificate.previous != head.digest:
            raise ProtocolViolation(f"certificate {certificate.epoch} does not follow epoch {self.epoch}")
        if len(certificate.view) != 1:
            raise ProtocolViolation(f"certificate {epoch} has no view")
        view = self.check_run_view(certificate.view[0])
        contributors = view.plan.order
        self._check_votes(certificate)
        if epoch == 1:
            voters = contributors
        else:
            before = set(head.contributors)
            voters = tuple(peer for peer in contributors if peer in before)
        voters = tuple(sorted(voters))
        return Link(certificate, certificate.digest(), contributors, view.plan.weights, voters, view)

    def check_run_view(self, signed: Signed) -> RunView:
        """The ring of a run-mode view of the next epoch, and what it reuses; raises ProtocolViolation."""
        _, view = self._statements.check(signed)
        if not isinstance(view, View) or view.mode != "run":
            raise ProtocolViolation("the view of a ring must be a run-mode VIEW")
        self.check_height(view)
        sources: list[Source] = []
        taken: set[int] = set()
        for reuse in view.reuse:
            chunks = chunks_in(reuse.chunks)
            if reuse.attempt >= view.attempt or taken & set(chunks):
                raise ProtocolViolation("a view reuses a chunk twice, or one of a later attempt")
            taken.update(chunks)
            sources.append(Source(self._check_plan(reuse.attempt, reuse.readies), chunks))
        return RunView(signed, self._check_plan(view.attempt, view.readies), tuple(sources))

    def _check_plan(self, attempt: int, readies: Sequence[Signed]) -> Plan:
        bodies = [self.check_ready(entry)[1] for entry in readies]
        plan = Plan.of(self.epoch + 1, attempt, readies, bodies)
        if not readies:
            raise ProtocolViolation("a view without members")
        if len(set(plan.order)) != len(plan.order):
            raise ProtocolViolation("a view names a member twice")
        return plan

    def check_ready(self, signed: Signed) -> tuple[PeerId, Ready]:
        peer, ready = self._statements.check(signed)
        if not isinstance(ready, Ready):
            raise ProtocolViolation("a view lists something that is no READY")
        self.check_height(ready)
        if ready.state_root != self.head.certificate.state_root:
            raise ProtocolViolation(f"READY of {show(peer)} is on another state root")
        return peer, ready

    def check_abstention(self, signed: Signed) -> PeerId:
        peer, body = self._statements.check(signed)
        if not isinstance(body, Abstain):
            raise ProtocolViolation("expected an ABSTAIN")
        self.check_height(body)
        return peer

    def check_height(self, body: Ready | View | Vote | Abstain) -> None:
        if body.epoch != self.epoch + 1 or body.previous != self.head.digest:
            raise ProtocolViolation(f"statement of epoch {body.epoch} is not on our head {self.epoch}")

    def _check_votes(self, certificate: Certificate) -> None:
        abstained = [self.check_abstention(signed) for signed in certificate.abstentions]
        view_hash = certificate.view[0].digest()
        signers: list[PeerId] = []
        attempts: list[int] = []
        for signed in certificate.votes:
            peer, vote = self._statements.check(signed)
            if not isinstance(vote, Vote):
                raise ProtocolViolation("a certificate lists something that is no VOTE")
            self.check_height(vote)
            value = (vote.view_hash, vote.chunk_root, vote.state_root)
            if value != (view_hash, certificate.chunk_root, certificate.state_root):
                raise ProtocolViolation(f"vote of {show(peer)} is for another result")
            signers.append(peer)
            attempts.append(vote.attempt)
        if len(set(signers)) != len(signers) or len(set(attempts)) > 1:
            raise ProtocolViolation(f"certificate {certificate.epoch} mixes or repeats votes")
        if not self.enough(abstained, signers):
            raise ProtocolViolation(f"certificate {certificate.epoch} has no quorum of votes")
