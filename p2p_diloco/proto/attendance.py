"""Who is READY, who abstained, and whom a ring should still wait for. Pure."""

from __future__ import annotations

from p2p_diloco.config import AgreementConfig, TimeoutConfig
from p2p_diloco.identity import PeerId
from p2p_diloco.proto.chain import Chain
from p2p_diloco.proto.membership import LINK_WAIT_NS, Membership
from p2p_diloco.wire.messages import Ready, Signed

_S = 1_000_000_000
# Phases in which a peer on our head is on its way to READY.
_COMING = ("training", "ready", "ring", "voting", "finishing", "waiting")


class Attendance:
    """One epoch's READYs and abstentions."""

    def __init__(
        self,
        chain: Chain,
        members: Membership,
        agreement: AgreementConfig,
        timeouts: TimeoutConfig,
        now_ns: int,
    ) -> None:
        self._chain, self._members = chain, members
        self._agreement, self._timeouts = agreement, timeouts
        self.readies: dict[PeerId, Signed] = {}
        self._trials: dict[PeerId, tuple[int, int]] = {}  # (life, trial) of each READY
        self.abstained: dict[PeerId, Signed] = {}
        self._half_ready_ns = 0
        self._since_ns = now_ns

    def add_ready(self, author: PeerId, signed: Signed, body: Ready) -> None:
        """Take in a READY; of two by one peer the one of its later life, or later trial, counts."""
        trial = (body.life, body.trial)
        if author not in self.readies or trial > self._trials[author]:
            self.readies[author], self._trials[author] = signed, trial

    def slept(self, gap_ns: int) -> None:
        """We were stopped for so long: nobody had to be READY meanwhile."""
        self._since_ns += gap_ns
        if self._half_ready_ns:
            self._half_ready_ns += gap_ns

    def awaited(self, peer: PeerId, own_state: str) -> bool:
        """True if a ring should wait for this peer's READY."""
        if peer in self.readies or peer in self.abstained:
            return False
        if peer == self._members.me:
            return own_state == "training"
        member = self._members.get(peer)
        progress = member.progress if member is not None else None
        if progress is None or progress.epoch < self._chain.epoch:
            return peer in self._chain.members  # the verdict is still on its way there
        return progress.epoch == self._chain.epoch and progress.phase in _COMING

    def waiting_for(self, own_state: str) -> list[PeerId]:
        """Those worth waiting for. Who was in the last ring is waited for although we have no link to it, as
        long as others have one: its READY comes through them."""
        linked = [self._members.me, *self._members.usable_peers()]
        far = [p for p in self._chain.members if p not in linked and self._members.reachable(p)]
        return [peer for peer in [*linked, *far] if self.awaited(peer, own_state)]

    def ring_candidates(self) -> list[PeerId]:
        """READY peers that can be reached, by us or by others, sorted. A READY of an earlier life counts no
        more: the delta behind it died with that process."""
        return [
            peer
            for peer in sorted(self.readies)
            if self._members.reachable(peer) and self._trials[peer][0] >= self._members.life_of(peer)
        ]

    def note_ready(self, own_state: str, now_ns: int) -> None:
        """Remember when half of those expected were READY: stragglers are timed from there."""
        expected = len(self.ring_candidates()) + len(self.waiting_for(own_state))
        if not self._half_ready_ns and 2 * len(self.readies) >= expected:
            self._half_ready_ns = now_ns

    def enough_for_ring(self) -> bool:
        members = self.ring_candidates()
        if self._chain.epoch == 0 and len(members) < self._agreement.min_peers:
            return False
        return bool(members) and self._chain.enough(self.abstained, members)

    def ring_may_start(self, own_state: str, now_ns: int) -> bool:
        """True if a quorum is READY and nobody else is worth waiting for (any longer)."""
        if not self.enough_for_ring():
            return False
        if self._late(self._timeouts.view_s, now_ns):
            return True
        return not self.waiting_for(own_state) and not self._linking(now_ns)

    def _linking(self, now_ns: int) -> bool:
        """True if a peer that belongs in the ring has no link to us yet, but may have at any moment."""
        if now_ns >= self._since_ns + LINK_WAIT_NS:
            return False
        for peer in {**self.readies, **dict.fromkeys(self._chain.members)}:
            unknown = peer != self._members.me and self._members.get(peer) is None
            if peer not in self.abstained and (unknown or self._members.hopeful(peer, now_ns)):
                return True
        return False

    def straggling(self, now_ns: int) -> bool:
        """True if the half that is READY has waited long enough for the rest to stop early."""
        return self._late(0.0, now_ns)

    def _late(self, extra_s: float, now_ns: int) -> bool:
        patience_ns = round((self._timeouts.straggler_s + extra_s) * _S)
        return bool(self._half_ready_ns) and now_ns >= self._half_ready_ns + patience_ns
