"""Runs one `PeerMachine` on sockets, workers, disk and trainer: effects out, events in.

Everything happens on one event loop. Events are handled one at a time in the order they came; an effect
never calls back into the machine directly. Whoever fails here is named: a bad peer loses its link, a
defect of ours ends the run loudly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from p2p_diloco.bridge.api import Trainer, TrainerDied, TrainerEvent
from p2p_diloco.bridge.messages import Progress, Round, RoundDone
from p2p_diloco.disk import RunFolder
from p2p_diloco.errors import LinkLostError, NetworkError, RefusedByPeer, RemoteError, TrainerError
from p2p_diloco.failpoints import Failpoints
from p2p_diloco.identity import PeerId, show
from p2p_diloco.net import links as net
from p2p_diloco.net.discovery import Discovery
from p2p_diloco.net.refusals import PASSING, explain_refusal
from p2p_diloco.net.workers import Workers
from p2p_diloco.numerics.work import WorkTable
from p2p_diloco.proto import events as ev
from p2p_diloco.proto.peer import PeerMachine
from p2p_diloco.wire.addresses import announced
from p2p_diloco.wire.framing import DataHeader
from p2p_diloco.wire.messages import Statement, Vote, decode_body

logger = logging.getLogger(__name__)

_KINDS = {"reduce": 1, "gather": 2, "state": 3}
_NAMES = {number: name for name, number in _KINDS.items()}
_DISCOVERY_PAUSE_S = 5.0  # between two looks into discovery (guess; a DHT read is cheap)
_QUEUE_HIGH, _QUEUE_LOW = 64, 16  # frames waiting for one peer before reading from others pauses


@dataclass
class Watcher:
    """Where the driver reports; the peer's status and metrics implement it, tests may use the default."""

    notice: Callable[[str, str], None] = lambda level, text: logger.log(
        {"info": 20, "warning": 30}.get(level, 40), "%s", text
    )
    metric: Callable[[str, dict[str, Any]], None] = lambda kind, values: None
    step: Callable[[Progress], None] = lambda progress: None
    round_done: Callable[[RoundDone], None] = lambda done: None


