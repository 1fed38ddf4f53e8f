"""When a convener may send its VIEW, and what it puts into it. Pure; one per epoch."""

from __future__ import annotations

from collections.abc import Mapping

from p2p_diloco.identity import PeerId, show
from p2p_diloco.proto.attendance import Attendance
from p2p_diloco.proto.ballots import Ballots
from p2p_diloco.proto.chain import Chain
from p2p_diloco.proto.convene import CheckedPromise, make_view
from p2p_diloco.proto.events import Effect, Notice
from p2p_diloco.proto.membership import Membership
from p2p_diloco.proto.order import ring_order
from p2p_diloco.proto.plans import choose_reuse
from p2p_diloco.proto.speed import fastest_order
from p2p_diloco.wire.messages import View

_PROMISE_WAIT_NS = 1_000_000_000  # a convener's patience for promises beyond the quorum (guess)


class Convening:
    """Reads what the epoch has heard; changes nothing."""

    def __init__(
        self, chain: Chain, members: Membership, attendance: Attendance, ballots: Ballots, chunks: int
    ) -> None:
        self._chain, self._members = chain, members
        self._attendance, self._ballots = attendance, ballots
        self._chunks = chunks

    def view(
        self, attempt: int, own_state: str, since_ns: int, now_ns: int
    ) -> tuple[View | None, list[Effect]]:
        """The VIEW of our attempt, or None as long as it must wait for somebody."""
        promises = self._ballots.promises(attempt)
        if attempt > 0 and not self._promises_suffice(promises, since_ns, now_ns):
            return None, []
        forced = any(p.vote is not None for v, p in promises.items() if v in self._chain.voters)
        if not forced and not self._attendance.ring_may_start(own_state, now_ns):
            return None, []
        order, effects = self._order_ring(promises, now_ns)
        if not forced and not self._chain.enough(self._attendance.abstained, order):
            return None, []
        readies = tuple(self._attendance.readies[peer] for peer in order)
        gone = self._attendance.abstained
        abstentions = tuple(gone[peer] for peer in sorted(gone))
        finished = {peer: promise.finished for peer, promise in promises.items() if peer in order}
        reuse = choose_reuse(self._ballots.plans(), finished, self._chunks)
        return make_view(self._chain, attempt, readies, promises, abstentions, reuse), effects

    def _promises_suffice(
        self, promises: Mapping[PeerId, CheckedPromise], since_ns: int, now_ns: int
    ) -> bool:
        """True if a quorum promised, and the other voters have done so too or had time to."""
        if not self._chain.enough(self._attendance.abstained, promises):
            return False
        missing = [v for v in self._chain.voters if self._members.usable(v) and v not in promises]
        waits = any(v not in self._attendance.abstained for v in missing)
        return not waits or now_ns >= since_ns + _PROMISE_WAIT_NS

    def _order_ring(
        self, promises: Mapping[PeerId, CheckedPromise], now_ns: int
    ) -> tuple[tuple[PeerId, ...], list[Effect]]:
        """The ring of those that are READY, around links that do not work."""
        bad = set(self._members.bad_edges(now_ns))
        for peer in sorted(promises):
            bad |= {frozenset((peer, PeerId(other))) for other in promises[peer].unreachable if other != peer}
        here = self._attendance.ring_candidates()
        order = ring_order(here, frozenset(bad), frozenset(self._chain.voters))
        last = self._chain.head.contributors
        order = fastest_order(order, self._members.rates(), frozenset(bad), last)
        out = [show(peer) for peer in here if peer not in order]
        if not out:
            return order, []
        text = f"no ring without a bad link holds all who are READY: epoch {self._chain.epoch + 1} leaves out"
        return order, [Notice("warning", f"{text} {', '.join(out)}")]
