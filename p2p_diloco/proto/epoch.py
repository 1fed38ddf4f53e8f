"""The epoch agreement of one peer: READY, VIEW, ring, VOTE, certificate; again after a failure. Pure.

One `EpochMachine` lives as long as the peer. What it must never forget is in `Acceptor`; what a VIEW may
say is in `convene`; the sums are in `Ring`. Section 8 of docs/DESIGN.md has the protocol and its reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from p2p_diloco.config import AgreementConfig, TimeoutConfig
from p2p_diloco.errors import IllegalTransitionError, ProtocolViolation
from p2p_diloco.identity import PeerId, show
from p2p_diloco.proto.acceptor import Acceptor, LogRecord, failed_to_persist
from p2p_diloco.proto.attendance import Attendance
from p2p_diloco.proto.ballots import Ballots
from p2p_diloco.proto.chain import Chain
from p2p_diloco.proto.convene import CheckedView, check_promise, check_view, make_view
from p2p_diloco.proto.epoch_table import IN_PLAY, PHASES, TABLE, verdict_metric
from p2p_diloco.proto.events import Close, Compute, Effect, FrameIn, Notice, Persist, Send
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.membership import Membership
from p2p_diloco.proto.ring import Ring, RingPlan
from p2p_diloco.proto.statements import Statements
from p2p_diloco.wire.messages import (
    MAX_ATTEMPT,
    Abstain,
    Certificate,
    Promise,
    Ready,
    Signed,
    Statement,
    Verdict,
    View,
    Vote,
    pack_object,
)

_S = 1_000_000_000
_PROMISE_WAIT_NS = _S  # a convener's patience for promises beyond the quorum (guess)
_RETRY_NS = _S  # between looks at a lost quorum (guess)
_MAX_HELD_FRAMES = 4096  # frames that came before their VIEW
_MAX_HELD_BYTES = 256 << 20  # and their bytes: more than the windows of a ring of ten hold (guess)


class EpochMachine:
    """``on_*`` methods take what happened and return effects. `joining` asks the owner to catch up."""

    def __init__(
        self,
        statements: Statements,
        chain: Chain,
        membership: Membership,
        agreement: AgreementConfig,
        timeouts: TimeoutConfig,
        chunks: int,
        window_chunks: int,
        jobs: Jobs,
        log: Iterable[LogRecord],
    ) -> None:
        self._statements, self._chain, self._members = statements, chain, membership
        self._agreement, self._timeouts = agreement, timeouts
        self._chunks, self._window, self._jobs = chunks, window_chunks, jobs
        self.me = statements.me
        self.acceptor = Acceptor(statements, jobs, log)
        self.state = "joining"
        self.history: list[str] = []
        self.fetch: tuple[bytes, tuple[PeerId, ...]] | None = None  # wanted by an adopted view
        self.round_wanted = False  # a local round is to be started
        self.round_salt = 0
        self._future: list[Signed] = []
        self._dead_tags: list[bytes] = []  # views whose attempts are over
        self._reset(0)

    def _reset(self, now_ns: int) -> None:
        """Forget the epoch that ended; take up the one after the chain's head."""
        self.acceptor.begin(self._chain.epoch + 1, self._chain.head.digest)
        self._attendance = Attendance(self._chain, self._members, self._agreement, self._timeouts, now_ns)
        self._ballots = Ballots(self._chain)
        self.attempt = 0
        self._viewed = -1  # highest attempt whose view was accepted
        self.ring: Ring | None = None
        self._held: list[FrameIn] = []
        self._waiting_view: CheckedView | None = None
        self._candidate: tuple[bytes, bytes, bytes] | None = None  # what our copy holds, complete
        self._wanted: tuple[bytes, bytes, bytes] | None = None  # what an adopted view makes us fetch
        self._attempts_lost = 0
        self._deadline_ns = 0
        self._since_ns = now_ns
        self._lost_quorum = False
        self._ring_ns = 0

    # --- what the owner asks ---

    @property
    def epoch(self) -> int:
        """The certified epoch we are at."""
        return self._chain.epoch

    @property
    def phase(self) -> str:
        return PHASES.get(self.state, self.state)

    def next_wake_ns(self, now_ns: int) -> int:
        times = [now_ns + _S]
        if self._deadline_ns:
            times.append(self._deadline_ns)
        return max(min(times), now_ns)

    # --- local events ---

    def on_caught_up(self, now_ns: int) -> list[Effect]:
        """The certified state of the chain's head is installed."""
        self._move("caught_up", now_ns)
        return self._new_round()

    def on_local_ready(self, weight: int, commitment: bytes, now_ns: int) -> list[Effect]:
        """Our delta is final and finite."""
        root = self._chain.head.certificate.state_root
        weight = max(1, min(weight, self._agreement.max_weight_tokens))
        body = Ready(self._chain.epoch + 1, self._chain.head.digest, root, weight, commitment)
        signed = self._statements.make(body)
        self._move("local_ready", now_ns)
        self._attendance.readies[self.me] = signed
        self._deadline_ns = 0
        effects = [*self._flood(Statement(signed)), *self._after_ready(now_ns)]
        if self.state == "ready" and self._viewed >= self.acceptor.promised:
            self._move("view_without", now_ns)  # too late for this attempt, there for the next
            self._deadline_ns = now_ns + self._patience_ns(self._timeouts.stall_s + self._timeouts.vote_s)
        elif self.state == "ready" and self.acceptor.promised > 0:
            effects += self._follow_promise(now_ns)
        return effects

    def on_local_bad(self, reason: str, now_ns: int) -> list[Effect]:
        """Our delta cannot be used: sit this epoch out, and do not hold up its quorum."""
        if self.state != "training":
            return []
        self._move("local_bad", now_ns)
        effects: list[Effect] = [Notice("warning", f"sitting out epoch {self.epoch + 1}: {reason}")]
        if self.me in self._chain.voters:
            effects += self.acceptor.abstain(reason, leaving=False)
        elif self._chain.epoch == 0:
            effects += self._retry_round(now_ns)  # the founding ring may be waiting for our READY
        return effects

    def on_leave(self, reason: str) -> list[Effect]:
        """We go: others need not count on our vote in this epoch."""
        if self.me in self._chain.voters and len(self._chain.voters) > 1:
            return self.acceptor.abstain(reason, leaving=True)
        return []

    def on_persisted(self, note: tuple[Any, ...], error: str, now_ns: int) -> list[Effect]:
        kind, epoch, signed = note
        if error:
            return [failed_to_persist(kind, error)]
        if epoch != self._chain.epoch + 1:
            return []
        return [*self._flood(Statement(signed)), *self.on_statement(signed, None, now_ns)]

    # --- statements ---

    def on_statement(self, signed: Signed, source: PeerId | None, now_ns: int) -> list[Effect]:
        """A new statement; raises ProtocolViolation if it is bad. Those of the next epoch are kept."""
        author, body = self._statements.check(signed)
        if not isinstance(body, Ready | View | Vote | Promise | Abstain):
            return []
        if body.epoch != self._chain.epoch + 1 or body.previous != self._chain.head.digest:
            if body.epoch == self._chain.epoch + 2 and len(self._future) < 1024:
                self._future.append(signed)
            return []
        if isinstance(body, Ready):
            self._chain.check_ready(signed)
            self._attendance.readies.setdefault(author, signed)
            return self._after_ready(now_ns)
        if isinstance(body, Abstain):
            self._attendance.abstained[author] = signed
            return [*self._after_abstain(now_ns), *self._after_vote(now_ns), *self._after_ready(now_ns)]
        if isinstance(body, Vote):
            return [*self._ballots.add_vote(author, body, signed), *self._after_vote(now_ns)]
        if isinstance(body, Promise):
            return self._on_promise(author, signed, now_ns)
        return self._on_view(signed, now_ns)

    def _after_ready(self, now_ns: int) -> list[Effect]:
        self._attendance.note_ready(self.state, now_ns)
        return self._try_convene(now_ns)

    def _after_abstain(self, now_ns: int) -> list[Effect]:
        voters = self._chain.voters
        everyone = bool(voters) and all(peer in self._attendance.abstained for peer in voters)
        if everyone and voters[0] == self.me and self.state == "sitting_out":
            self.acceptor.void_abstention()
            return self._retry_round(now_ns)
        return []

    def _retry_round(self, now_ns: int) -> list[Effect]:
        self._move("retry", now_ns)
        self.round_salt += 1
        self.round_wanted = True
        return [Notice("warning", f"epoch {self.epoch + 1} cannot do without us: training it again")]

    def _after_vote(self, now_ns: int) -> list[Effect]:
        """Take the verdict if some result has its quorum."""
        certificate = self._ballots.decided(self._attendance.abstained)
        return [] if certificate is None else self.on_certificate(certificate, now_ns)

    def _on_promise(self, author: PeerId, signed: Signed, now_ns: int) -> list[Effect]:
        peer, promise = check_promise(self._statements, self._chain, signed)
        if author not in self._chain.voters and author not in self._attendance.readies:
            return []
        if promise.attempt <= self._viewed:
            return []
        self._ballots.add_promise(peer, promise)
        effects: list[Effect] = []
        if promise.attempt > self.acceptor.promised and peer != self.me:
            why = f"{show(peer)} gave up attempt {self.attempt}"
            effects += self._give_up(why, promise.attempt, now_ns)
        return [*effects, *self._try_convene(now_ns)]

    # --- convening ---

    def _try_convene(self, now_ns: int) -> list[Effect]:
        attempt = self.acceptor.promised
        if self.state not in ("ready", "promised", "sitting_out") or self._chain.convener(attempt) != self.me:
            return []
        if attempt <= self._viewed:
            return []
        promises = self._ballots.promises(attempt)
        if attempt > 0:
            if not self._chain.enough(self._attendance.abstained, promises):
                return []
            missing = [v for v in self._chain.voters if self._members.usable(v) and v not in promises]
            if (
                any(v not in self._attendance.abstained for v in missing)
                and now_ns < self._since_ns + _PROMISE_WAIT_NS
            ):
                return []
        forced = any(p.vote is not None for v, p in promises.items() if v in self._chain.voters)
        if not forced and not self._attendance.ring_may_start(self.state, now_ns):
            return []
        here, gone = self._attendance.readies, self._attendance.abstained
        readies = tuple(here[peer] for peer in self._attendance.ring_candidates())
        abstentions = tuple(gone[peer] for peer in sorted(gone))
        signed = self._statements.make(make_view(self._chain, attempt, readies, promises, abstentions))
        return [*self._flood(Statement(signed)), *self._on_view(signed, now_ns)]

    # --- views ---

    def _on_view(self, signed: Signed, now_ns: int) -> list[Effect]:
        view = check_view(self._statements, self._chain, signed)
        self._ballots.run_views[view.run_view.digest()] = view.run_view
        if view.attempt < self.acceptor.promised or view.attempt <= self._viewed:
            return self._after_vote(now_ns)
        self.attempt = self._viewed = view.attempt
        self.acceptor.promised = max(self.acceptor.promised, view.attempt)
        for peer, _ in view.members:
            self._attendance.readies.setdefault(peer, self._ready_in(view, peer))
        self._drop_ring()
        if not self._in_play():
            return self._after_vote(now_ns)
        self._waiting_view = view
        return [*self._start_view(now_ns), *self._after_vote(now_ns)]

    def _in_play(self) -> bool:
        """True if our READY is out, so that attempts concern us."""
        return self.state in IN_PLAY and self.me in self._attendance.readies

    def _ready_in(self, view: CheckedView, peer: PeerId) -> Signed:
        _, body = self._statements.check(view.run_view)
        assert isinstance(body, View)
        return body.readies[[member for member, _ in view.members].index(peer)]

    def _start_view(self, now_ns: int) -> list[Effect]:
        """Follow the accepted view, once no worker writes for an earlier one any more."""
        view = self._waiting_view
        if view is None or self._jobs.open_of("ring") or self._jobs.open_of("catchup"):
            return []
        self._waiting_view = None
        order = tuple(peer for peer, _ in view.members)
        if view.vote is not None:
            return self._follow_adopted(view, view.vote, now_ns)
        if self.me not in order:
            self._move("view_without", now_ns)
            self._deadline_ns = now_ns + self._patience_ns(self._timeouts.stall_s + self._timeouts.vote_s)
            return [Notice("info", f"attempt {view.attempt} of epoch {self.epoch + 1} runs without us")]
        place = order.index(self.me)
        beside = {order[place - 1], order[(place + 1) % len(order)]}
        if any(self._members.hopeful(peer, now_ns) for peer in beside):
            self._waiting_view = view  # a first link to a neighbour is about to come up
            return []
        weights = tuple(ready.weight for _, ready in view.members)
        plan = RingPlan(view.run_view.digest(), order, weights, self._chunks)
        self._move("view_run", now_ns)
        self._candidate = None
        self.ring = Ring(plan, self.me, self._window, self._jobs, now_ns)
        self._deadline_ns = now_ns + round(self._timeouts.stall_s * _S)
        for neighbour in (self.ring.left, self.ring.right):
            if not self._members.usable(neighbour):
                return self._fail(f"ring neighbour {show(neighbour)} is not there", now_ns)
        return [Compute(self._jobs.add("ring", (plan.view_hash, "begin", -1)), "begin")]

    def _begin_ring(self, now_ns: int) -> list[Effect]:
        ring = self.ring
        if ring is None:
            return []
        effects = ring.start()
        held, self._held = self._held, []
        for frame in held:
            effects += self.on_frame(frame, now_ns)
        return [*effects, *self._ring_progress(now_ns)]

    def _follow_adopted(self, view: CheckedView, vote: Vote, now_ns: int) -> list[Effect]:
        value = (vote.view_hash, vote.chunk_root, vote.state_root)
        if self._candidate == value:
            self._move("view_have", now_ns)
            return self._cast(now_ns)
        self._move("view_fetch", now_ns)
        self._candidate, self._wanted = None, value
        self.fetch = (vote.state_root, tuple(p for p in view.holders if p != self.me))
        self._deadline_ns = now_ns + self._patience_ns(self._timeouts.view_s)
        return [Notice("info", f"finishing epoch {self.epoch + 1} with the result that others voted for")]

    def on_fetched(self, now_ns: int) -> list[Effect]:
        """The adopted result is in our copy."""
        if self.state != "fetching":
            return []
        self._move("fetched", now_ns)
        self._candidate = self._wanted
        return self._cast(now_ns)

    # --- the ring ---

    def on_frame(self, frame: FrameIn, now_ns: int) -> list[Effect]:
        """A reduce or gather frame; held if its VIEW has not come yet, dropped if its attempt is over."""
        ring = self.ring
        if ring is not None and frame.tag == ring.plan.view_hash and not self._beginning(ring):
            try:
                return [*ring.on_frame(frame, now_ns), *self._ring_progress(now_ns)]
            except ProtocolViolation as violation:
                return [Close(frame.peer, str(violation)), *self._fail(str(violation), now_ns)]
        if frame.tag in self._dead_tags:
            return []
        held_bytes = sum(len(waiting.payload) for waiting in self._held)
        if len(self._held) >= _MAX_HELD_FRAMES or held_bytes > _MAX_HELD_BYTES:
            return [Close(frame.peer, "sends ring frames of a view that never came")]
        self._held.append(frame)
        return []

    def _beginning(self, ring: Ring) -> bool:
        return self._jobs.has("ring", (ring.plan.view_hash, "begin", -1))

    def on_computed(self, note: tuple[Any, ...], result: Any, error: str, now_ns: int) -> list[Effect]:
        """A ring job is done; it may belong to an attempt that is over."""
        ring = self.ring
        if ring is None or note[0] != ring.plan.view_hash:
            return self._start_view(now_ns)
        if error:
            return [Close(ring.left, error), *self._fail(error, now_ns)]
        if note[1] == "begin":
            return self._begin_ring(now_ns)
        if note[1] == "roots":
            return self._on_roots(result, now_ns)
        return [*ring.on_computed(note[1:], result, now_ns), *self._ring_progress(now_ns)]

    def _ring_progress(self, now_ns: int) -> list[Effect]:
        ring = self.ring
        if ring is None:
            return []
        self._deadline_ns = now_ns + round(self._timeouts.stall_s * _S)
        if not ring.done or self._jobs.open_of("ring"):
            return []
        payloads = tuple(ring.applied[chunk][0] for chunk in range(ring.plan.chunks))
        leaves = tuple(ring.applied[chunk][1] for chunk in range(ring.plan.chunks))
        job = self._jobs.add("ring", (ring.plan.view_hash, "roots", -1))
        return [Compute(job, "roots", (payloads, leaves))]

    def _on_roots(self, result: tuple[bytes, bytes], now_ns: int) -> list[Effect]:
        ring = self.ring
        assert ring is not None
        if not ring.finite:
            return self._fail("the outer step gave a value that is not finite", now_ns)
        chunk_root, state_root = result
        if self.state == "finishing":
            return self._finished(state_root, now_ns)
        self._candidate = (ring.plan.view_hash, chunk_root, state_root)
        self._ring_ns = now_ns - ring.started_ns
        self._move("ring_done", now_ns)
        return self._cast(now_ns)

    def _cast(self, now_ns: int) -> list[Effect]:
        """Vote for the result in our copy, if we are a voter; then wait for the quorum."""
        self._deadline_ns = now_ns + self._patience_ns(self._timeouts.vote_s)
        assert self._candidate is not None
        view_hash, chunk_root, state_root = self._candidate
        effects: list[Effect] = []
        if self.me in self._chain.voters and self.acceptor.may_vote(self.attempt):
            view = self._ballots.run_views[view_hash]
            effects += self.acceptor.cast(self.attempt, view, chunk_root, state_root)
        return [*effects, *self._after_vote(now_ns)]

    def _drop_ring(self) -> None:
        if self.ring is not None:
            self._dead_tags = [*self._dead_tags[-15:], self.ring.plan.view_hash]
            self.ring = None
        self.fetch = None

    # --- failure ---

    def on_peer_lost(self, peer: PeerId, reason: str, now_ns: int) -> list[Effect]:
        """A link went down, or a frame to this peer could not be delivered."""
        ring = self.ring
        if self.state in ("ring", "finishing") and ring is not None and peer in ring.plan.order:
            return self._fail(f"ring member {show(peer)} was lost ({reason})", now_ns)
        if self.state == "voting" and peer in self._chain.voters and not self._can_decide():
            return self._fail(f"voter {show(peer)} was lost ({reason})", now_ns)
        return self._look_at_convener(now_ns)

    def _look_at_convener(self, now_ns: int) -> list[Effect]:
        waits = self.state == "ready" or (self.state == "promised" and self.acceptor.promised > 0)
        if not waits:
            return []
        convener = self._chain.convener(self.acceptor.promised)
        if self._members.usable(convener):
            return []
        return self._fail(f"convener {show(convener)} is not there", now_ns)

    def on_link_up(self, now_ns: int) -> list[Effect]:
        """A peer became reachable: what waited for it may go on."""
        return [*self._start_view(now_ns), *self._try_convene(now_ns)]

    def on_tick(self, now_ns: int) -> list[Effect]:
        effects = self._start_view(now_ns)
        if self._deadline_ns and now_ns >= self._deadline_ns:
            self._deadline_ns = 0
            words = {
                "ring": "the ring stalled",
                "finishing": "the ring stalled",
                "voting": "no quorum of votes in time",
                "promised": "no view in time",
                "fetching": "the adopted result did not come in time",
                "ready": "no view in time",
                "sitting_out": "no certificate in time",
            }
            if self.state in words:
                effects += self._fail(words[self.state], now_ns)
        if self.state in ("ready", "promised", "sitting_out"):
            effects += self._try_convene(now_ns)
            effects += self._look_at_convener(now_ns)
        if self._in_play() and not self._deadline_ns:
            usable = [v for v in self._chain.voters if self._members.usable(v)]
            if not self._chain.enough(self._attendance.abstained, usable):
                effects += self._quorum_lost("voters are not reachable", usable, now_ns)
        if self.state == "ready" and not self._deadline_ns and self._all_ready(now_ns):
            self._deadline_ns = now_ns + self._patience_ns(self._timeouts.view_s)
        if self.state == "voting" and not self._can_decide():
            effects += self._fail("the voters that are left cannot decide this attempt", now_ns)
        return effects

    def _all_ready(self, now_ns: int) -> bool:
        return self._attendance.ring_may_start(self.state, now_ns)

    def straggling(self, now_ns: int) -> bool:
        """True if the others wait for our local round, and have done so long enough."""
        return self.state == "training" and self._attendance.straggling(now_ns)

    def _can_decide(self) -> bool:
        usable = [v for v in self._chain.voters if self._members.usable(v)]
        return self._ballots.can_decide(self._attendance.abstained, usable)

    def _fail(self, reason: str, now_ns: int) -> list[Effect]:
        """Give up this attempt and promise the next one whose convener is there."""
        if self.state == "finishing":
            return self._abandon(reason, now_ns)
        if not self._in_play():
            return []
        usable = [v for v in self._chain.voters if self._members.usable(v)]
        if not self._chain.enough(self._attendance.abstained, usable):
            return self._quorum_lost(reason, usable, now_ns)
        self._lost_quorum = False
        base = max(self.attempt, self.acceptor.promised)
        count = len(self._chain.members)
        for attempt in range(base + 1, min(base + 1 + count, MAX_ATTEMPT)):
            if self._members.usable(self._chain.convener(attempt)):
                return self._give_up(reason, attempt, now_ns)
        return self._quorum_lost(reason, usable, now_ns)

    def _quorum_lost(self, reason: str, usable: list[PeerId], now_ns: int) -> list[Effect]:
        self._deadline_ns = now_ns + _RETRY_NS
        if self.state == "ring":
            self._drop_ring()
            self._move("fail", now_ns)
        if self._lost_quorum:
            return []
        self._lost_quorum = True
        voters = ", ".join(show(v) for v in self._chain.voters if v not in usable)
        text = f"QuorumLost in epoch {self.epoch + 1} ({reason}): {len(usable)} of {len(self._chain.voters)}"
        return [Notice("error", f"{text} voters are here; waiting for {voters or 'a convener'}")]

    def _give_up(self, reason: str, attempt: int, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        self._since_ns = now_ns
        if self._in_play():
            text = (
                f"epoch {self.epoch + 1} attempt {self.attempt} failed: {reason}; going to attempt {attempt}"
            )
            effects.append(Notice("warning", text))
            self._drop_ring()
            self._waiting_view = None
            self._move("fail", now_ns)
            self._attempts_lost += 1
            self._deadline_ns = now_ns + self._patience_ns(self._timeouts.view_s)
        if self.acceptor.abstention is None:
            effects += self.acceptor.promise(attempt)
        else:
            self.acceptor.promised = max(self.acceptor.promised, attempt)
        return effects

    def _follow_promise(self, now_ns: int) -> list[Effect]:
        """READY after others already went to a later attempt: wait for that attempt's view."""
        self._move("fail", now_ns)
        self._since_ns = now_ns
        self._deadline_ns = now_ns + self._patience_ns(self._timeouts.view_s)
        return self._try_convene(now_ns)

    def _patience_ns(self, seconds: float) -> int:
        doubled = seconds * float(2 ** min(self._attempts_lost, 10))
        return round(min(doubled, self._timeouts.timeout_cap_s) * _S)

    # --- the verdict ---

    def on_certificate(self, certificate: Certificate, now_ns: int, fresh: bool = True) -> list[Effect]:
        """A certificate for the next epoch; raises ProtocolViolation if it is not valid. ``fresh``
        ones are passed on (those of a fetched chain are not)."""
        link = self._chain.append(certificate)
        attempt, ring, view_hash = self.attempt, self.ring, certificate.view[0].digest()
        effects: list[Effect] = list(self._flood(Verdict(certificate))) if fresh else []
        record = self._jobs.add("persist", ("certificate", certificate.epoch, certificate.view[0]))
        effects.append(Persist(record, "certificate", pack_object(certificate)))
        value = (view_hash, certificate.chunk_root, certificate.state_root)
        have = self._candidate == value and self.state in IN_PLAY
        running = self.state == "ring" and ring is not None and ring.plan.view_hash == view_hash
        if self._candidate is not None and not have and self._candidate[0] == view_hash:
            effects += self._diverged(certificate.epoch)
        if running and ring is not None:
            self._ring_ns = now_ns - ring.started_ns
        effects.append(verdict_metric(link, self.me, attempt, self._ring_ns))
        if running:
            self._move("verdict_early", now_ns)
        elif self.state != "joining":
            self._move("verdict_mine" if have else "verdict_other", now_ns)
        if not running:
            self._drop_ring()
        if have:
            effects.append(self._swap(certificate.state_root))
        self._reset(now_ns)
        if running:  # the rest of the ring is on its way: it costs less than fetching the state
            self.ring = ring
            self._deadline_ns = now_ns + round(self._timeouts.stall_s * _S)
        return [*effects, *self._replay_future(now_ns)]

    def _finished(self, state_root: bytes, now_ns: int) -> list[Effect]:
        """Our ring ended after the verdict: take its result if it is the certified one."""
        if state_root != self._chain.head.certificate.state_root:
            return [*self._diverged(self.epoch), *self._abandon("it has another result", now_ns)]
        self._drop_ring()
        self._deadline_ns = 0
        self._move("finished", now_ns)
        return [self._swap(state_root)]

    def _abandon(self, reason: str, now_ns: int) -> list[Effect]:
        """The rest of a certified ring does not come: fetch the state instead."""
        self._drop_ring()
        self._deadline_ns = 0
        self._move("verdict_other", now_ns)
        return [Notice("info", f"fetching the state of epoch {self.epoch}: our ring did not end ({reason})")]

    def _swap(self, state_root: bytes) -> Compute:
        return Compute(self._jobs.add("swap", ()), "swap", (state_root, self._chain.epoch))

    def _diverged(self, epoch: int) -> list[Effect]:
        text = f"StateDivergence in epoch {epoch}: our sum differs from the certified one"
        return [Notice("error", f"{text}; dropping ours and fetching theirs")]

    def _replay_future(self, now_ns: int) -> list[Effect]:
        waiting, self._future = self._future, []
        effects: list[Effect] = []
        for signed in waiting:
            try:
                effects += self.on_statement(signed, None, now_ns)
            except ProtocolViolation as violation:
                effects.append(Notice("warning", f"dropped a statement kept for later: {violation}"))
        return effects

    def on_swapped(self, now_ns: int) -> list[Effect]:
        """The new anchor is in place: start the next local round."""
        if self.state != "closing":
            return []
        self._move("swapped", now_ns)
        return self._new_round()

    def _new_round(self) -> list[Effect]:
        self.round_salt = 0
        self.round_wanted = True
        return []

    # --- small things ---

    def _flood(self, message: Statement | Verdict) -> list[Effect]:
        return [Send(peer, message) for peer in self._members.linked_peers()]

    def _move(self, event: str, now_ns: int) -> None:
        target = TABLE.get((self.state, event))
        if target is None:
            raise IllegalTransitionError("epoch", self.state, event, self.history[-40:])
        self.history.append(
            f"{now_ns / _S:.3f}s epoch {self.epoch} a{self.attempt} {self.state} -{event}-> {target}"
        )
        del self.history[:-200]
        self.state = target
