"""A swarm in one thread with a virtual clock: the same machines as on sockets, fed from an event heap.

Deterministic: one seed gives one trace. Numerics run inline on real (small) vectors. Links can be cut or
muted, peers killed (their memory is lost, their disk stays), paused, slowed, given a clock that drifts or
a disk that is full, and started again. `sim.faults` plans such things, `sim.checks` watches.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import Identity, PeerId, show
from p2p_diloco.numerics.int8 import Codec
from p2p_diloco.numerics.layout import Layout, Schema, TensorSpec
from p2p_diloco.numerics.state import FlatState, StateBuffers
from p2p_diloco.numerics.work import WorkTable, replay
from p2p_diloco.proto import events as ev
from p2p_diloco.proto.peer import PeerMachine, PeerSetup
from p2p_diloco.proto.rounds import Round
from p2p_diloco.sim.network import Network
from p2p_diloco.sim.signer import ToyIdentity
from p2p_diloco.wire import messages as msg

_S = 1_000_000_000
_FSYNC_NS = 1_000_000  # how long a record takes to reach the disk
_CHECKPOINT_EPOCHS = 4
Flat = np.ndarray[Any, np.dtype[np.float32]]
DeltaOf = Callable[["SimPeer", int], Flat]


class StandstillError(AssertionError):
    """A simulated swarm did not get where it should within the time."""


@dataclass
class Disk:
    """What survives a kill. `full`: writes are refused. `forgot`: the vote log was lost as a whole. `base`:
    the newest checkpoint; `rounds`: finished rounds by epoch and state root."""

    records: list[tuple[str, bytes]] = field(default_factory=list)
    full: bool = False
    forgot: bool = False
    base: tuple[int, Flat, Flat] | None = None
    rounds: dict[int, dict[bytes, tuple[bytes, ...]]] = field(default_factory=dict)


@dataclass
class SimPeer:
    """One simulated peer. `disk` survives a kill; `machine` and `table` do not."""

    index: int
    identity: Identity | ToyIdentity
    store: Disk = field(default_factory=Disk)
    lives: int = 0
    machine: PeerMachine | None = None
    table: WorkTable | None = None
    notices: list[str] = field(default_factory=list)
    metrics: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stopped: str = ""
    founder: bool = False
    clock_rate: float = 1.0
    slowness: float = 1.0  # factor on everything that it computes
    paused_until_ns: int = 0
    backlog: list[ev.Event] = field(default_factory=list)
    rounds: int = 0
    trainer: int = 0  # which one: they may die and be started again
    control_bytes: int = 0  # sent, without framing

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def disk(self) -> list[tuple[str, bytes]]:
        return self.store.records

    @property
    def alive(self) -> bool:
        return self.machine is not None

    @property
    def live(self) -> PeerMachine:
        assert self.machine is not None
        return self.machine

    def clock_ns(self, now_ns: int) -> int:
        """What this peer's monotonic clock shows."""
        return round(now_ns * self.clock_rate) if self.clock_rate != 1.0 else now_ns

    def true_ns(self, clock_ns: int) -> int:
        return round(clock_ns / self.clock_rate) if self.clock_rate != 1.0 else clock_ns


def _nothing(*_: Any) -> None:
    """Watches nothing."""


