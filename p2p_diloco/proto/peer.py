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
from p2p_diloco.proto.dice import Dice
from p2p_diloco.proto.epoch import EpochMachine
from p2p_diloco.proto.events import Effect, Event
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.membership import Membership
from p2p_diloco.proto.serve import Server
from p2p_diloco.proto.statements import Signer, Statements
from p2p_diloco.wire import messages as msg

_S = 1_000_000_000
_SEEN = 16_384  # statements remembered so that each is passed on once
_RELAY_FANOUT = 4  # links a statement is passed on to; its author sent it to all of its own
_CHAIN_WAIT_NS = _S  # between two requests for missing certificates (guess)
_LINGER_NS = 10 * _S  # how long a finished peer stays for the others (guess)


@dataclass(frozen=True)
class PeerSetup:
    """What one peer starts with. `holds_state`: our memory holds the state of the chain's head (the
    founder, or a restart from a checkpoint)."""

    run: RunConfig
    peer: PeerConfig
    genesis: msg.Genesis
    chunks: int
    addresses: tuple[str, ...]
    incarnation: int
    holds_state: bool
    certificates: tuple[msg.Certificate, ...] = ()
    log: tuple[LogRecord, ...] = ()


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
        )
        self.server = Server(self.chain, self._jobs)
        self.catchup: CatchUp | None = None
        self._holds_state = setup.holds_state
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
        effects = self._route(event, now_ns)
        effects += self._after(now_ns)
        return effects

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
                return [] if entry is None else self.epoch.on_persisted(entry[1], error, now_ns)
            case ev.LinkUp(peer=peer, addresses=addresses):
                effects = self.members.link_up(peer, addresses, now_ns)
                return [*effects, *self.epoch.on_link_up(now_ns)]
            case ev.LinkDown(peer=peer, reason=reason):
                return self._on_link_down(peer, reason, now_ns)
            case ev.DialFailed(peer=peer):
                return self.members.dial_failed(peer, now_ns)
            case ev.LaneFailed(peer=peer, reason=reason):
                return self.epoch.on_peer_lost(peer, reason, now_ns)
            case _:
                return self._on_local(event, now_ns)

    def _on_local(self, event: Event, now_ns: int) -> list[Effect]:
        match event:
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
        name = signed.digest()
        if name in self._seen:
            return []
        self.statements.check(signed)
        self._seen[name] = None
        if len(self._seen) > _SEEN:
            self._seen.popitem(last=False)
        others = [p for p in self.members.linked_peers() if p != peer]
        relays = self._random.sample(others, min(_RELAY_FANOUT, len(others)))
        effects: list[Effect] = [ev.Send(relay, msg.Statement(signed)) for relay in relays]
        return [*effects, *self.epoch.on_statement(signed, peer, now_ns)]

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
        effects += self._catch_up(now_ns)
        effects += self._start_round()
        behind = self._training_epoch and (
            self.epoch.straggling(now_ns) or self._training_epoch != self.chain.epoch + 1
        )
        if behind and self._training_epoch != self._stopped:
            self._stopped = self._training_epoch
            effects.append(ev.StopEarly(self._training_epoch))
        effects += self.members.set_progress(self._progress())
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
            root, holders = self.epoch.fetch
            self.epoch.fetch = None
            donors = [peer for peer in holders if self.members.usable(peer)]
            return self._begin_catchup(root, donors, now_ns)
        if self.epoch.state != "joining":
            return []
        if self._holds_state and self.setup.holds_state and self.chain.epoch == len(self.setup.certificates):
            self._holds_state = False
            return self.epoch.on_caught_up(now_ns)
        if self._jobs.open_of("ring") or self._jobs.open_of("catchup") or self._jobs.open_of("swap"):
            return []
        root = self.chain.head.certificate.state_root
        donors = [peer for peer in self.members.usable_peers() if self._holds(peer, root)]
        if not donors:
            if now_ns - self._waiting_since_ns > 10 * _S:
                self._waiting_since_ns = now_ns
                return [
                    ev.Notice("info", f"waiting for a peer that holds the state of epoch {self.chain.epoch}")
                ]
            return []
        return self._begin_catchup(root, donors, now_ns)

    def _begin_catchup(self, root: bytes, donors: Iterable[PeerId], now_ns: int) -> list[Effect]:
        chosen = list(donors)
        self._random.shuffle(chosen)
        request_s = self.setup.peer.timeouts.request_s
        epoch = self.chain.epoch + (self.epoch.state == "fetching")
        self.catchup = CatchUp(root, epoch, self.setup.chunks, chosen, request_s, self._jobs)
        self._waiting_since_ns = now_ns
        return self.catchup.start(now_ns)

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
            return [ev.Notice("warning", f"fetching epoch {catchup.epoch} failed: {catchup.failed}; again")]
        wanted = self.chain.head.certificate.state_root if self.epoch.state == "joining" else None
        adopting = self.epoch.state == "fetching"
        if not adopting and wanted != catchup.root:
            self.catchup = None
            return []
        if catchup.state != "done":
            holders = [p for p in self.members.usable_peers() if self._holds(p, catchup.root)]
            return catchup.add_donors(holders, now_ns) if not adopting else []
        self.catchup = None
        if adopting:
            return self.epoch.on_fetched(now_ns)
        values = {
            "epoch": catchup.epoch,
            "bytes": catchup.bytes_received,
            "donors": [show(peer) for peer in catchup.donors_used],
            "ns": now_ns - self._waiting_since_ns,
        }
        job = self._jobs.add("install", (catchup.root, catchup.epoch))
        return [ev.Metric("caught_up", values), ev.Compute(job, "swap", (catchup.root, catchup.epoch))]

    def _on_installed(self, note: tuple[Any, ...], now_ns: int) -> list[Effect]:
        root, epoch = note
        if self.epoch.state != "joining" or root != self.chain.head.certificate.state_root:
            return []
        notice = ev.Notice("info", f"holding the certified state of epoch {epoch} ({root.hex()[:12]})")
        return [notice, *self.epoch.on_caught_up(now_ns)]

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
