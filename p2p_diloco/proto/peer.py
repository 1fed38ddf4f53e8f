"""One peer's whole protocol: routes events between membership, agreement, catch-up and serving. Pure.

``handle(event, now_ns) -> effects``. The driver feeds it from sockets, workers, the disk and the trainer;
a simulator can feed it from a heap. Remote bytes never raise out of `handle`: what breaks the protocol
closes that link.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import PeerId, show
from p2p_diloco.proto import events as ev
from p2p_diloco.proto.acceptor import LogRecord
from p2p_diloco.proto.catchup import CatchUp
from p2p_diloco.proto.chain import Chain
from p2p_diloco.proto.conflicts import contradiction
from p2p_diloco.proto.dice import Dice
from p2p_diloco.proto.epoch import EpochMachine
from p2p_diloco.proto.events import Effect, Event
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.membership import Membership
from p2p_diloco.proto.pending import waits_for
from p2p_diloco.proto.rounds import Round, Rounds
from p2p_diloco.proto.scribe import Entry
from p2p_diloco.proto.serve import Server
from p2p_diloco.proto.statements import Signer, Statements
from p2p_diloco.wire import messages as msg

_S = 1_000_000_000
_SEEN = 16_384  # statements remembered so that each is passed on once
_RELAY_FANOUT = 4  # links a statement is passed on to; its author sent it to all of its own
_CHAIN_WAIT_NS = _S  # between two requests for missing certificates (guess)
_LINGER_NS = 10 * _S  # how long a finished peer stays for the others (guess)
_STOPPED_NS = 3 * _S  # without an event: a tick comes every second (guess)
_ROUND_STEPS = 2  # epochs that we may be behind and catch up by rounds: others keep as many in memory
_MAX_PROOFS = 64  # proofs of equivocation that are told to new links


@dataclass(frozen=True)
class PeerSetup:
    """What one peer starts with. `held_epoch`: the certified epoch whose state our memory holds, -1 if none
    (0 for the founder, more after a restart from disk). `rounds`: finished rounds found on disk, of the
    certified epoch and of the one after it. `forgot`: the vote log of an earlier life was lost."""

    run: RunConfig
    peer: PeerConfig
    genesis: msg.Genesis
    chunks: int
    addresses: tuple[str, ...]
    incarnation: int
    held_epoch: int = -1
    certificates: tuple[msg.Certificate, ...] = ()
    log: tuple[LogRecord, ...] = ()
    rounds: tuple[Round, ...] = ()
    forgot: bool = False


class PeerMachine:
    """See the module's text."""

    def __init__(self, signer: Signer, setup: PeerSetup, random: Dice, now_ns: int) -> None:
        self.setup = setup
        self._random = random
        self._jobs = Jobs()
        self.statements = Statements(signer, setup.genesis.run_id())
        self.me = self.statements.me
        self.chain = Chain(setup.genesis, self.statements, setup.run.agreement.quorum)
        for certificate in setup.certificates:
            self.chain.append(certificate)
        self.members = Membership(
            self.statements, setup.peer.gossip, random, setup.addresses, setup.incarnation, now_ns
        )
        self.rounds = Rounds(setup.rounds)
        self.epoch = EpochMachine(
            self.statements,
            self.chain,
            self.members,
            setup.run.agreement,
            setup.peer.timeouts,
            setup.chunks,
            setup.peer.window_chunks,
            self._jobs,
            setup.log,
            self.rounds,
            len(setup.certificates) + 1 if setup.forgot else 0,
        )
        self.server = Server(self.chain, self.rounds, self._jobs)
        self.catchup: CatchUp | None = None
        self._held_epoch = setup.held_epoch
        self._round_failed = b""  # a round that nobody could give us: the state is fetched instead
        self._last_ns = now_ns
        self._proofs: OrderedDict[PeerId, msg.Equivocation] = OrderedDict()
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._chain_next_ns = 0
        self._waiting_since_ns = now_ns
        self._trainer_idle = False
        self._training_epoch = 0
        self._step = self._steps = 0
        self._loss, self._tokens_per_s = math.nan, 0.0
        self._round_tokens = 0
        self._leaving = ""
        self._finish_ns = 0
        self.finished = False

    # --- the two calls ---

    def handle(self, event: Event, now_ns: int) -> list[Effect]:
        """Take in one event; the effects are to be carried out in order."""
        if self.finished:
            return []
        effects = self._mind_the_gap(now_ns)
        effects += self._route(event, now_ns)
        effects += self._after(now_ns)
        return effects

    def _mind_the_gap(self, now_ns: int) -> list[Effect]:
        """A tick is due every second or so: if none came for long, this process was stopped (or its machine
        slept), and we doubt ourselves before anybody else."""
        gap_ns, self._last_ns = now_ns - self._last_ns, max(now_ns, self._last_ns)
        if gap_ns < _STOPPED_NS:
            return []
        self.members.slept(gap_ns)
        self.epoch.slept(gap_ns)
        if self.catchup is not None:
            self.catchup.slept(gap_ns)
        self._chain_next_ns = 0
        return [ev.Notice("warning", f"this process was stopped for {gap_ns / _S:.0f} s")]

    def next_wake_ns(self, now_ns: int) -> int:
        """When `Tick` is due if nothing else happens."""
        times = [self.members.next_wake_ns(), self.epoch.next_wake_ns(now_ns)]
        if self.catchup is not None:
            wake = self.catchup.next_wake_ns()
            times += [] if wake is None else [wake]
        return max(now_ns, min(times))

    # --- routing ---

    def _route(self, event: Event, now_ns: int) -> list[Effect]:
        match event:
            case ev.Tick():
                return self._tick(now_ns)
            case ev.Received(peer=peer, message=message):
                try:
                    return self._on_message(peer, message, now_ns)
                except ProtocolViolation as violation:
                    return [ev.Close(peer, str(violation))]
            case ev.FrameIn():
                return self._on_frame(event, now_ns)
            case ev.ComputeDone(job=job, result=result, error=error):
                return self._on_computed(job, result, error, now_ns)
            case ev.Persisted(record=record, error=error):
                entry = self._jobs.take(record)
                return [] if entry is None else self.epoch.on_persisted(entry[1][0], error, now_ns)
            case ev.LinkUp(peer=peer, addresses=addresses):
                effects = self.members.link_up(peer, addresses, now_ns)
                effects += [ev.Send(peer, proof) for proof in self._proofs.values()]
                return [*effects, *self.epoch.on_link_up(peer, now_ns)]
            case ev.LinkDown(peer=peer, reason=reason):
                return self._on_link_down(peer, reason, now_ns)
            case ev.DialFailed(peer=peer):
                return self.members.dial_failed(peer, now_ns)
            case ev.LaneFailed(peer=peer, reason=reason):
                self.members.edge_failed(peer, now_ns)
                return self.epoch.on_peer_lost(peer, reason, now_ns)
            case _:
                return self._on_local(event, now_ns)

    def _on_local(self, event: Event, now_ns: int) -> list[Effect]:
        match event:
            case ev.RateMeasured(peer=peer, kbit_per_s=rate):
                self.members.note_rate(peer, rate)
                return []
            case ev.RoundProgress(epoch=epoch) if epoch == self._training_epoch:
                self._step, self._steps = event.step, event.steps
                self._loss, self._tokens_per_s = event.loss, event.tokens_per_s
            case ev.RoundDone():
                return self._on_round_done(event)
            case ev.TrainerBack():
                self._trainer_idle = True
            case ev.TrainerLost(reason=reason):
                self._trainer_idle, self._training_epoch = False, 0
                self.epoch.round_wanted = self.epoch.state == "training" or self.epoch.round_wanted
                return self.epoch.on_local_bad(f"the trainer died ({reason})", now_ns)
            case ev.LeaveRequested(reason=reason):
                if not self._leaving:
                    self._leaving = reason
                    return self.epoch.on_leave(reason)
        return []

    def _on_message(self, peer: PeerId, message: msg.Message, now_ns: int) -> list[Effect]:
        match message:
            case msg.Gossip():
                return self.members.on_gossip(peer, message, now_ns)
            case msg.Probe():
                return self.members.on_probe(peer, message, now_ns)
            case msg.Ack():
                return self.members.on_ack(peer, message, now_ns)
            case msg.Statement(signed=signed):
                return self._on_statement(peer, signed, now_ns)
            case msg.Verdict(certificate=certificate):
                return self._on_verdict(peer, certificate, now_ns)
            case msg.Equivocation():
                return self._on_equivocation(message, now_ns)
            case msg.Chain():
                return self._on_chain(peer, message, now_ns)
            case msg.GetGenesis():
                return [ev.Send(peer, msg.GenesisReply(self.setup.genesis))]
            case msg.GetChain():
                return self.server.on_get_chain(peer, message)
            case msg.GetLeaves():
                return self.server.on_get_leaves(peer, message)
            case msg.GetChunk():
                return self.server.on_get_chunk(peer, message)
            case msg.Leaves() if self.catchup is not None:
                return self.catchup.on_leaves(peer, message, now_ns)
            case msg.Gone() if self.catchup is not None:
                return self.catchup.on_gone(peer, message, now_ns)
        return []

    def _on_statement(self, peer: PeerId, signed: msg.Signed, now_ns: int) -> list[Effect]:
        """Pass a new statement on, and take it in; one that came too early may come again."""
        name = signed.digest()
        self.statements.check(signed)
        effects: list[Effect] = []
        if name not in self._seen:
            self._seen[name] = None
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
            others = [p for p in self.members.linked_peers() if p != peer]
            relays = self._random.sample(others, min(_RELAY_FANOUT, len(others)))
            effects = [ev.Send(relay, msg.Statement(signed)) for relay in relays]
        return [*effects, *self.epoch.on_statement(signed, peer, now_ns)]

    def _on_equivocation(self, proof: msg.Equivocation, now_ns: int) -> list[Effect]:
        """Somebody shows two statements that one key must not both make; raises ProtocolViolation."""
        author, body = self.statements.check(proof.first)
        if author in self._proofs or author == self.me:
            return []
        epoch = getattr(body, "epoch", 0)
        known = 0 < epoch <= self.chain.epoch + 1
        voters = self.chain.link(epoch - 1).voters if known else ()
        why = contradiction(self.statements, proof.first, proof.second, voters[0] if voters else author)
        return self._convict(author, proof, why, now_ns) if why else []

    def _convict(self, author: PeerId, proof: msg.Equivocation, why: str, now_ns: int) -> list[Effect]:
        """Ban a key and pass the proof on."""
        if author in self._proofs:
            return []
        if author == self.me:
            text = f"our own key {why}: is a copy of its file in use elsewhere?"
            return [ev.Notice("error", text)]
        self._proofs[author] = proof
        while len(self._proofs) > _MAX_PROOFS:
            self._proofs.popitem(last=False)
        effects: list[Effect] = [ev.Notice("error", f"peer {show(author)} {why}: its key is banned")]
        effects += self.members.ban(author, now_ns)
        return [*effects, *(ev.Send(peer, proof) for peer in self.members.linked_peers() if peer != author)]

    def _on_verdict(self, peer: PeerId, certificate: msg.Certificate, now_ns: int) -> list[Effect]:
        if certificate.epoch <= self.chain.epoch:
            return []
        if certificate.epoch > self.chain.epoch + 1:
            return self._ask_chain(peer, now_ns)
        return self.epoch.on_certificate(certificate, now_ns)

    def _on_chain(self, peer: PeerId, message: msg.Chain, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for packed in message.certificates:
            certificate = msg.unpack_object(msg.Certificate, packed)
            if certificate.epoch == self.chain.epoch + 1:
                effects += self.epoch.on_certificate(certificate, now_ns, fresh=False)
        if message.certificates and message.head > self.chain.epoch:
            self._chain_next_ns = 0
            effects += self._ask_chain(peer, now_ns)
        return effects

    def _ask_chain(self, peer: PeerId, now_ns: int) -> list[Effect]:
        if now_ns < self._chain_next_ns:
            return []
        self._chain_next_ns = now_ns + _CHAIN_WAIT_NS
        return [ev.Send(peer, msg.GetChain(self.chain.epoch + 1))]

    def _on_frame(self, frame: ev.FrameIn, now_ns: int) -> list[Effect]:
        if frame.kind == "state":
            return [] if self.catchup is None else self.catchup.on_frame(frame, now_ns)
        return self.epoch.on_frame(frame, now_ns)

    def _on_computed(self, job: int, result: Any, error: str, now_ns: int) -> list[Effect]:
        entry = self._jobs.take(job)
        if entry is None:
            return []
        owner, note = entry
        if owner == "ring":
            return self.epoch.on_computed(note, result, error, now_ns)
        if owner == "serve":
            return self.server.on_computed(note, result, error)
        if owner == "catchup":
            return [] if self.catchup is None else self.catchup.on_computed(note, result, error, now_ns)
        if owner == "delta":
            return self._on_delta(note, result, now_ns)
        if owner == "swap":
            self._held_epoch = note[0]
            return self.epoch.on_swapped(now_ns)
        return self._on_installed(note, now_ns)

    def _on_link_down(self, peer: PeerId, reason: str, now_ns: int) -> list[Effect]:
        effects = self.members.link_down(peer, reason, now_ns)
        effects += self.epoch.on_peer_lost(peer, reason, now_ns)
        if self.catchup is not None:
            effects += self.catchup.lose_donor(peer, now_ns)
        return effects

    def _tick(self, now_ns: int) -> list[Effect]:
        effects = self.members.tick(now_ns)
        effects += self.epoch.on_tick(now_ns)
        if self.catchup is not None:
            effects += self.catchup.on_tick(now_ns)
        ahead = [p for p in self.members.usable_peers() if self._head_of(p) > self.chain.epoch]
        if ahead:
            effects += self._ask_chain(self._random.choice(ahead), now_ns)
        return effects

    def _head_of(self, peer: PeerId) -> int:
        member = self.members.get(peer)
        return 0 if member is None or member.progress is None else member.progress.epoch

    # --- the local round ---

    def _on_round_done(self, event: ev.RoundDone) -> list[Effect]:
        self._trainer_idle, self._training_epoch = True, 0
        self._loss = event.loss
        stale = event.epoch != self.chain.epoch + 1 or self.epoch.state != "training"
        if stale or self.epoch.round_wanted:
            return []
        self._round_tokens = event.tokens
        note = (event.epoch, self.epoch.round_salt)
        return [ev.Compute(self._jobs.add("delta", note), "check_delta")]

    def _on_delta(self, note: tuple[Any, ...], result: tuple[str, bytes], now_ns: int) -> list[Effect]:
        if note != (self.chain.epoch + 1, self.epoch.round_salt) or self.epoch.state != "training":
            return []
        problem, commitment = result
        if problem:
            return self.epoch.on_local_bad(problem, now_ns)
        return self.epoch.on_local_ready(self._round_tokens, commitment, now_ns)

    def _start_round(self) -> list[Effect]:
        if not (self.epoch.round_wanted and self._trainer_idle and self.epoch.state == "training"):
            return []
        if self._jobs.open_of("delta") or self._leaving or self._finish_ns:
            return []
        self.epoch.round_wanted = False
        self._trainer_idle = False
        steps = self.setup.run.inner.steps
        self._step, self._steps = 0, steps
        self._training_epoch = self.chain.epoch + 1
        salt = self.epoch.round_salt.to_bytes(4, "big")
        key = hashlib.sha256(b"p2p-diloco/shares\0" + self.chain.head.digest + self.me + salt).digest()
        return [ev.StartRound(self._training_epoch, steps, self.chain.epoch * steps, key)]

    # --- after every event ---

    def _after(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        while self.epoch.convicted:
            effects += self._convict(*self.epoch.convicted.pop(0), now_ns)
        effects += self._catch_up(now_ns)
        effects += self._start_round()
        behind = self._training_epoch and (
            self.epoch.straggling(now_ns) or self._training_epoch != self.chain.epoch + 1
        )
        if behind and self._training_epoch != self._stopped:
            self._stopped = self._training_epoch
            effects.append(ev.StopEarly(self._training_epoch))
        effects += self.members.set_progress(self._progress(), now_ns)
        effects += self._ending(now_ns)
        return effects

    _stopped = 0

    def _progress(self) -> msg.Progress:
        phase = self.epoch.phase
        if self._leaving:
            phase = "leaving"
        elif phase == "training" and not self._trainer_idle and not self._training_epoch:
            phase = "joining" if not self._jobs.open_of("delta") else phase
        root = self.chain.head.certificate.state_root
        return msg.Progress(
            self.chain.epoch, root, phase, self._step, self._steps, self._loss, self._tokens_per_s
        )

    def _catch_up(self, now_ns: int) -> list[Effect]:
        catchup = self.catchup
        if catchup is not None:
            return self._follow_catchup(catchup, now_ns)
        if self.epoch.fetch is not None and not self._jobs.open_of("ring"):
            (vote, holders), self.epoch.fetch = self.epoch.fetch, None
            donors = [peer for peer in holders if self.members.usable(peer)]
            return self._pull_round(vote.chunk_root, vote.epoch, vote.state_root, donors, now_ns)
        if self.epoch.state != "joining":
            return []
        busy = self._jobs.open_of("ring") or self._jobs.open_of("catchup") or self._jobs.open_of("swap")
        if busy or self._jobs.open_of("install"):
            return []
        head = self.chain.head.certificate
        if self._held_epoch == self.chain.epoch:
            return self.epoch.on_caught_up(now_ns)
        if self._held_epoch >= 0 and self.chain.epoch - self._held_epoch <= _ROUND_STEPS:
            step = self.chain.link(self._held_epoch + 1).certificate
            if self._round_failed != step.chunk_root:
                self._round_failed = step.chunk_root  # tried once
                donors = [p for p in self.members.usable_peers() if self._head_of(p) >= step.epoch]
                return self._pull_round(step.chunk_root, step.epoch, step.state_root, donors, now_ns)
        donors = [peer for peer in self.members.usable_peers() if self._holds(peer, head.state_root)]
        if not donors:
            if now_ns - self._waiting_since_ns > 10 * _S:
                self._waiting_since_ns = now_ns
                return [
                    ev.Notice("info", f"waiting for a peer that holds the state of epoch {self.chain.epoch}")
                ]
            return []
        return self._begin_catchup(
            CatchUp(
                head.state_root, self.chain.epoch, self.setup.chunks, self._shuffled(donors),
                self.setup.peer.timeouts.request_s, self._jobs,
            ),
            now_ns,
        )  # fmt: skip

    def _pull_round(
        self, chunk_root: bytes, epoch: int, state_root: bytes, donors: list[PeerId], now_ns: int
    ) -> list[Effect]:
        """Take the round that leads from the state that we hold to this one: from our own disk's if we
        have it, else from those who do."""
        catchup = CatchUp(
            chunk_root, epoch, self.setup.chunks, self._shuffled(donors),
            self.setup.peer.timeouts.request_s, self._jobs, "round", state_root,
        )  # fmt: skip
        held = self.rounds.get(chunk_root)
        return self._begin_catchup(catchup, now_ns, held)

    def _shuffled(self, peers: Iterable[PeerId]) -> list[PeerId]:
        chosen = list(peers)
        self._random.shuffle(chosen)
        return chosen

    def _begin_catchup(self, catchup: CatchUp, now_ns: int, held: Round | None = None) -> list[Effect]:
        self.catchup = catchup
        self._waiting_since_ns = now_ns
        effects = catchup.start(now_ns) if held is None else catchup.start_with(held.hashes, held.payloads)
        return [*effects, *self._catch_up(now_ns)] if catchup.state == "failed" else effects

    def _holds(self, peer: PeerId, root: bytes) -> bool:
        member = self.members.get(peer)
        progress = member.progress if member is not None else None
        if progress is None or progress.phase in ("joining", "finishing"):
            return False
        return progress.state_root == root

    def _follow_catchup(self, catchup: CatchUp, now_ns: int) -> list[Effect]:
        """Take the result, or give up a fetch that nobody needs any more."""
        if catchup.state == "failed":
            self.catchup = None
            if catchup.kind == "round":
                return [ev.Notice("info", f"no round of epoch {catchup.epoch} to be had: {catchup.failed}")]
            return [ev.Notice("warning", f"fetching epoch {catchup.epoch} failed: {catchup.failed}; again")]
        adopting = self.epoch.state == "fetching" and catchup.epoch == self.chain.epoch + 1
        if not adopting and not self._is_wanted(catchup):
            self.catchup = None
            return []
        if catchup.state != "done":
            if adopting or catchup.kind == "round":
                return []
            holders = [p for p in self.members.usable_peers() if self._holds(p, catchup.root)]
            return catchup.add_donors(holders, now_ns)
        self.catchup = None
        effects: list[Effect] = []
        if catchup.kind == "round":
            held = Round(catchup.epoch, catchup.state_root, catchup.hashes(), catchup.round_payloads())
            if adopting:
                return self.epoch.on_fetched(held, now_ns)
            self.rounds.add(held)
            entry = Entry("round", catchup.epoch, held.state_root, None, held.payloads)
            effects += self.epoch.scribe.put(entry)
        values = {
            "epoch": catchup.epoch,
            "kind": catchup.kind,
            "bytes": catchup.bytes_received,
            "donors": [show(peer) for peer in catchup.donors_used],
            "ns": now_ns - self._waiting_since_ns,
        }
        job = self._jobs.add("install", (catchup.state_root, catchup.epoch))
        swap = ev.Compute(job, "swap", (catchup.state_root, catchup.epoch))
        return [*effects, ev.Metric("caught_up", values), swap]

    def _is_wanted(self, catchup: CatchUp) -> bool:
        if self.epoch.state != "joining":
            return False
        step = catchup.kind == "round" and catchup.epoch == self._held_epoch + 1
        return step or catchup.state_root == self.chain.head.certificate.state_root

    def _on_installed(self, note: tuple[Any, ...], now_ns: int) -> list[Effect]:
        root, self._held_epoch = note
        if self.epoch.state != "joining" or root != self.chain.head.certificate.state_root:
            return []
        text = f"holding the certified state of epoch {self._held_epoch} ({root.hex()[:12]})"
        return [ev.Notice("info", text), *self.epoch.on_caught_up(now_ns)]

    def _ending(self, now_ns: int) -> list[Effect]:
        last = self.setup.run.agreement.epochs
        own = self.setup.peer.stop_after_epochs
        reached = (last and self.chain.epoch >= last) or (own and self.chain.epoch >= own)
        if reached and not self._finish_ns and self.epoch.state == "training":
            self._finish_ns = now_ns + _LINGER_NS
        if self._leaving and not self._jobs.open_of("persist"):
            self.finished = True
            return [*self.members.leave(), ev.Finished(self._leaving)]
        if self._finish_ns:
            here = self.members.usable_peers()
            slow = [p for p in here if self._head_of(p) < self.chain.epoch or self._is_joining(p)]
            if not slow or now_ns >= self._finish_ns:
                self.finished = True
                return [*self.members.leave(), ev.Finished(f"epoch {self.chain.epoch} was the last one")]
        return []

    def _is_joining(self, peer: PeerId) -> bool:
        member = self.members.get(peer)
        return member is not None and member.progress is not None and member.progress.phase == "joining"

    # --- for those who look on ---

    def pending(self) -> str:
        """What is unfinished here, and for whom or what it waits; one line."""
        epoch = self.epoch
        text = waits_for(
            epoch.state, self.chain, self.members, epoch.attendance, epoch.ballots, epoch.run, epoch.acceptor
        )
        if self.catchup is not None:
            text += f"; pulls the {self.catchup.kind} of epoch {self.catchup.epoch} ({self.catchup.state})"
        if self.epoch.scribe.degraded:
            text += f"; DEGRADED_DISK with {self.epoch.scribe.waiting()} records unwritten"
        return text

    def sizes(self) -> dict[str, int]:
        """How much is kept in memory, by kind; all of it is bounded."""
        return {
            "jobs": len(self._jobs),
            "seen": len(self._seen),
            "members": len(self.members.members),
            "held_bytes": self.epoch.run.held_bytes(),
            "future": len(self.epoch.future),
            "archive": len(self.epoch.archive),
            "unwritten": self.epoch.scribe.waiting(),
        }
