"""One peer's link: its control connection, its outgoing lanes, liveness, queue and clock offset."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from p2p_diloco.errors import LinkLostError, ProtocolViolation
from p2p_diloco.identity import show
from p2p_diloco.net.connection import Connection, Counters
from p2p_diloco.net.rates import RateMeter
from p2p_diloco.wire.framing import KINDS, DataHeader, pack_message
from p2p_diloco.wire.messages import Hello, Message, Ping, Pong, Refuse

if TYPE_CHECKING:
    from p2p_diloco.net.links import LinkManager

logger = logging.getLogger(__name__)

_QUEUE_BYTES = 4 << 20  # control messages waiting for one peer; more means that it does not read
# DESIGN 6 asks for 20 messages a second with bursts of 200. A chunk request per 8 MiB of state and the
# gossip of a ring that certifies each second need more; this still stops a flood (guess).
_RATE_PER_S, _BURST = 200.0, 2000.0
_CLOCK_WARN_S = 30.0  # offset of a peer's clock that is worth a warning (guess)
_LAST_WORDS_S = 0.25  # how long our reader may still find what came before the end (guess)
_LANE_IDLE_S = 60.0  # an unused lane is closed after this (guess)
MAX_INCOMING = 64  # lanes that one peer may open towards us; as many as the config allows to send on


class _Lane:
    """One outgoing data connection with its turn."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.turn = asyncio.Lock()
        self.waiting = 0
        self.retired = False