class World:
    """``run_until(condition)`` advances virtual time; faults are methods, called between steps or from
    ``on_effect`` (called with every effect before it is carried out; returning False drops it). ``watch``
    is called with each peer after each event that it handled, ``on_round`` with each delta it made."""

    def __init__(
        self,
        run: RunConfig,
        peer: PeerConfig,
        values: int,
        seed: int,
        delta_of: DeltaOf,
        toy_keys: bool = False,
    ) -> None:
        self.run, self.config, self.seed = run, peer, seed
        self.random = random.Random(seed)
        self.network = Network(random.Random(seed + 1))
        self.now_ns = _S
        self.peers: list[SimPeer] = []
        self.schema = Schema((TensorSpec("weights", (values,), "float32"),) if values else ())
        self.layout = Layout.choose(values, run.chunk_values)
        self.delta_of = delta_of
        self.round_ns = (_S // 2, 2 * _S)
        self.on_effect: Callable[[SimPeer, ev.Effect], bool] = lambda peer, effect: True
        self.watch: Callable[[SimPeer], None] = _nothing
        self.on_round: Callable[[SimPeer, bytes], None] = _nothing
        self.on_send: Callable[[SimPeer, msg.Message], None] = _nothing
        self._toy = toy_keys
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._tick_at: dict[int, int] = {}
        self._at: dict[str, SimPeer] = {}  # by address
        self._ends: dict[tuple[int, PeerId], SimPeer] = {}  # the other end of a link
        self._copies: dict[int, tuple[msg.Message, msg.Message, int]] = {}
        self._trace = hashlib.blake2b(digest_size=16)
        self.genesis: msg.Genesis | None = None
        self.genesis_anchor = np.zeros(0, np.float32)
        self.steps = 0

    # --- peers ---

    def add(
        self,
        founder: bool = False,
        seeds: list[int] | None = None,
        clock_rate: float = 1.0,
        slowness: float = 1.0,
    ) -> SimPeer:
        """Start a new peer; a joiner is told of ``seeds`` (all that are alive by default)."""
        secret = self.random.randbytes(32)
        identity = ToyIdentity(secret) if self._toy else Identity.generate(secret)
        peer = SimPeer(len(self.peers), identity, founder=founder, clock_rate=clock_rate, slowness=slowness)
        return self._enter(peer, founder, seeds)

    def add_copy(self, original: SimPeer) -> SimPeer:
        """A second host with a copy of a peer's identity file and an empty run folder."""
        return self._enter(SimPeer(len(self.peers), original.identity), False, None)

    def _enter(self, peer: SimPeer, founder: bool, seeds: list[int] | None) -> SimPeer:
        self.peers.append(peer)
        self._at[self._address(peer)[0]] = peer
        self.start(peer, founder, seeds)
        return peer

    def start(self, peer: SimPeer, founder: bool = False, seeds: list[int] | None = None) -> None:
        """Give a peer a (new) life, with what its disk holds."""
        state = self._make_state(peer, founder)
        assert self.genesis is not None
        certificates = self._chain_on_disk(peer)
        held = self._restore(peer, state, certificates)
        rounds = [
            Round.of(epoch, root, payloads)
            for epoch in (len(certificates), len(certificates) + 1)
            for root, payloads in peer.store.rounds.get(epoch, {}).items()
        ]
        setup = PeerSetup(
            run=self.run,
            peer=self.config,
            genesis=self.genesis,
            chunks=self.layout.chunks,
            addresses=self._address(peer),
            incarnation=1000 * peer.lives,
            held_epoch=held,
            certificates=certificates,
            log=tuple(entry for entry in peer.disk if entry[0] not in ("certificate", "probe")),
            rounds=tuple(rounds),
            forgot=peer.store.forgot,
        )
        peer.store.forgot = False
        peer.lives += 1
        generator = random.Random(self.random.getrandbits(64))
        peer.machine = PeerMachine(peer.identity, setup, generator, peer.clock_ns(self.now_ns))
        peer.table = WorkTable(state, self.schema)
        peer.stopped, peer.paused_until_ns, peer.backlog = "", 0, []
        self.feed(peer, ev.TrainerBack())
        chosen = [p.index for p in self.peers if p.alive] if seeds is None else seeds
        for index in chosen:
            self.introduce(peer, self.peers[index])

    def restart(self, peer: SimPeer) -> None:
        """A new life that knows all addresses that ever were (its DHT does)."""
        self.start(peer, seeds=[p.index for p in self.peers])

    def _chain_on_disk(self, peer: SimPeer) -> tuple[msg.Certificate, ...]:
        found: dict[int, msg.Certificate] = {}
        for kind, data in peer.disk:
            if kind == "certificate":
                certificate = msg.unpack_object(msg.Certificate, data)
                found[certificate.epoch] = certificate
        whole = next(e for e in range(1, len(found) + 2) if e not in found)
        return tuple(found[epoch] for epoch in range(1, whole))

    def _restore(self, peer: SimPeer, state: FlatState, chain: tuple[msg.Certificate, ...]) -> int:
        """Load the checkpoint and replay the rounds after it; the epoch reached, -1 for none."""
        base = peer.store.base
        if base is None or base[0] > len(chain):
            return -1
        epoch, anchor, momentum = base
        state.anchor[:], state.momentum[:] = anchor, momentum
        state.initialise(epoch)
        while epoch < len(chain):
            root = chain[epoch].state_root
            payloads = peer.store.rounds.get(epoch + 1, {}).get(root)
            if payloads is None or not replay(state, epoch + 1, root, payloads):
                break
            epoch += 1
        return epoch

    def _make_state(self, peer: SimPeer, founder: bool) -> FlatState:
        codec = Codec(self.run.codec.kind)
        buffers = StateBuffers.allocate(self.layout.total_values)
        state = FlatState(self.layout, codec, self.run.outer.lr, self.run.outer.momentum, buffers)
        if founder and self.genesis is None:
            buffers.anchor0[:] = np.random.default_rng(self.seed).standard_normal(self.layout.total_values)
            self.genesis_anchor = buffers.anchor0.copy()
            peer.store.base = (0, self.genesis_anchor, np.zeros_like(self.genesis_anchor))
            state.initialise(0)
            self.genesis = msg.Genesis(
                msg.PROTOCOL,
                self.run.canonical_bytes(),
                self.schema.to_bytes(),
                self.layout.chunk_values,
                state.root,
                peer.identity.public_key,
                bytes(16),
            )
        return state

    def introduce(self, peer: SimPeer, other: SimPeer) -> None:
        """Discovery tells a peer where another one may be."""
        if other is not peer and peer.alive:
            now = peer.clock_ns(self.now_ns)
            for effect in peer.live.members.learn(other.peer_id, self._address(other), now):
                self._carry_out(peer, effect)

    def kill(self, peer: SimPeer, why: str = "killed") -> None:
        """SIGKILL: memory is gone, links break at once, the disk stays as it is."""
        peer.machine = peer.table = None
        peer.stopped = why
        peer.backlog = []
        for link in sorted(self.network.links, key=sorted):
            if peer.index in link:
                self._drop(link, "connection reset")

    def pause(self, peer: SimPeer, seconds: float) -> None:
        """SIGSTOP for a while: what happens meanwhile is seen when it goes on. Its links break at the
        others by silence, as they would."""
        if not peer.alive:
            return
        peer.paused_until_ns = max(peer.paused_until_ns, self.now_ns + round(seconds * _S))
        until, life = peer.paused_until_ns, peer.lives
        self.after(until - self.now_ns, lambda: self._resume(peer, life))
        idle_ns = round(self.config.timeouts.idle_s * _S)
        if seconds * _S > idle_ns:
            self.after(idle_ns, lambda: self._silence(peer, life))

    def _silence(self, peer: SimPeer, life: int) -> None:
        if peer.lives == life and peer.paused_until_ns > self.now_ns:
            for link in sorted(self.network.links, key=sorted):
                if peer.index in link:
                    self._drop(link, "silence")

    def _resume(self, peer: SimPeer, life: int) -> None:
        if peer.lives != life or not peer.alive or peer.paused_until_ns > self.now_ns:
            return
        peer.paused_until_ns = 0
        waiting, peer.backlog = peer.backlog, []
        for event in [*waiting, ev.Tick()]:
            self.feed(peer, event)

    # --- the network ---

    def cut(self, left: SimPeer, right: SimPeer) -> None:
        """The network between two peers fails until `mend`."""
        link = frozenset((left.index, right.index))
        self.network.cut.add(link)
        self._drop(link, "cut")

    def mute(self, source: SimPeer, target: SimPeer) -> None:
        """What one sends to the other vanishes until `mend`; both notice by silence."""
        pair = (source.index, target.index)
        since = self.network.mute.setdefault(pair, self.now_ns)
        link = frozenset(pair)

        def notice() -> None:
            if self.network.mute.get(pair) == since:
                self._drop(link, "silence")

        self.after(round(self.config.timeouts.idle_s * _S), notice)

    def mend(self) -> None:
        """All cut and muted links can be dialled again."""
        self.network.cut.clear()
        self.network.mute.clear()

    # --- time ---

    def run_until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> None:
        """Advance until the condition holds; StandstillError with seed and states if it never does."""
        end = self.now_ns + round(limit_s * _S)
        while not condition():
            if not self._heap or self._heap[0][0] > end:
                raise StandstillError(f"seed {self.seed}: nothing more to expect\n{self.report()}")
            self._step()

    def run_for(self, seconds: float) -> None:
        """Advance virtual time by this much."""
        end = self.now_ns + round(seconds * _S)
        while self._heap and self._heap[0][0] <= end:
            self._step()
        self.now_ns = end

    def _step(self) -> None:
        self.now_ns, _, action = heapq.heappop(self._heap)
        self.steps += 1
        action()

    def report(self) -> str:
        """Where every peer is, what it waits for and what it last said: for a failed test."""
        lines = [f"virtual time {self.now_ns / _S:.2f} s"]
        for peer in self.peers:
            if peer.machine is None:
                lines.append(f"  {peer.index} {show(peer.peer_id)} {peer.stopped}")
                continue
            epoch = peer.machine.epoch
            lines.append(f"  {peer.index} {show(peer.peer_id)} epoch {epoch.epoch} {epoch.state}")
            lines.append(f"    {peer.machine.pending()}")
            lines += [f"      {entry}" for entry in epoch.history[-4:] + peer.notices[-4:]]
        return "\n".join(lines)

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do something later in virtual time."""
        self._order += 1
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._order, action))

    def trace_hash(self) -> str:
        """Names the whole history of events so far: equal for equal seeds."""
        return self._trace.hexdigest()

    # --- effects ---

    def feed(self, peer: SimPeer, event: ev.Event) -> None:
        if peer.machine is None:
            return
        if peer.paused_until_ns > self.now_ns:
            if not isinstance(event, ev.Tick):
                peer.backlog.append(event)
            return
        self._trace.update(b"%d %d %s" % (self.now_ns, peer.index, type(event).__name__.encode()))
        self._copies.clear()
        for effect in peer.machine.handle(event, peer.clock_ns(self.now_ns)):
            if peer.machine is None:
                return
            if self.on_effect(peer, effect) and peer.machine is not None:
                self._carry_out(peer, effect)
        self._schedule_tick(peer)
        if peer.machine is not None:
            self.watch(peer)

    def _schedule_tick(self, peer: SimPeer) -> None:
        if peer.machine is None:
            return
        wake = peer.true_ns(peer.machine.next_wake_ns(peer.clock_ns(self.now_ns)))
        wake = max(wake, self.now_ns + 1_000_000)
        due = self._tick_at.get(peer.index, 0)
        if due > self.now_ns and due <= wake:
            return
        self._tick_at[peer.index] = wake
        life = peer.lives
        self.after(wake - self.now_ns, lambda: self._tick(peer, life, wake))

    def _tick(self, peer: SimPeer, life: int, due: int) -> None:
        if peer.lives == life and self._tick_at.get(peer.index) == due:
            self.feed(peer, ev.Tick())

    def _carry_out(self, peer: SimPeer, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peer=target, message=message):
                self.on_send(peer, message)
                self._transmit(peer, target, ev.Received(peer.peer_id, self._copy(peer, message)), "control")
            case ev.SendFrame():
                self._send_frame(peer, effect)
            case ev.Dial(peer=target, addresses=addresses):
                self._later_dial(peer, target, addresses)
            case ev.Close(peer=target, reason=reason):
                other = self._ends.get((peer.index, target))
                if other is not None:
                    self._drop(frozenset((peer.index, other.index)), f"closed: {reason}")
            case ev.Compute(job=job, op=op, arguments=arguments):
                self._compute(peer, job, op, arguments)
            case ev.Persist(record=record, kind=kind, data=data):
                self._later(peer, _FSYNC_NS, lambda: self._persisted(peer, record, kind, data))
            case ev.KeepRound():
                self._later(peer, 2 * _FSYNC_NS, lambda: self._kept(peer, effect))
            case ev.StartRound(epoch=epoch, steps=steps):
                wait, trainer = round(self.random.randint(*self.round_ns) * peer.slowness), peer.trainer
                self._later(peer, wait, lambda: self._train(peer, epoch, steps, trainer))
            case ev.Notice(level=level, text=text):
                peer.notices.append(f"{self.now_ns / _S:.3f}s {level}: {text}")
            case ev.Metric(kind=kind, values=values):
                peer.metrics.append((kind, values))
            case ev.Finished(reason=reason):
                self.after(_S // 5, lambda: self.kill(peer, reason))  # what was sent still arrives

    def _copy(self, peer: SimPeer, message: msg.Message) -> msg.Message:
        """What the other side decodes; one flood is encoded once."""
        known = self._copies.get(id(message))
        if known is None:
            data = msg.encode(message)
            known = self._copies[id(message)] = (message, msg.decode(data), len(data))
        peer.control_bytes += known[2]
        return known[1]

    def _later(self, peer: SimPeer, delay_ns: int, action: Callable[[], None]) -> None:
        life = peer.lives
        self.after(delay_ns, lambda: action() if peer.alive and peer.lives == life else None)

    def _train(self, peer: SimPeer, epoch: int, steps: int, trainer: int) -> None:
        assert peer.table is not None
        if trainer != peer.trainer:
            return  # it died meanwhile
        peer.rounds += 1
        peer.table.state.buffers.delta[:] = self.delta_of(peer, epoch)
        self.feed(peer, ev.RoundDone(epoch, steps, 100 + peer.index, 1.0))

    def _compute(self, peer: SimPeer, job: int, op: str, arguments: tuple[Any, ...]) -> None:
        def work() -> None:
            assert peer.table is not None
            try:
                event = ev.ComputeDone(job, peer.table.run(op, arguments))
            except ProtocolViolation as violation:
                event = ev.ComputeDone(job, None, str(violation))
            if op == "check_delta" and not event.error:
                self.on_round(peer, event.result[1])
            if op == "swap":
                self._after_swap(peer)
            self.feed(peer, event)

        wait = round(self.random.randint(100_000, 2_000_000) * peer.slowness)
        self._later(peer, wait, work)

    def _persisted(self, peer: SimPeer, record: int, kind: str, data: bytes) -> None:
        if peer.store.full:
            self.feed(peer, ev.Persisted(record, "no space left on device"))
            return
        peer.disk.append((kind, data))
        self.feed(peer, ev.Persisted(record))

    def _kept(self, peer: SimPeer, effect: ev.KeepRound) -> None:
        if peer.store.full:
            self.feed(peer, ev.Persisted(effect.record, "no space left on device"))
            return
        peer.store.rounds.setdefault(effect.epoch, {})[effect.state_root] = effect.payloads
        self.feed(peer, ev.Persisted(effect.record))

    def _checkpoint(self, peer: SimPeer) -> None:
        """Write the current state, as a background task of the real peer does."""
        if peer.table is None or peer.store.full:
            return
        state = peer.table.state
        peer.store.base = (state.epoch, state.anchor.copy(), state.momentum.copy())
        for epoch in [e for e in peer.store.rounds if e <= state.epoch]:
            del peer.store.rounds[epoch]

    def _after_swap(self, peer: SimPeer) -> None:
        assert peer.table is not None
        base, epoch = peer.store.base, peer.table.state.epoch
        start = -1 if base is None else base[0]
        gap = any(e not in peer.store.rounds for e in range(start + 1, epoch + 1))
        if start < 0 or gap or epoch - start >= _CHECKPOINT_EPOCHS:
            self._later(peer, _S // 2, lambda: self._checkpoint(peer))

    def _send_frame(self, peer: SimPeer, frame: ev.SendFrame) -> None:
        other = self._ends.get((peer.index, frame.peer))
        if other is not None and (peer.index, other.index) in self.network.mute:
            stall = round(self.config.timeouts.stall_s * _S)
            self._later(peer, stall, lambda: self.feed(peer, ev.LaneFailed(frame.peer, "stalled")))
            return
        event = ev.FrameIn(
            peer.peer_id, frame.kind, frame.tag, frame.chunk, frame.hop, frame.weight, frame.payload
        )
        if not self._transmit(peer, frame.peer, event, "data"):
            self._later(peer, 0, lambda: self.feed(peer, ev.LaneFailed(frame.peer, "no link")))

    def _transmit(self, peer: SimPeer, target: PeerId, event: ev.Event, lane: str) -> bool:
        """Deliver in order per direction and lane, if the link is still the same one then."""
        other = self._ends.get((peer.index, target))
        if other is None:
            return False
        if lane == "control" and self.network.lost(peer.index, other.index):
            return True
        link = frozenset((peer.index, other.index))
        life = other.lives

        def deliver() -> None:
            if link in self.network.links and other.lives == life:
                self.feed(other, event)

        due = self.network.arrival_ns(peer.index, other.index, lane, self.now_ns)
        self.after(due - self.now_ns, deliver)
        if lane == "control":
            for again in self.network.extras(deliver):
                self.after(due - self.now_ns + self.random.randint(1, _S), again)
        return True

    def _later_dial(self, peer: SimPeer, target: PeerId, addresses: tuple[str, ...]) -> None:
        def dial() -> None:
            there = [self._at[a] for a in addresses if a in self._at]
            other = next((p for p in there if p.alive and p.peer_id == target and p is not peer), None)
            if other is None or not self.network.dialable(peer.index, other.index):
                self.feed(peer, ev.DialFailed(target, "no answer"))
            elif (peer.index, target) in self._ends or (other.index, peer.peer_id) in self._ends:
                self.feed(peer, ev.DialFailed(target, "duplicate"))
            else:
                self._connect(peer, other)

        self._later(peer, self.random.randint(*self.network.rates.delay_ns), dial)

    def _connect(self, peer: SimPeer, other: SimPeer) -> None:
        self.network.links.add(frozenset((peer.index, other.index)))
        self._ends[peer.index, other.peer_id] = other
        self._ends[other.index, peer.peer_id] = peer
        self.feed(peer, ev.LinkUp(other.peer_id, self._address(other)))
        self.feed(other, ev.LinkUp(peer.peer_id, self._address(peer)))

    def _drop(self, link: frozenset[int], reason: str) -> None:
        if link not in self.network.links:
            return
        self.network.links.discard(link)
        ends = sorted(link)
        for index, other in (ends, ends[::-1]):
            self._ends.pop((index, self.peers[other].peer_id), None)
            self._tell_down(self.peers[index], self.peers[other].peer_id, reason)

    def _tell_down(self, peer: SimPeer, lost: PeerId, reason: str) -> None:
        self._later(peer, 1_000_000, lambda: self.feed(peer, ev.LinkDown(lost, reason)))

    def _address(self, peer: SimPeer) -> tuple[str, ...]:
        return (f"10.0.{peer.index // 250}.{peer.index % 250 + 1}:7000",)
