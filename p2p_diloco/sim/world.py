"""A swarm in one thread with a virtual clock: the same machines as on sockets, fed from an event heap.

Deterministic: one seed gives one trace. Numerics run inline on real (small) vectors. Links can be cut,
peers killed (their memory is lost, their disk stays) and started again.
"""

from __future__ import annotations

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
from p2p_diloco.numerics.work import WorkTable
from p2p_diloco.proto import events as ev
from p2p_diloco.proto.peer import PeerMachine, PeerSetup
from p2p_diloco.wire import messages as msg

_S = 1_000_000_000
DeltaOf = Callable[["SimPeer", int], np.ndarray[Any, np.dtype[np.float32]]]


@dataclass
class SimPeer:
    """One simulated peer. `disk` survives a kill; `machine` and `table` do not."""

    index: int
    identity: Identity
    disk: list[tuple[str, bytes]] = field(default_factory=list)
    lives: int = 0
    machine: PeerMachine | None = None
    table: WorkTable | None = None
    notices: list[str] = field(default_factory=list)
    metrics: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stopped: str = ""

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def alive(self) -> bool:
        return self.machine is not None

    @property
    def live(self) -> PeerMachine:
        assert self.machine is not None
        return self.machine


class World:
    """``run_until(condition)`` advances virtual time; faults are methods, called between steps or from
    ``on_effect`` (called with every effect before it is carried out; returning False drops it)."""

    def __init__(self, run: RunConfig, peer: PeerConfig, values: int, seed: int, delta_of: DeltaOf) -> None:
        self.run, self.config, self.seed = run, peer, seed
        self.random = random.Random(seed)
        self.now_ns = _S
        self.peers: list[SimPeer] = []
        self.schema = Schema((TensorSpec("weights", (values,), "float32"),) if values else ())
        self.layout = Layout.choose(values, run.chunk_values)
        self.delta_of = delta_of
        self.delay_ns = (2_000_000, 30_000_000)
        self.round_ns = (_S // 2, 2 * _S)
        self.on_effect: Callable[[SimPeer, ev.Effect], bool] = lambda peer, effect: True
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._order = 0
        self._links: set[frozenset[int]] = set()
        self._cut: set[frozenset[int]] = set()
        self._lane_ready: dict[tuple[int, int], int] = {}
        self._tick_at: dict[int, int] = {}
        self.genesis: msg.Genesis | None = None
        self.steps = 0

    # --- peers ---

    def add(self, founder: bool = False, seeds: list[int] | None = None) -> SimPeer:
        """Start a new peer; a joiner is told of ``seeds`` (all that are alive by default)."""
        identity = Identity.generate(self.random.randbytes(32))
        peer = SimPeer(len(self.peers), identity)
        self.peers.append(peer)
        self.start(peer, founder, seeds)
        return peer

    def start(self, peer: SimPeer, founder: bool = False, seeds: list[int] | None = None) -> None:
        """Give a peer a (new) life."""
        codec = Codec(self.run.codec.kind)
        buffers = StateBuffers.allocate(self.layout.total_values)
        state = FlatState(self.layout, codec, self.run.outer.lr, self.run.outer.momentum, buffers)
        if founder:
            buffers.anchor0[:] = np.random.default_rng(self.seed).standard_normal(self.layout.total_values)
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
        assert self.genesis is not None
        certificates = tuple(
            msg.unpack_object(msg.Certificate, data) for kind, data in peer.disk if kind == "certificate"
        )
        setup = PeerSetup(
            run=self.run,
            peer=self.config,
            genesis=self.genesis,
            chunks=self.layout.chunks,
            addresses=(f"10.0.0.{peer.index + 1}:7000",),
            incarnation=1000 * peer.lives,
            holds_state=founder,
            certificates=() if founder else certificates,
            log=tuple(entry for entry in peer.disk if entry[0] != "certificate"),
        )
        peer.lives += 1
        generator = random.Random(self.random.getrandbits(64))
        peer.machine = PeerMachine(peer.identity, setup, generator, self.now_ns)
        peer.table = WorkTable(state, self.schema)
        peer.stopped = ""
        self.feed(peer, ev.TrainerBack())
        chosen = [p.index for p in self.peers if p.alive] if seeds is None else seeds
        for index in chosen:
            other = self.peers[index]
            if other is not peer:
                for effect in peer.live.members.learn(other.peer_id, self._address(other), self.now_ns):
                    self._carry_out(peer, effect)

    def kill(self, peer: SimPeer, why: str = "killed") -> None:
        """SIGKILL: memory is gone, links break at once, the disk stays as it is."""
        peer.machine = peer.table = None
        peer.stopped = why
        for link in sorted(self._links, key=sorted):
            if peer.index in link:
                self._drop(link, "connection reset")

    def cut(self, left: SimPeer, right: SimPeer) -> None:
        """The network between two peers fails until `mend`."""
        link = frozenset((left.index, right.index))
        self._cut.add(link)
        self._drop(link, "cut")

    def mend(self) -> None:
        """All cut links can be dialled again."""
        self._cut.clear()

    # --- time ---

    def run_until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> None:
        """Advance until the condition holds; AssertionError with seed and states if it never does."""
        end = self.now_ns + round(limit_s * _S)
        while not condition():
            if not self._heap or self._heap[0][0] > end:
                raise AssertionError(f"seed {self.seed}: nothing more to expect\n{self.report()}")
            self.now_ns, _, action = heapq.heappop(self._heap)
            self.steps += 1
            action()

    def run_for(self, seconds: float) -> None:
        """Advance virtual time by this much."""
        end = self.now_ns + round(seconds * _S)
        while self._heap and self._heap[0][0] <= end:
            self.now_ns, _, action = heapq.heappop(self._heap)
            self.steps += 1
            action()
        self.now_ns = end

    def report(self) -> str:
        """Where every peer is and what it last said: for a failed test."""
        lines = [f"virtual time {self.now_ns / _S:.2f} s"]
        for peer in self.peers:
            if peer.machine is None:
                lines.append(f"  {peer.index} {show(peer.peer_id)} {peer.stopped}")
                continue
            epoch = peer.machine.epoch
            lines.append(f"  {peer.index} {show(peer.peer_id)} epoch {epoch.epoch} {epoch.state}")
            lines += [f"      {entry}" for entry in epoch.history[-4:] + peer.notices[-4:]]
        return "\n".join(lines)

    def after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Do something later in virtual time."""
        self._order += 1
        heapq.heappush(self._heap, (self.now_ns + delay_ns, self._order, action))

    # --- effects ---

    def feed(self, peer: SimPeer, event: ev.Event) -> None:
        if peer.machine is None:
            return
        for effect in peer.machine.handle(event, self.now_ns):
            if peer.machine is None:
                return
            if self.on_effect(peer, effect) and peer.machine is not None:
                self._carry_out(peer, effect)
        self._schedule_tick(peer)

    def _schedule_tick(self, peer: SimPeer) -> None:
        if peer.machine is None:
            return
        wake = max(peer.machine.next_wake_ns(self.now_ns), self.now_ns + 1_000_000)
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
                decoded = msg.decode(msg.encode(message))
                self._transmit(peer, target, ev.Received(peer.peer_id, decoded), "control")
            case ev.SendFrame():
                self._send_frame(peer, effect)
            case ev.Dial(peer=target):
                self._later_dial(peer, target)
            case ev.Close(peer=target):
                self._drop(frozenset((peer.index, self._by_id(target).index)), "closed by the other side")
            case ev.Compute(job=job, op=op, arguments=arguments):
                self._compute(peer, job, op, arguments)
            case ev.Persist(record=record, kind=kind, data=data):
                self._later(peer, 1_000_000, lambda: self._persisted(peer, record, kind, data))
            case ev.StartRound(epoch=epoch, steps=steps):
                self._later(
                    peer, self.random.randint(*self.round_ns), lambda: self._train(peer, epoch, steps)
                )
            case ev.Notice(level=level, text=text):
                peer.notices.append(f"{self.now_ns / _S:.3f}s {level}: {text}")
            case ev.Metric(kind=kind, values=values):
                peer.metrics.append((kind, values))
            case ev.Finished(reason=reason):
                self.after(_S // 5, lambda: self.kill(peer, reason))  # what was sent still arrives

    def _later(self, peer: SimPeer, delay_ns: int, action: Callable[[], None]) -> None:
        life = peer.lives
        self.after(delay_ns, lambda: action() if peer.alive and peer.lives == life else None)

    def _train(self, peer: SimPeer, epoch: int, steps: int) -> None:
        assert peer.table is not None
        peer.table.state.buffers.delta[:] = self.delta_of(peer, epoch)
        self.feed(peer, ev.RoundDone(epoch, steps, 100 + peer.index, 1.0))

    def _compute(self, peer: SimPeer, job: int, op: str, arguments: tuple[Any, ...]) -> None:
        def work() -> None:
            assert peer.table is not None
            try:
                event = ev.ComputeDone(job, peer.table.run(op, arguments))
            except ProtocolViolation as violation:
                event = ev.ComputeDone(job, None, str(violation))
            self.feed(peer, event)

        self._later(peer, self.random.randint(100_000, 2_000_000), work)

    def _persisted(self, peer: SimPeer, record: int, kind: str, data: bytes) -> None:
        peer.disk.append((kind, data))
        self.feed(peer, ev.Persisted(record))

    def _send_frame(self, peer: SimPeer, frame: ev.SendFrame) -> None:
        event = ev.FrameIn(
            peer.peer_id, frame.kind, frame.tag, frame.chunk, frame.hop, frame.weight, frame.payload
        )
        if not self._transmit(peer, frame.peer, event, "data"):
            self._later(peer, 0, lambda: self.feed(peer, ev.LaneFailed(frame.peer, "no link")))

    def _transmit(self, peer: SimPeer, target: PeerId, event: ev.Event, lane: str) -> bool:
        """Deliver in order per direction and lane, if the link is still the same one then."""
        other = self._by_id(target)
        link = frozenset((peer.index, other.index))
        if link not in self._links:
            return False
        key = (peer.index * 2 + (lane == "data"), other.index)
        due = max(self.now_ns + self.random.randint(*self.delay_ns), self._lane_ready.get(key, 0) + 1)
        self._lane_ready[key] = due
        life = other.lives

        def deliver() -> None:
            if link in self._links and other.lives == life:
                self.feed(other, event)

        self.after(due - self.now_ns, deliver)
        return True

    def _later_dial(self, peer: SimPeer, target: PeerId) -> None:
        def dial() -> None:
            other = self._by_id(target)
            link = frozenset((peer.index, other.index))
            if link in self._cut or not other.alive:
                self.feed(peer, ev.DialFailed(target, "no answer"))
            elif link not in self._links:
                self._links.add(link)
                self.feed(peer, ev.LinkUp(target, self._address(other)))
                self.feed(other, ev.LinkUp(peer.peer_id, self._address(peer)))

        self._later(peer, self.random.randint(*self.delay_ns), dial)

    def _drop(self, link: frozenset[int], reason: str) -> None:
        if link not in self._links:
            return
        self._links.discard(link)
        ends = sorted(link)
        for index, other in (ends, ends[::-1]):
            self._tell_down(self.peers[index], self.peers[other].peer_id, reason)

    def _tell_down(self, peer: SimPeer, lost: PeerId, reason: str) -> None:
        self._later(peer, 1_000_000, lambda: self.feed(peer, ev.LinkDown(lost, reason)))

    def _by_id(self, peer_id: PeerId) -> SimPeer:
        return next(peer for peer in self.peers if peer.peer_id == peer_id)

    def _address(self, peer: SimPeer) -> tuple[str, ...]:
        return (f"10.0.0.{peer.index + 1}:7000",)
