"""The epoch agreement of one peer: READY, VIEW, ring, VOTE, certificate; again after a failure. Pure.

One `EpochMachine` lives as long as the peer. What it must never forget is in `Acceptor`; what a VIEW may
say is in `convene`; the sums are in `Ring`. Section 8 of docs/DESIGN.md has the protocol and its reasons.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from p2p_diloco.config import AgreementConfig, TimeoutConfig
from p2p_diloco.errors import IllegalTransitionError, ProtocolViolation
from p2p_diloco.identity import PeerId, peer_id_of, show
from p2p_diloco.proto.acceptor import Acceptor, LogRecord
from p2p_diloco.proto.archive import Archive
from p2p_diloco.proto.attendance import Attendance
from p2p_diloco.proto.ballots import Ballots
from p2p_diloco.proto.chain import Chain
from p2p_diloco.proto.conflicts import Witness
from p2p_diloco.proto.convene import CheckedView, check_promise, check_view
from p2p_diloco.proto.convening import Convening
from p2p_diloco.proto.epoch_table import IN_PLAY, PHASES, TABLE, TOO_LATE
from p2p_diloco.proto.events import Compute, Effect, FrameIn, Notice, Send
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.membership import Membership
from p2p_diloco.proto.order import fingers
from p2p_diloco.proto.patience import Patience
from p2p_diloco.proto.reports import diverged, quorum_lost, verdict_metric
from p2p_diloco.proto.ringrun import RingRun, Step
from p2p_diloco.proto.rounds import Round, Rounds
from p2p_diloco.proto.scribe import Entry, Scribe
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
_RETRY_NS = _S  # between looks at a lost quorum (guess)
_NEWS_NS = 5 * _S  # how long an epoch may stand still before we repeat our own words (guess)


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
        rounds: Rounds,
        silent_through: int = 0,
    ) -> None:
        self._statements, self._chain, self._members = statements, chain, membership
        self._agreement, self._timeouts = agreement, timeouts
        self._jobs = jobs
        self.me = statements.me
        self.acceptor = Acceptor(statements, log, silent_through)
        self.scribe = Scribe(jobs)
        self.rounds = rounds
        self.run = RingRun(statements, chunks, window_chunks, jobs)
        self.state = "joining"
        self.history: list[str] = []
        self.fetch: tuple[Vote, tuple[PeerId, ...]] | None = None  # wanted by an adopted view
        self.round_wanted = False  # a local round is to be started
        self.round_salt = 0
        self._witness = Witness(statements)
        self.convicted = self._witness.convicted  # for the owner to ban
        self.future: list[Signed] = []
        self._reset(0)

    def _reset(self, now_ns: int) -> None:
        """Forget the epoch that ended; take up the one after the chain's head."""
        self.acceptor.begin(self._chain.epoch + 1, self._chain.head.digest)
        self.scribe.begin(self._chain.epoch + 1)
        self.attendance = Attendance(self._chain, self._members, self._agreement, self._timeouts, now_ns)
        self.ballots = Ballots(self._chain)
        self._convening = Convening(
            self._chain, self._members, self.attendance, self.ballots, self.run.chunks
        )
        self.archive = Archive()
        if self.acceptor.abstention is not None:  # said in an earlier life
            self.attendance.abstained[self.me] = self.acceptor.abstention
        self._witness.turn()
        self.run.reset()
        self.attempt = 0
        self._viewed = -1  # highest attempt whose view was accepted
        self._waiting_view: CheckedView | None = None
        self._candidate: tuple[bytes, bytes, bytes] | None = None  # what our copy holds, complete
        self._kept_root = b""  # state root of the newest round on our disk
        self._wanted: tuple[bytes, bytes, bytes] | None = None  # what an adopted view makes us fetch
        self._patience = Patience(self._timeouts)
        self._missing: dict[PeerId, None] = {}  # ring neighbours that were not there
        self._deadline_ns = 0
        self._since_ns = now_ns
        self._news_ns = now_ns + _NEWS_NS
        self._lost_quorum = False
        self._ring_ns = 0
        self._own_ready: Signed | None = None

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
        life, trial = self._members.life, self.round_salt
        body = Ready(self._chain.epoch + 1, self._chain.head.digest, root, weight, commitment, life, trial)
        signed = self._statements.make(body)
        self._move("local_ready", now_ns)
        self._own_ready = signed
        self._after_abstain(now_ns)  # an abstention of an earlier life may be void
        self.attendance.add_ready(self.me, signed, body)
        self.archive.add(self.me, signed, body)
        self._deadline_ns = 0
        effects = [*self._flood(Statement(signed)), *self._after_ready(now_ns)]
        if self.state == "ready" and self._viewed >= self.acceptor.promised:
            self._move("view_without", now_ns)  # too late for this attempt, there for the next
            self._deadline_ns = now_ns + self._patience.whole_ring_ns()
        elif self.state == "ready" and self.acceptor.promised > 0:
            effects += self._follow_promise(now_ns)
        return effects

    def on_local_bad(self, reason: str, now_ns: int) -> list[Effect]:
        """Our delta cannot be used: sit this epoch out, and do not hold up its quorum."""
        if self.state != "training":
            return []
        self._move("local_bad", now_ns)
        effects: list[Effect] = [Notice("warning", f"sitting out epoch {self.epoch + 1}: {reason}")]
        if self.acceptor.vote is not None:  # of an earlier life: what we voted for may have to be finished
            self._deadline_ns = now_ns + self._patience.wait_ns(self._timeouts.view_s)
        if self.me in self._chain.voters:
            effects += self._put(self.acceptor.abstain(reason, leaving=False))
            effects += self._after_abstain(now_ns)  # it may have been said before, and be void
        elif self._chain.epoch == 0:
            effects += self._retry_round(now_ns)  # the founding ring may be waiting for our READY
        return effects

    def on_leave(self, reason: str) -> list[Effect]:
        """We go: others need not count on our vote in this epoch."""
        if self.me in self._chain.voters and len(self._chain.voters) > 1:
            return self._put(self.acceptor.abstain(reason, leaving=True))
        return []

    def slept(self, gap_ns: int) -> None:
        """This process was stopped for so long: what did not happen meanwhile is nobody else's fault."""
        if self._deadline_ns:
            self._deadline_ns += gap_ns
        self._since_ns += gap_ns
        self.attendance.slept(gap_ns)
        self.scribe.slept(gap_ns)

    # --- the disk ---

    def _put(self, entry: Entry | None) -> list[Effect]:
        return [] if entry is None else self.scribe.put(entry)

    def on_persisted(self, entry: Entry, error: str, now_ns: int) -> list[Effect]:
        """The disk answered; what is written may be said."""
        written, effects = self.scribe.on_answer(entry, error, now_ns)
        if not written or entry.epoch != self._chain.epoch + 1:
            return effects
        if entry.kind == "round":
            self._kept_root = entry.data
            return [*effects, *self._vote(now_ns)]
        if entry.signed is None:
            return effects
        if entry.kind == "convened" and self.acceptor.convened < self.acceptor.promised:
            return effects  # that attempt is over before it began
        effects += self._flood(Statement(entry.signed))
        return [*effects, *self.on_statement(entry.signed, None, now_ns)]

    # --- statements ---

    def on_statement(self, signed: Signed, source: PeerId | None, now_ns: int) -> list[Effect]:
        """A statement, new or not; raises ProtocolViolation if it is bad. The next epoch's are kept."""
        if self.archive.has(signed):
            return []
        author, body = self._statements.check(signed)
        if not isinstance(body, Ready | View | Vote | Promise | Abstain):
            return []
        if body.epoch != self._chain.epoch + 1 or body.previous != self._chain.head.digest:
            if body.epoch == self._chain.epoch + 2 and len(self.future) < 1024:
                self.future.append(signed)
            elif body.epoch == self._chain.epoch:
                self._witness.note(author, signed, self._chain, body.epoch)  # late, but proof all the same
            return []
        self._witness.note(author, signed, self._chain, body.epoch)
        effects = self._take_in(author, signed, body, now_ns)
        if body.epoch == self._chain.epoch + 1:  # it did not decide the epoch
            self.archive.add(author, signed, body)
        return effects

    def _take_in(
        self, author: PeerId, signed: Signed, body: Ready | View | Vote | Promise | Abstain, now_ns: int
    ) -> list[Effect]:
        if isinstance(body, Ready):
            self._chain.check_ready(signed)
            if author == self.me:
                return []  # of an earlier life: the delta behind it is gone
            self.attendance.add_ready(author, signed, body)
            return self._after_ready(now_ns)
        if isinstance(body, Abstain):
            self.attendance.abstained[author] = signed
            return [*self._after_abstain(now_ns), *self._vote(now_ns), *self._after_ready(now_ns)]
        if isinstance(body, Vote):
            self.ballots.add_vote(author, body, signed)
            return self._after_vote(now_ns)
        if isinstance(body, Promise):
            return self._on_promise(author, signed, now_ns)
        return self._on_view(signed, now_ns)

    def _after_ready(self, now_ns: int) -> list[Effect]:
        self.attendance.note_ready(self.state, now_ns)
        return self._try_convene(now_ns)

    def _after_abstain(self, now_ns: int) -> list[Effect]:
        voters = self._chain.voters
        everyone = bool(voters) and all(peer in self.attendance.abstained for peer in voters)
        if not everyone or voters[0] != self.me:
            return []
        self.acceptor.void_abstention()
        again = self.state in ("sitting_out", "promised") and self._own_ready is None
        return self._retry_round(now_ns) if again else []

    def _retry_round(self, now_ns: int) -> list[Effect]:
        self._move("retry", now_ns)
        self.round_salt += 1
        self.round_wanted = True
        return [Notice("warning", f"epoch {self.epoch + 1} cannot do without us: training it again")]

    def _after_vote(self, now_ns: int) -> list[Effect]:
        """Take the verdict if some result has its quorum."""
        certificate = self.ballots.decided(self.attendance.abstained)
        return [] if certificate is None else self.on_certificate(certificate, now_ns)

    def _on_promise(self, author: PeerId, signed: Signed, now_ns: int) -> list[Effect]:
        peer, promise = check_promise(self._statements, self._chain, signed)
        if author not in self._chain.voters and author not in self.attendance.readies:
            return []
        if promise.attempt <= self._viewed:
            return []
        self.ballots.add_promise(peer, promise)
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
        if attempt <= self._viewed or not self.acceptor.may_convene(attempt):
            return []
        view, effects = self._convening.view(attempt, self.state, self._since_ns, now_ns)
        if view is None:
            return effects
        return [*effects, *self._put(self.acceptor.convene(attempt, self._statements.make(view)))]

    # --- views ---

    def _on_view(self, signed: Signed, now_ns: int) -> list[Effect]:
        view = check_view(self._statements, self._chain, signed)
        self.ballots.add_view(view.run_view)
        if view.attempt < self.acceptor.promised or view.attempt <= self._viewed:
            return self._after_vote(now_ns)
        self.attempt = self._viewed = view.attempt
        self.acceptor.promised = max(self.acceptor.promised, view.attempt)
        plan = view.run_view.plan
        for (peer, body), ready in zip(plan.members, plan.readies, strict=True):
            if peer != self.me:
                self.attendance.add_ready(peer, ready, body)
        self._drop_ring()
        if not self._in_play():
            return self._after_vote(now_ns)
        self._waiting_view = view
        return [*self._start_view(now_ns), *self._after_vote(now_ns)]

    def _in_play(self) -> bool:
        """True if attempts concern us: our READY is out, or we sit the ring out but may finish a result."""
        return self.state in IN_PLAY

    def _start_view(self, now_ns: int) -> list[Effect]:
        """Follow the accepted view, once no worker writes for an earlier one any more."""
        view = self._waiting_view
        if view is None or self._jobs.open_of("ring") or self._jobs.open_of("catchup"):
            return []
        self._waiting_view = None
        if view.vote is not None:
            return self._follow_adopted(view, view.vote, now_ns)
        order = view.run_view.plan.order
        if self.me not in order:
            self._move("view_without", now_ns)
            self._deadline_ns = now_ns + self._patience.whole_ring_ns()
            return [Notice("info", f"attempt {view.attempt} of epoch {self.epoch + 1} runs without us")]
        place = order.index(self.me)
        beside = {order[place - 1], order[(place + 1) % len(order)]}
        if any(self._members.hopeful(peer, now_ns) for peer in sorted(beside)):
            self._waiting_view = view  # a first link to a neighbour is about to come up
            return []
        self._move("view_run", now_ns)
        self._candidate = None
        self._deadline_ns = now_ns + round(self._timeouts.stall_s * _S)
        own = self._own_ready  # None if this life has not been READY yet, or sits out
        if own is None or view.run_view.plan.readies[place].digest() != own.digest():
            return self._fail("the view lists an earlier READY of ours", now_ns)
        absent = [neighbour for neighbour in sorted(beside) if not self._members.usable(neighbour)]
        if absent:
            self._missing.update(dict.fromkeys(absent))
            return self._fail(f"ring neighbour {show(absent[0])} is not there", now_ns)
        return self._follow(self.run.start(view, now_ns), now_ns)

    def _follow_adopted(self, view: CheckedView, vote: Vote, now_ns: int) -> list[Effect]:
        value = (vote.view_hash, vote.chunk_root, vote.state_root)
        if self._candidate == value:
            self._move("view_have", now_ns)
            return self._cast(now_ns)
        self._move("view_fetch", now_ns)
        self._candidate, self._wanted = None, value
        self.run.finished.copy_is_lost()
        holders = {*view.holders, *self.ballots.voters_of(vote.view_hash, vote.chunk_root)} - {self.me}
        self.fetch = (vote, tuple(sorted(holders)))
        self._deadline_ns = now_ns + self._patience.wait_ns(self._timeouts.view_s)
        return [Notice("info", f"finishing epoch {self.epoch + 1} with the result that others voted for")]

    def on_fetched(self, held: Round, now_ns: int) -> list[Effect]:
        """The adopted result is in our copy."""
        if self.state != "fetching":
            return []
        self._move("fetched", now_ns)
        self._candidate = self._wanted
        self.rounds.add(held)
        return self._cast(now_ns)

    # --- the ring ---

    def on_frame(self, frame: FrameIn, now_ns: int) -> list[Effect]:
        return self._follow(self.run.on_frame(frame, now_ns), now_ns)

    def on_computed(self, note: tuple[Any, ...], result: Any, error: str, now_ns: int) -> list[Effect]:
        """A ring job is done; it may belong to an attempt that is over."""
        ring = self.run.ring
        if ring is None or note[0] != ring.plan.view_hash:
            return self._start_view(now_ns)
        return self._follow(self.run.on_computed(note, result, error, now_ns), now_ns)

    def _follow(self, step: Step, now_ns: int) -> list[Effect]:
        """What an event did to the ring, and what that means for the attempt."""
        if step.failed:
            return [*step.effects, *self._fail(step.failed, now_ns)]
        if self.run.ring is not None and self.state in ("ring", "finishing"):
            self._deadline_ns = now_ns + round(self._timeouts.stall_s * _S)
        if step.roots is not None:
            return [*step.effects, *self._on_roots(*step.roots, now_ns)]
        return step.effects

    def _on_roots(self, chunk_root: bytes, state_root: bytes, now_ns: int) -> list[Effect]:
        ring = self.run.ring
        assert ring is not None
        if not ring.finite:
            return self._fail("the outer step gave a value that is not finite", now_ns)
        hashes = tuple(ring.applied[chunk][0] for chunk in range(ring.plan.chunks))
        late = self.state == "finishing"
        held = Round(self.epoch + (not late), state_root, hashes, self.run.payloads())
        self.rounds.add(held)
        if late:
            return self._finished(held, now_ns)
        self._candidate = (ring.plan.view_hash, chunk_root, state_root)
        self._ring_ns = now_ns - ring.started_ns
        self._move("ring_done", now_ns)
        return self._cast(now_ns)

    def _cast(self, now_ns: int) -> list[Effect]:
        """Keep the result in our copy on disk, then vote for it if we are a voter; wait for the quorum."""
        self._deadline_ns = now_ns + self._patience.wait_ns(self._timeouts.vote_s)
        assert self._candidate is not None
        _, chunk_root, state_root = self._candidate
        if self._kept_root == state_root:
            return self._vote(now_ns)
        held = self.rounds.get(chunk_root)
        assert held is not None
        entry = Entry("round", self.epoch + 1, state_root, None, held.payloads)
        return [*self._put(entry), *self._after_vote(now_ns)]

    def _vote(self, now_ns: int) -> list[Effect]:
        """Vote for the result in our copy: it is on our disk, so that a vote never outlives its result."""
        effects: list[Effect] = []
        if self.state == "voting" and self._candidate is not None and self._candidate[2] == self._kept_root:
            view_hash, chunk_root, state_root = self._candidate
            if self.me in self._chain.voters and self.acceptor.may_vote(self.attempt):
                view = self.ballots.run_views[view_hash].signed
                effects += self._put(self.acceptor.cast(self.attempt, view, chunk_root, state_root))
        return [*effects, *self._after_vote(now_ns)]

    def _drop_ring(self) -> None:
        self.run.drop()
        self.fetch = None

    # --- failure ---

    def on_peer_lost(self, peer: PeerId, reason: str, now_ns: int) -> list[Effect]:
        """A link went down, or a frame to this peer could not be delivered."""
        ring = self.run.ring
        if self.state in ("ring", "finishing") and ring is not None and peer in (ring.left, ring.right):
            return self._fail(f"ring neighbour {show(peer)} was lost ({reason})", now_ns)
        if self.state == "voting" and peer in self._chain.voters and not self._can_decide():
            return self._fail(f"voter {show(peer)} was lost ({reason})", now_ns)
        return self._look_at_convener(now_ns)

    def _look_at_convener(self, now_ns: int) -> list[Effect]:
        waits = self.state == "ready" or (self.state == "promised" and self.acceptor.promised > 0)
        if not waits:
            return []
        convener = self._chain.convener(self.acceptor.promised)
        if self._members.reachable(convener):  # its view may come through others
            return []
        return self._fail(f"convener {show(convener)} is not there", now_ns)

    def on_link_up(self, peer: PeerId, now_ns: int) -> list[Effect]:
        """A peer became reachable: tell it what was said in this epoch; what waited for it may go on."""
        news: list[Effect] = [Send(peer, Statement(signed)) for signed in self.archive.everything()]
        return [*news, *self._start_view(now_ns), *self._try_convene(now_ns)]

    def _repeat(self, now_ns: int) -> list[Effect]:
        """The epoch stands still: say our own words again, and the view that we follow."""
        if now_ns < self._news_ns or self.state not in IN_PLAY:
            return []
        self._news_ns = now_ns + _NEWS_NS
        return [effect for signed in self.archive.of(self.me) for effect in self._flood(Statement(signed))]

    def on_tick(self, now_ns: int) -> list[Effect]:
        effects = [*self._start_view(now_ns), *self.scribe.tick(now_ns), *self._repeat(now_ns)]
        if self._deadline_ns and now_ns >= self._deadline_ns:
            self._deadline_ns = 0
            if self.state in TOO_LATE:
                effects += self._fail(TOO_LATE[self.state], now_ns)
        if self.state in ("ready", "promised", "sitting_out"):
            effects += self._try_convene(now_ns)
            effects += self._look_at_convener(now_ns)
        usable = self._voters_here()
        idle = self._in_play() and not self._deadline_ns
        if idle and not self._chain.enough(self.attendance.abstained, usable):
            effects += self._quorum_lost("voters are not reachable", usable, now_ns)
        idle = self.state == "ready" and not self._deadline_ns
        if idle and self.attendance.ring_may_start(self.state, now_ns):
            self._deadline_ns = now_ns + self._patience.wait_ns(self._timeouts.view_s)
        if self.state == "voting" and not self._can_decide():
            effects += self._fail("the voters that are left cannot decide this attempt", now_ns)
        return effects

    def straggling(self, now_ns: int) -> bool:
        """True if the others wait for our local round, and have done so long enough."""
        return self.state == "training" and self.attendance.straggling(now_ns)

    def _can_decide(self) -> bool:
        return self.ballots.can_decide(self.attendance.abstained, self._voters_here())

    def _voters_here(self) -> list[PeerId]:
        return [v for v in self._chain.voters if self._members.usable(v)]

    def _fail(self, reason: str, now_ns: int) -> list[Effect]:
        """Give up this attempt and promise the next one whose convener is there."""
        if self.state == "finishing":
            return self._abandon(reason, now_ns)
        if not self._in_play():
            return []
        usable = self._voters_here()
        if not self._chain.enough(self.attendance.abstained, usable):
            return self._quorum_lost(reason, usable, now_ns)
        self._lost_quorum = False
        base = max(self.attempt, self.acceptor.promised)
        pause_ns = self._patience.pause_until_ns(base, reason, now_ns)
        if now_ns < pause_ns:  # a view or promise of somebody else's may end it before
            self._stop_attempt(now_ns)
            self._deadline_ns = pause_ns
            return []
        for attempt in range(base + 1, min(base + 1 + len(self._chain.members), MAX_ATTEMPT)):
            if self._members.usable(self._chain.convener(attempt)):
                return self._give_up(self._patience.reason, attempt, now_ns)
        return self._quorum_lost(reason, usable, now_ns)

    def _quorum_lost(self, reason: str, usable: list[PeerId], now_ns: int) -> list[Effect]:
        self._deadline_ns = now_ns + _RETRY_NS
        if self.state == "ring":
            self._stop_attempt(now_ns)
        if self._lost_quorum:
            return []
        self._lost_quorum = True
        return [quorum_lost(self.epoch + 1, reason, usable, self._chain.voters)]

    def _stop_attempt(self, now_ns: int) -> None:
        self._drop_ring()
        self._waiting_view = None
        self._move("fail", now_ns)

    def _give_up(self, reason: str, attempt: int, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        self._since_ns = now_ns
        if self._in_play():
            text = f"epoch {self.epoch + 1} attempt {self.attempt} failed: {reason}"
            effects.append(Notice("warning", f"{text}; going to attempt {attempt}"))
            self._stop_attempt(now_ns)
            self._patience.attempts_lost += 1
            self._deadline_ns = now_ns + self._patience.wait_ns(self._timeouts.view_s)
        missing = [peer for peer in self._missing if not self._members.usable(peer)]
        finished, cut_off = self.run.finished.holdings(), self._members.cut_off_from(missing, now_ns)
        return [*effects, *self._put(self.acceptor.promise(attempt, finished, cut_off))]

    def _follow_promise(self, now_ns: int) -> list[Effect]:
        """READY after others already went to a later attempt: wait for that attempt's view."""
        self._move("fail", now_ns)
        self._since_ns = now_ns
        self._deadline_ns = now_ns + self._patience.wait_ns(self._timeouts.view_s)
        return self._try_convene(now_ns)

    # --- the verdict ---

    def on_certificate(self, certificate: Certificate, now_ns: int, fresh: bool = True) -> list[Effect]:
        """A certificate for the next epoch; raises ProtocolViolation if it is not valid. ``fresh``
        ones are passed on (those of a fetched chain are not)."""
        link = self._chain.append(certificate)
        for signed in certificate.votes:
            self._witness.note(peer_id_of(signed.public_key), signed, self._chain, certificate.epoch)
        attempt, ring, view_hash = self.attempt, self.run.ring, certificate.view[0].digest()
        effects: list[Effect] = []
        if fresh:
            # Votes went to everybody, so nearly all know by themselves; a certificate is long. Who misses
            # both asks when gossip's progress tells it that it is behind.
            effects += [Send(p, Verdict(certificate)) for p in fingers(self.me, self._members.linked_peers())]
        effects += self._put(Entry("certificate", certificate.epoch, pack_object(certificate)))
        value = (view_hash, certificate.chunk_root, certificate.state_root)
        have = self._candidate == value and self.state in IN_PLAY
        running = self.state == "ring" and ring is not None and ring.plan.view_hash == view_hash
        if self._candidate is not None and not have and self._candidate[0] == view_hash:
            effects.append(diverged(certificate.epoch))
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
            self._deadline_ns = now_ns + round(self._timeouts.stall_s * _S)
        return [*effects, *self._replay_future(now_ns)]

    def _finished(self, held: Round, now_ns: int) -> list[Effect]:
        """Our ring ended after the verdict: take its result if it is the certified one."""
        if held.state_root != self._chain.head.certificate.state_root:
            return [diverged(self.epoch), *self._abandon("it has another result", now_ns)]
        self._drop_ring()
        self._deadline_ns = 0
        self._move("finished", now_ns)
        entry = Entry("round", self.epoch, held.state_root, None, held.payloads)
        return [*self._put(entry), self._swap(held.state_root)]

    def _abandon(self, reason: str, now_ns: int) -> list[Effect]:
        """The rest of a certified ring does not come: fetch the state instead."""
        self._drop_ring()
        self._deadline_ns = 0
        self._move("verdict_other", now_ns)
        return [Notice("info", f"fetching the state of epoch {self.epoch}: our ring did not end ({reason})")]

    def _swap(self, state_root: bytes) -> Compute:
        return Compute(self._jobs.add("swap", (self._chain.epoch,)), "swap", (state_root, self._chain.epoch))

    def _replay_future(self, now_ns: int) -> list[Effect]:
        waiting, self.future = self.future, []
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

    def _flood(self, message: Statement) -> list[Effect]:
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