class Link:
    """Made by the manager once both HELLOs are through."""

    def __init__(self, manager: LinkManager, control: Connection, hello: Hello) -> None:
        self.control, self.hello = control, hello
        self.peer = control.peer
        self.down = False
        self._ended = asyncio.Event()
        self.incoming: list[Connection] = []
        self.paused = False  # our own consumer keeps us from reading the control connection
        self.control_bytes = Counters(parent=manager.counters)
        self.data_bytes = Counters(parent=manager.counters)
        self.meter = RateMeter()
        control.counters = self.control_bytes
        control.on_sent = self.meter.sent  # it carries ring frames as well where no lane can be dialled
        self.rtt_s: float | None = None
        self.offset_s: float | None = None
        self.no_lane_until_s = 0.0
        self._manager = manager
        self._timeouts = manager.config.timeouts
        self._lanes: list[_Lane] = []
        self._opening = asyncio.Lock()
        self._control_turn = asyncio.Lock()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._more = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._tokens, self._tokens_at_s = _BURST, time.monotonic()
        self._pings: dict[int, tuple[float, int]] = {}
        self._warned = False
        self._opened_s = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        name = show(self.peer)
        self._tasks = [self._manager.spawn(self._write_forever(), f"writer {name}")]
        if self.hello.mode == "full":
            self._tasks.append(self._manager.spawn(self._live_forever(), f"liveness {name}"))

    def fresh(self) -> bool:
        """True while a crossing dial may still be under way."""
        return time.monotonic() - self._opened_s < 2 * self._timeouts.handshake_s

    def close(self) -> None:
        """Close all connections of this link; nothing more is read, and what waits in the queue is lost."""
        self._ended.set()
        for task in self._tasks:
            task.cancel()
        self.control.close()
        for connection in [lane.connection for lane in self._lanes] + self.incoming:
            connection.abort()
        self._lanes.clear()
        self._queue.clear()
        self._empty.set()

    # --- control ---

    def queue(self, message: Message) -> bool:
        """Queue for the writer; a peer that lets 4 MiB pile up loses its link."""
        if self.down:
            return False
        data = pack_message(message)
        if self._queued_bytes + len(data) > _QUEUE_BYTES:
            self._manager.drop(self, "it does not read: too much is queued for it", "network")
            return False
        self._queue.append(data)
        self._queued_bytes += len(data)
        self._empty.clear()
        self._more.set()
        return True

    async def flush(self, timeout_s: float) -> None:
        """Wait a moment for the queue to empty."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            logger.info("left before peer %s had read everything", show(self.peer))

    async def _write_forever(self) -> None:
        try:
            while True:
                while not self._queue:
                    self._empty.set()
                    self._more.clear()
                    await self._more.wait()
                batch = b"".join(self._queue)
                self._queue.clear()
                async with self._control_turn:
                    await self.control.write(batch)
                self._queued_bytes -= len(batch)
        except LinkLostError as error:
            await self._end(str(error))

    async def _end(self, reason: str) -> None:
        """A writer, or a lane, found the other side gone. What that side said before, its good-bye above all,
        may be unread yet: the reader, which finds the end by itself then, has the last word for a moment."""
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._ended.wait()
        except TimeoutError:
            self._manager.drop(self, reason, "network")

    def own_business(self, message: Message) -> bool:
        """Answer what belongs to the link itself; False hands the message on. Raises ProtocolViolation."""
        if isinstance(message, Ping):
            self.queue(Pong(message.nonce, self._manager.wall_ms()))
            return True
        if isinstance(message, Pong):
            self._on_pong(message)
            return True
        if isinstance(message, Hello | Refuse):
            raise ProtocolViolation("a second HELLO on an open link")
        return False

    def account(self) -> None:
        """One more control message came; raises ProtocolViolation if they come too fast."""
        now = time.monotonic()
        self._tokens = min(_BURST, self._tokens + (now - self._tokens_at_s) * _RATE_PER_S)
        self._tokens_at_s = now
        self._tokens -= 1
        if self._tokens < 0:
            raise ProtocolViolation(f"more than {_RATE_PER_S:g} control messages a second")

    # --- liveness ---

    async def _live_forever(self) -> None:
        nonce, ping_s = 0, self._timeouts.ping_s
        while True:
            nonce += 1
            before_s = time.monotonic()
            self._pings = {nonce: (before_s, self._manager.wall_ms())}
            self.queue(Ping(nonce, self._manager.wall_ms()))
            await asyncio.sleep(ping_s)
            now_s = time.monotonic()
            self._retire_lanes(now_s)
            # Who was late himself (a busy loop, a suspended laptop) or does not read cannot judge others.
            if self.paused or now_s - before_s > 2 * ping_s:
                continue
            silent_s = now_s - max(c.last_received_s for c in (self.control, *self.incoming))
            if silent_s > self._timeouts.idle_s:
                self._manager.drop(self, f"silent for {silent_s:.0f} s", "network")
                return

    def _retire_lanes(self, now_s: float) -> None:
        for lane in list(self._lanes):
            if not lane.waiting and now_s - lane.connection.last_sent_s > _LANE_IDLE_S:
                self._retire(lane)
                lane.connection.close()

    def _retire(self, lane: _Lane) -> None:
        """Use it no more; that it ends is no loss then."""
        lane.retired = True
        if lane in self._lanes:
            self._lanes.remove(lane)

    def _on_pong(self, message: Pong) -> None:
        sent = self._pings.pop(message.nonce, None)
        if sent is None:
            return
        self.rtt_s = time.monotonic() - sent[0]
        middle_ms = sent[1] + self.rtt_s * 500
        self.offset_s = (message.wall_time_ms - middle_ms) / 1000
        if abs(self.offset_s) > _CLOCK_WARN_S and not self._warned:
            self._warned = True
            logger.warning(
                "the clock of peer %s is %+.1f s off ours (nothing depends on it)",
                show(self.peer),
                self.offset_s,
            )

    # --- data ---

    async def send_data(self, header: DataHeader, payload: bytes) -> None:
        """Write one data frame; LinkLostError if the lane or the link ends first.

        Cancelled in the middle of a frame it closes that connection, which would be of no use any more.
        """
        if KINDS[header.kind] == "state":  # several joiners share what we can send: that is no link's speed
            await self._send_on_some_lane(header, payload)
            return
        self.meter.begin()
        try:
            await self._send_on_some_lane(header, payload)
        finally:
            self.meter.end()

    async def _send_on_some_lane(self, header: DataHeader, payload: bytes) -> None:
        while True:
            lane = await self._choose_lane()
            if lane is None:
                async with self._control_turn:
                    try:
                        await self._write_whole(self.control, header, payload)
                    except asyncio.CancelledError:
                        self._manager.drop(self, "given up in the middle of a frame", "network")
                        raise
                return
            lane.waiting += 1
            try:
                async with lane.turn:
                    if lane.retired:
                        continue  # who wrote before us gave up and took the lane along
                    await self._write_on_lane(lane, header, payload)
                    return
            finally:
                lane.waiting -= 1

    async def _write_on_lane(self, lane: _Lane, header: DataHeader, payload: bytes) -> None:
        try:
            await self._write_whole(lane.connection, header, payload)
        except asyncio.CancelledError:
            self._retire(lane)
            lane.connection.close()  # earlier frames may still be on their way out
            raise

    async def _write_whole(self, connection: Connection, header: DataHeader, payload: bytes) -> None:
        try:
            await connection.write(header.pack())
            await connection.write(payload)
        except LinkLostError as error:
            await self._end(str(error))
            raise

    async def _watch_lane(self, lane: _Lane) -> None:
        """Notice at once when a lane ends. Frames that had just left on it may be lost without a word, so
        the whole link goes down then, which everybody above knows how to handle."""
        connection = lane.connection
        try:
            await connection.until_closed()
        except ProtocolViolation as error:
            logger.warning("closing the link to peer %s: %s", show(self.peer), error)
            self._manager.drop(self, str(error), "remote")
        if lane in self._lanes:
            self._lanes.remove(lane)
        if not lane.retired and not self.down:
            quiet_s = time.monotonic() - connection.last_sent_s
            if lane.waiting or quiet_s < self._timeouts.stall_s:
                await self._end("a data lane broke")
        connection.abort()

    async def _choose_lane(self) -> _Lane | None:
        """The least busy lane, opened if there is room for another; None: use the control connection."""
        idle = [lane for lane in self._lanes if not lane.waiting]
        if not idle and len(self._lanes) < self._manager.config.lanes:
            async with self._opening:
                if len(self._lanes) < self._manager.config.lanes:
                    connection = await self._manager.open_lane(self)
                    if connection is not None:
                        connection.counters = self.data_bytes
                        connection.on_sent = self.meter.sent
                        lane = _Lane(connection)
                        self._lanes.append(lane)
                        watch = self._watch_lane(lane)
                        watching = self._manager.spawn(watch, f"lane {show(self.peer)}")
                        self._tasks = [*(task for task in self._tasks if not task.done()), watching]
        if self.down:
            raise LinkLostError(f"the link to peer {show(self.peer)} is down")
        if not self._lanes:
            return None
        return min(self._lanes, key=lambda lane: lane.waiting)
