"""Making and checking VIEWs: who may convene, when it may, and what it is forced to. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import PeerId, peer_id_of, show
from p2p_diloco.proto.chain import Chain, RunView
from p2p_diloco.proto.plans import Trip, trips
from p2p_diloco.proto.statements import Statements
from p2p_diloco.wire.messages import Holding, Promise, Reuse, Signed, View, Vote


@dataclass(frozen=True)
class CheckedPromise:
    """A promise with its vote and view already checked. `vote` is None if it reports none."""

    signed: Signed
    attempt: int
    vote: Vote | None
    view: Signed | None
    finished: tuple[Holding, ...] = ()
    unreachable: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class CheckedView:
    """A view that may be followed. `run_view` is the ring: its own, or the one whose result is adopted. run:
    `trips` says how each reused chunk travels; adopt: `vote` is the result to finish, and `holders` the peers
    that voted for it."""

    signed: Signed
    attempt: int
    run_view: RunView
    vote: Vote | None
    holders: tuple[PeerId, ...]
    trips: Mapping[int, Trip]


def check_promise(statements: Statements, chain: Chain, signed: Signed) -> tuple[PeerId, CheckedPromise]:
    """Author and content of a PROMISE of the next epoch; raises ProtocolViolation."""
    peer, body = statements.check(signed)
    if not isinstance(body, Promise):
        raise ProtocolViolation("expected a PROMISE")
    if body.epoch != chain.epoch + 1 or body.previous != chain.head.digest:
        raise ProtocolViolation(f"promise of epoch {body.epoch} is not on our head")
    if len(body.vote) != len(body.view):
        raise ProtocolViolation("a promise reports a vote without its view")
    if not body.vote:
        return peer, CheckedPromise(signed, body.attempt, None, None, body.finished, body.unreachable)
    voter, vote = statements.check(body.vote[0])
    if voter != peer or not isinstance(vote, Vote):
        raise ProtocolViolation(f"promise of {show(peer)} reports a vote that is not its own")
    chain.check_height(vote)
    if vote.attempt >= body.attempt or vote.view_hash != body.view[0].digest():
        raise ProtocolViolation(f"promise of {show(peer)} reports an impossible vote")
    chain.check_run_view(body.view[0])
    return peer, CheckedPromise(signed, body.attempt, vote, body.view[0], body.finished, body.unreachable)


def forced(promises: Mapping[PeerId, CheckedPromise]) -> tuple[Vote, Signed, tuple[PeerId, ...]] | None:
    """The result that must be adopted: the vote of the highest attempt, its view, and its voters."""
    best: tuple[Vote, Signed] | None = None
    for peer in sorted(promises):
        promise = promises[peer]
        if promise.vote is None or promise.view is None:
            continue
        if best is None or promise.vote.attempt > best[0].attempt:
            best = (promise.vote, promise.view)
    if best is None:
        return None
    holders = tuple(peer for peer in sorted(promises) if _result(promises[peer].vote) == _result(best[0]))
    return best[0], best[1], holders


def _result(vote: Vote | None) -> tuple[bytes, bytes, bytes] | None:
    return None if vote is None else (vote.view_hash, vote.chunk_root, vote.state_root)


def make_view(
    chain: Chain,
    attempt: int,
    readies: tuple[Signed, ...],
    promises: Mapping[PeerId, CheckedPromise],
    abstentions: tuple[Signed, ...] = (),
    reuse: tuple[Reuse, ...] = (),
) -> View:
    """The VIEW body of ``attempt``: adopt if a promise forces it, else run the ring of ``readies``.

    The promises of ring members that do not vote yet are shown too: they say who holds what is reused.
    """
    epoch, previous = chain.epoch + 1, chain.head.digest
    listed = {peer_id_of(ready.public_key) for ready in readies}
    proof = tuple(promises[p].signed for p in sorted(promises) if p in chain.voters or p in listed)
    must = forced({peer: promises[peer] for peer in promises if peer in chain.voters})
    if must is not None:
        return View(epoch, previous, attempt, "adopt", (), proof, (must[1],), abstentions)
    return View(epoch, previous, attempt, "run", readies, proof, (), abstentions, reuse)


def check_view(statements: Statements, chain: Chain, signed: Signed) -> CheckedView:
    """A VIEW for the next epoch that may be followed; raises ProtocolViolation with the reason.

    Anyone recomputes who convenes, that a later attempt rests on a quorum of promises, and that it adopts
    a reported vote if there is one.
    """
    author, body = statements.check(signed)
    if not isinstance(body, View):
        raise ProtocolViolation("expected a VIEW")
    chain.check_height(body)
    if author != chain.convener(body.attempt):
        raise ProtocolViolation(f"{show(author)} is not the convener of attempt {body.attempt}")
    abstained = [chain.check_abstention(entry) for entry in body.abstentions]
    promises: dict[PeerId, CheckedPromise] = {}
    for entry in body.promises:
        peer, promise = check_promise(statements, chain, entry)
        if promise.attempt != body.attempt:
            raise ProtocolViolation(f"view of attempt {body.attempt} shows another attempt's promise")
        promises[peer] = promise
    if body.attempt > 0 and not chain.enough(abstained, promises):
        raise ProtocolViolation(f"view of attempt {body.attempt} shows no quorum of promises")
    must = forced({peer: promises[peer] for peer in promises if peer in chain.voters})
    if body.mode == "run":
        if must is not None:
            raise ProtocolViolation("a view runs again although a promise reports a vote")
        ring = chain.check_run_view(signed)
        finished = {peer: promises[peer].finished for peer in promises}
        try:
            routes = trips(ring.sources, ring.plan.order, finished)
        except KeyError as chunk:
            raise ProtocolViolation(
                f"a view reuses chunk {chunk}, which no member of its ring holds"
            ) from None
        return CheckedView(signed, body.attempt, ring, None, (), routes)
    if must is None or len(body.adopted) != 1 or body.adopted[0].digest() != must[0].view_hash:
        raise ProtocolViolation("a view adopts what no promise reports")
    return CheckedView(signed, body.attempt, chain.check_run_view(body.adopted[0]), must[0], must[2], {})