class Driver:
    """Owns the tasks of one peer. ``await run()`` returns why the peer ended, or raises what broke it."""

    def __init__(
        self,
        machine: PeerMachine,
        links: net.LinkManager,
        table: WorkTable,
        trainer: Trainer,
        discovery: Discovery,
        folder: RunFolder,
        watcher: Watcher | None = None,
        failpoints: Failpoints | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.machine = machine
        self.links = links
        self.table = table
        self.watcher = watcher or Watcher()
        self._trainer = trainer
        self._discovery = discovery
        self._folder = folder
        self._failpoints = failpoints or Failpoints("")
        self._clock_ns = clock_ns
        self.schema = table.schema
        config = machine.setup.peer
        self._config = config
        self._workers = Workers(table, config.workers, self._crash)
        self._inbox: deque[ev.Event] = deque()
        self._busy = False
        self._frames: dict[PeerId, asyncio.Queue[ev.SendFrame]] = {}
        self._senders: dict[PeerId, list[asyncio.Task[None]]] = {}
        self._paused = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._restarts = 0
        self._refusals: dict[tuple[PeerId, str], None] = {}
        self._stopping = False
        self.bytes_at_epoch = (0, 0)

    # --- life ---

    async def run(self) -> str:
        """Drive the peer until it has left; returns the reason. Cleans up in every case."""
        self._trainer.on_event = self._on_trainer
        self._spawn(self._tick_forever(), "tick")
        self._spawn(self._discover_forever(), "discovery")
        self.feed(ev.TrainerBack())
        try:
            return await self._outcome
        finally:
            await self._close()

    def leave(self, reason: str) -> None:
        """Ask the peer to say good-bye and end."""
        self.feed(ev.LeaveRequested(reason))

    def feed(self, event: ev.Event) -> None:
        """Hand one event to the machine (after those already waiting) and carry out what it asks."""
        self._inbox.append(event)
        if self._busy:
            return
        self._busy = True
        try:
            while self._inbox and not self._outcome.done():
                for effect in self.machine.handle(self._inbox.popleft(), self._clock_ns()):
                    self._carry_out(effect)
        except Exception as error:  # noqa: BLE001 - a defect of ours: end loudly, with everything closed
            self._crash(error)
        finally:
            self._busy = False
        self._wake.set()

    def _crash(self, error: BaseException) -> None:
        if not self._outcome.done():
            self._outcome.set_exception(error)

    async def _close(self) -> None:
        self._stopping = True
        for task in [*self._tasks, *(t for tasks in self._senders.values() for t in tasks)]:
            task.cancel()
        everything = [*self._tasks, *(t for tasks in self._senders.values() for t in tasks)]
        await asyncio.gather(*everything, return_exceptions=True)
        leave_s = self._config.timeouts.leave_s
        results = await asyncio.gather(
            self._trainer.stop(leave_s * 0.5),
            self.links.stop(),
            asyncio.wait_for(self._discovery.stop(), leave_s * 0.6),
            self._workers.close(),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                logger.warning("while closing: %s", result or type(result).__name__)
        self._folder.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)

    def _reap(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._crash(task.exception() or RuntimeError("task failed"))

    async def _tick_forever(self) -> None:
        while not self._stopping:
            self._wake.clear()
            now = self._clock_ns()
            wait_s = (self.machine.next_wake_ns(now) - now) / 1e9
            if wait_s > 0:
                with contextlib.suppress(TimeoutError):  # that the wait ran out is what a tick is
                    async with asyncio.timeout(wait_s):
                        await self._wake.wait()
                    continue  # something happened: the time to wait may have changed
            self.feed(ev.Tick())
            await asyncio.sleep(0)

    async def _discover_forever(self) -> None:
        run_id = self.machine.setup.genesis.run_id()
        while True:
            try:
                records = await self._discovery.find(run_id)
            except NetworkError as error:
                logger.info("discovery: %s", error)
                records = []
            now = self._clock_ns()
            for record in records:
                for effect in self.machine.members.learn(record.peer_id, record.addresses, now):
                    self._carry_out(effect)
            await asyncio.sleep(_DISCOVERY_PAUSE_S)

    # --- events from the links ---

    def on_link_event(self, event: net.LinkEvent) -> None:
        """The LinkManager's callback."""
        if self._stopping:
            return
        match event:
            case net.LinkUp(peer=peer, hello=hello, observed_address=observed):
                if hello.mode == "full":
                    self.feed(ev.LinkUp(peer, announced(hello.listen, observed)))
            case net.LinkDown(peer=peer, reason=reason):
                self._drop_senders(peer)
                self.feed(ev.LinkDown(peer, reason))
            case net.Received(peer=peer, message=message):
                self.feed(ev.Received(peer, message))
            case net.DataFrame(peer=peer, header=header, payload=payload):
                kind = _NAMES[header.kind]
                frame = ev.FrameIn(
                    peer, kind, header.tag, header.chunk, header.hop, header.weight, bytes(payload)
                )
                self.feed(frame)

    # --- effects ---

    def _carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peer=peer, message=message):
                if isinstance(message, Statement) and message.signed.kind == "view":
                    self._failpoints.hit("view", self.machine.chain.epoch + 1)
                self.links.send(peer, message)
                self._after_send(message)
            case ev.SendFrame():
                self._queue_frame(effect)
            case ev.Compute(job=job, op=op, arguments=arguments):
                self._compute(job, op, arguments)
            case ev.Persist(record=record, kind=kind, data=data):
                self._persist(record, kind, data)
            case ev.KeepRound():
                self._keep_round(effect)
            case ev.Dial(peer=peer, addresses=addresses):
                self._spawn(self._dial(peer, addresses), f"dial {show(peer)}")
            case ev.Close(peer=peer, reason=reason):
                logger.warning("closing the link to peer %s: %s", show(peer), reason)
                self.links.close(peer, reason)
            case ev.StartRound():
                self._start_round(effect)
            case ev.StopEarly(epoch=epoch):
                self._trainer.stop_early(epoch)
            case ev.Notice(level=level, text=text):
                self.watcher.notice(level, text)
            case ev.Metric(kind=kind, values=values):
                self._metric(kind, values)
            case ev.Finished(reason=reason):
                if not self._outcome.done():
                    self._outcome.set_result(reason)

    def _after_send(self, message: Any) -> None:
        if isinstance(message, Statement) and message.signed.public_key == self._own_key():
            if message.signed.kind == "ready":
                self._failpoints.hit("ready", self.machine.chain.epoch + 1)
            if message.signed.kind == "vote" and isinstance(decode_body("vote", message.signed.body), Vote):
                self._failpoints.hit("vote_sent", self.machine.chain.epoch + 1)

    def _own_key(self) -> bytes:
        return self.machine.statements.public_key

    def _compute(self, job: int, op: str, arguments: tuple[Any, ...]) -> None:
        if op == "roots":
            self._failpoints.hit("ring_done", self.machine.chain.epoch + 1)
        answer = lambda result, error: self.feed(ev.ComputeDone(job, result, error))  # noqa: E731
        self._workers.submit(op, arguments, answer)

    def _persist(self, record: int, kind: str, data: bytes) -> None:
        epoch = self.machine.chain.epoch + 1

        def answer(_: Any, error: str) -> None:
            if kind in ("vote", "convened", "promise"):
                self._failpoints.hit(f"{kind}_persisted", epoch)
            if kind == "certificate":
                self._failpoints.hit("certificate", epoch - 1)
            self.feed(ev.Persisted(record, error))

        self._workers.write(lambda: self._folder.append(kind, data), answer)

    def _keep_round(self, effect: ev.KeepRound) -> None:
        def answer(_: Any, error: str) -> None:
            self._failpoints.hit("round_kept", effect.epoch)
            self.feed(ev.Persisted(effect.record, error))

        write = lambda: self._folder.keep_round(effect.epoch, effect.state_root, effect.payloads)  # noqa: E731
        self._workers.write(write, answer)

    def _start_round(self, effect: ev.StartRound) -> None:
        slot = self.table.state.slot
        command = Round(
            effect.epoch, slot, effect.steps, effect.global_step, effect.shares_key, evaluate=True
        )
        self._trainer.start_round(command)

    def _metric(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "epoch":
            rates = self.links.take_rates()
            for peer, kbit_per_s in rates.items():
                self.feed(ev.RateMeasured(peer, kbit_per_s))
            sent, received = self.links.totals()
            before = self.bytes_at_epoch
            self.bytes_at_epoch = (sent, received)
            values = {
                **values,
                "bytes_sent": sent - before[0],
                "bytes_received": received - before[1],
                "quantisation_error": self.table.state.quantisation_error(),
                "delta_norm": self.table.delta_norm,
                "rates_kbit_per_s": {show(peer): rate for peer, rate in rates.items()},
            }
        self.watcher.metric(kind, values)

    # --- dialling and data ---

    async def _dial(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        try:
            await self.links.dial(addresses, peer)
        except (NetworkError, RemoteError) as error:
            if isinstance(error, RefusedByPeer) and error.code not in PASSING:
                self._tell_refusal(peer, error)
            logger.debug("dialling peer %s: %s", show(peer), error)
            self.feed(ev.DialFailed(peer, str(error)))

    def _tell_refusal(self, peer: PeerId, refusal: RefusedByPeer) -> None:
        """Say once per peer and kind why it will not have us."""
        if (peer, refusal.code) not in self._refusals:
            self._refusals[peer, refusal.code] = None
            why = explain_refusal(refusal, self.schema)
            self.watcher.notice("warning", f"peer {show(peer)} refuses us ({refusal.code}): {why}")

    def _queue_frame(self, frame: ev.SendFrame) -> None:
        epoch = self.machine.chain.epoch + 1
        if frame.kind in ("reduce", "gather"):
            self._failpoints.hit(frame.kind, epoch)
        queue = self._frames.get(frame.peer)
        if queue is None:
            queue = self._frames[frame.peer] = asyncio.Queue()
            loop = asyncio.get_running_loop()
            self._senders[frame.peer] = [
                loop.create_task(self._send_frames(frame.peer, queue), name=f"lane {show(frame.peer)}")
                for _ in range(self._config.lanes)
            ]
        queue.put_nowait(frame)
        self._balance()

    async def _send_frames(self, peer: PeerId, queue: asyncio.Queue[ev.SendFrame]) -> None:
        """One of the senders of a peer; there are as many as lanes."""
        while True:
            frame = await queue.get()
            self._balance()
            size = len(frame.payload)
            header = DataHeader(
                kind=_KINDS[frame.kind],
                chunk=frame.chunk,
                hop=frame.hop,
                weight=frame.weight,
                tag=frame.tag,
                length=size,
            )
            try:
                await self.links.send_data(peer, header, frame.payload)
            except LinkLostError as error:
                self.feed(ev.LaneFailed(peer, str(error)))

    def _balance(self) -> None:
        """Stop reading data while too much waits to be sent on: what comes in must go out again."""
        waiting = max((queue.qsize() for queue in self._frames.values()), default=0)
        if waiting > _QUEUE_HIGH and not self._paused:
            self._paused = True
            self.links.pause_data()
        elif waiting < _QUEUE_LOW and self._paused:
            self._paused = False
            self.links.resume_data()

    def _drop_senders(self, peer: PeerId) -> None:
        for task in self._senders.pop(peer, []):
            task.cancel()
        self._frames.pop(peer, None)
        self._balance()

    # --- the trainer ---

    def _on_trainer(self, event: TrainerEvent) -> None:
        if self._stopping:
            return
        match event:
            case Progress():
                self.watcher.step(event)
                steps = self.machine.setup.run.inner.steps
                self.feed(ev.RoundProgress(event.epoch, event.step, steps, event.loss, event.tokens_per_s))
            case RoundDone():
                self.watcher.round_done(event)
                self.feed(ev.RoundDone(event.epoch, event.steps, event.tokens, event.loss))
            case TrainerDied(text=text):
                self.feed(ev.TrainerLost(text.splitlines()[0] if text else "no reason given"))
                self.watcher.notice("error", f"the trainer died: {text}")
                self._spawn(self._restart_trainer(), "trainer restart")

    async def _restart_trainer(self) -> None:
        while True:
            self._restarts += 1
            if self._restarts > self._config.trainer_restarts:
                raise TrainerError(f"the trainer failed {self._restarts} times; giving up")
            tries = f"{self._restarts} of {self._config.trainer_restarts}"
            self.watcher.notice("warning", f"restarting the trainer (try {tries})")
            try:
                await self._trainer.start()
            except TrainerError as error:
                self.watcher.notice("error", f"the trainer did not start: {error}")
                continue
            self._trainer.attach(self.table.state.buffers)
            self.feed(ev.TrainerBack())
            return
