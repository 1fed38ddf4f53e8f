"""Links to other peers: accepting, dialling, HELLO, one control link per peer, data lanes on demand.

A peer is connected once both HELLOs are through and nobody refused. Of two dials that cross, the one by
the lower PeerId is kept. Every wait has a deadline, every queue an end; who floods, stalls or breaks the
framing loses its connection, with one log line that names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import (
    Blame,
    DialError,
    LinkLostError,
    NetworkError,
    P2PDilocoError,
    ProtocolViolation,
    RefusedByPeer,
)
from p2p_diloco.identity import Identity, PeerId, show
from p2p_diloco.net.connection import Connection, Counters
from p2p_diloco.net.link import Link
from p2p_diloco.net.tls import client_context, server_context
from p2p_diloco.wire.addresses import announced, split_address
from p2p_diloco.wire.framing import DataHeader, after_hello, before_hello, dialler_before_hello, on_lane
from p2p_diloco.wire.messages import Hello, Message, Refuse

logger = logging.getLogger(__name__)

_BOOTSTRAP_S = 60.0  # how long a newcomer may hold a bootstrap link (guess)
_LANE_PAUSE_S = 30.0  # before a lane that could not be dialled is tried again (guess)


@dataclass(frozen=True)
class LinkUp:
    """A control link is open. `observed_address`: the host that the other side was seen at."""

    peer: PeerId
    hello: Hello
    outbound: bool
    observed_address: str


@dataclass(frozen=True)
class LinkDown:
    peer: PeerId
    reason: str
    blame: Blame


@dataclass(frozen=True)
class Received:
    peer: PeerId
    message: Message


@dataclass(frozen=True)
class DataFrame:
    peer: PeerId
    header: DataHeader
    payload: bytes


LinkEvent = LinkUp | LinkDown | Received | DataFrame


class LinkManager:
    """All connections of one peer in one run. It can dial without having been started."""

    def __init__(
        self,
        identity: Identity,
        run_id: bytes,
        config: PeerConfig,
        hello: Callable[[str], Hello],
        judge: Callable[[Hello, PeerId], Refuse | None],
        on_event: Callable[[LinkEvent], None],
        max_payload_bytes: int,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        bootstrap_reply: Callable[[Message], Message | None] = lambda message: None,
    ) -> None:
        self.me = identity.peer_id
        self.config = config
        self.max_payload_bytes = max_payload_bytes
        self.wall_ms = wall_ms
        self.counters = Counters()
        self._hello, self._judge, self._on_event = hello, judge, on_event
        self._bootstrap_reply = bootstrap_reply
        self._client = client_context(run_id, identity)
        self._server_context = server_context(run_id, identity)
        self._server: asyncio.Server | None = None
        self._links: dict[PeerId, Link] = {}
        self._dialling: dict[PeerId, int] = {}
        self._pending = 0
        self._open = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._readable = asyncio.Event()
        self._readable.set()
        self._closing = False

    # --- life ---

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the bound port. OSError if the address cannot be bound."""
        self._server = await asyncio.start_server(self._accepted, host, port, backlog=128)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Flush good-byes for a moment, then close everything."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        links = list(self._links.values())
        await asyncio.gather(*(link.flush(0.5) for link in links))
        for link in links:
            self.drop(link, "we are leaving", "network", quiet=True)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that ends with the manager; a defect in it is logged with its history."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._reap)
        return task

    def _reap(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("task %s failed", task.get_name(), exc_info=task.exception())

    # --- accepting ---

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("peername")
        full = self._open >= self.config.max_connections
        if self._closing or full or self._pending >= self.config.max_pending:
            logger.warning("turned %s away: too many %s", address, "links" if full else "handshakes")
            writer.transport.abort()
            return
        self.spawn(self._greet(reader, writer), f"accept {address}")

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = writer.get_extra_info("peername")
        self._pending += 1
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self.config.timeouts.handshake_s):
                await writer.start_tls(self._server_context)
                connection = Connection(reader, writer, before_hello(), False, self.counters)
                hello = await self._expect_hello(connection)
        except (TimeoutError, OSError, ssl.SSLError, P2PDilocoError) as error:
            logger.warning("closed the connection from %s: %s", address, _words(error))
            writer.transport.abort()
            return
        finally:
            self._pending -= 1
        self._open += 1
        try:
            await self._serve_accepted(connection, hello)
        finally:
            self._open -= 1
            connection.close()

    async def _expect_hello(self, connection: Connection) -> Hello:
        message = await connection.read_frame()
        if not isinstance(message, Hello):
            raise ProtocolViolation("the first message was no HELLO")
        return message

    async def _serve_accepted(self, connection: Connection, hello: Hello) -> None:
        """Answer an accepted HELLO and stay with the connection until it ends."""
        peer, stall_s = connection.peer, self.config.timeouts.stall_s
        refusal = self._refusal(hello, peer)
        try:
            if refusal is not None:
                logger.info("refused peer %s (%s): %s", show(peer), refusal.code, refusal.text)
                await connection.send(refusal, stall_s)
                with contextlib.suppress(TimeoutError, NetworkError):
                    async with asyncio.timeout(1.0):
                        await connection.read_frame()  # let it read before the close
                return
            if hello.mode == "lane":
                link = self._links[peer]
                await connection.send(self._hello("lane"), stall_s)
                connection.limits = on_lane(self.max_payload_bytes)
                await self._read_lane(link, connection)
            elif hello.mode == "bootstrap":
                await connection.send(self._hello("bootstrap"), stall_s)
                await self._serve_bootstrap(connection)
            else:
                link = self._register(connection, hello)
                await connection.send(self._hello("full"), stall_s)
                await self._read_control(link)
        except (NetworkError, ProtocolViolation) as error:
            logger.info("%s connection of peer %s ended: %s", hello.mode, show(peer), error)

    def _refusal(self, hello: Hello, peer: PeerId) -> Refuse | None:
        if peer == self.me:
            return Refuse("self", "that is me")
        judged = self._judge(hello, peer)
        if judged is not None:
            return judged
        existing = self._links.get(peer)
        if hello.mode == "lane":
            return None if existing is not None else Refuse("lane", "no control link is open")
        if hello.mode == "full" and self._closing:
            return Refuse("full", "leaving")
        if hello.mode != "full":
            return None
        if existing is not None and existing.hello.nonce == hello.nonce and existing.fresh():
            return Refuse("duplicate", "a link is open already")
        if existing is None and self._dialling.get(peer, 0) and self.me < peer:
            return Refuse("duplicate", "our own dial is under way")
        return None

    async def _serve_bootstrap(self, connection: Connection) -> None:
        """A newcomer without a schema may ask a few things, for a minute."""
        connection.limits = before_hello()
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(asyncio.timeout(_BOOTSTRAP_S))
            for _ in range(8):
                message = await connection.read_frame()
                reply = None if isinstance(message, tuple) else self._bootstrap_reply(message)
                if reply is None:
                    raise ProtocolViolation("asked for something that a bootstrap link does not give")
                await connection.send(reply, self.config.timeouts.stall_s)

    # --- dialling ---

    async def dial(self, addresses: Sequence[str], expect: PeerId | None, mode: str = "full") -> PeerId:
        """Open a control link; addresses are tried together, the first good one wins.

        Returns the peer. Raises DialError if none answers in time, RefusedByPeer, or ProtocolViolation
        if another key than ``expect`` answers.
        """
        if expect is not None and expect in self._links:
            return expect
        if expect is not None:
            self._dialling[expect] = self._dialling.get(expect, 0) + 1
        try:
            connection, hello = await self._dial_any(addresses, expect, mode)
            if mode == "full" and connection.peer in self._links:
                connection.close()
                return connection.peer
            link = self._register(connection, hello)
            self.spawn(self._stay(link), f"link {show(connection.peer)}")
            return connection.peer
        except RefusedByPeer as refusal:
            if refusal.code == "duplicate" and expect is not None:
                return await self._await_link(expect)
            raise
        finally:
            if expect is not None:
                self._dialling[expect] -= 1
                if not self._dialling[expect]:
                    del self._dialling[expect]

    async def _await_link(self, peer: PeerId) -> PeerId:
        """The other side's dial won: wait for it to come through."""
        end = time.monotonic() + self.config.timeouts.handshake_s
        while peer not in self._links:
            if time.monotonic() > end:
                raise DialError(f"peer {show(peer)} said that a link is open, but none is")
            await asyncio.sleep(0.02)
        return peer

    async def _dial_any(
        self, addresses: Sequence[str], expect: PeerId | None, mode: str
    ) -> tuple[Connection, Hello]:
        loop = asyncio.get_running_loop()
        tries = {loop.create_task(self._dial_one(a, expect, mode)) for a in list(addresses)[:8]}
        errors: list[BaseException] = []
        try:
            while tries:
                done, tries = await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    error = task.exception()
                    if error is None:
                        return task.result()
                    errors.append(error)
        finally:
            for task in tries:
                task.cancel()
            for late in await asyncio.gather(*tries, return_exceptions=True):
                if isinstance(late, tuple):
                    late[0].close()
        for error in errors:
            if isinstance(error, RefusedByPeer | ProtocolViolation):
                raise error
        raise DialError("; ".join(_words(error) for error in errors) or "no address to dial")

    async def _dial_one(self, address: str, expect: PeerId | None, mode: str) -> tuple[Connection, Hello]:
        timeouts = self.config.timeouts
        writer: asyncio.StreamWriter | None = None
        try:
            host, port = split_address(address)
            async with asyncio.timeout(timeouts.dial_s):
                reader, writer = await asyncio.open_connection(host, port)
            async with asyncio.timeout(timeouts.handshake_s):
                await writer.start_tls(self._client)
                connection = Connection(reader, writer, dialler_before_hello(), True, self.counters)
                if expect is not None and connection.peer != expect:
                    raise ProtocolViolation(
                        f"peer {show(connection.peer)} answers at {address} instead of {show(expect)}"
                    )
                await connection.send(self._hello(mode), timeouts.stall_s)
                answer = await connection.read_frame()
            if isinstance(answer, Refuse):
                raise RefusedByPeer(answer.code, answer.text, answer.schema)
            if not isinstance(answer, Hello):
                raise ProtocolViolation("the answer to our HELLO was none")
            if mode == "full":
                refusal = self._judge(answer, connection.peer)
                if refusal is not None:
                    raise RefusedByPeer(refusal.code, refusal.text, refusal.schema)
        except BaseException as error:
            if writer is not None:
                writer.transport.abort()
            if isinstance(error, TimeoutError):
                raise DialError(f"{address}: no answer in time") from None
            if isinstance(error, OSError | ssl.SSLError | ValueError):
                raise DialError(f"{address}: {_words(error)}") from None
            raise
        connection.limits = (
            on_lane(self.max_payload_bytes) if mode == "lane" else after_hello(self.max_payload_bytes)
        )
        return connection, answer

    # --- links ---

    def _register(self, connection: Connection, hello: Hello) -> Link:
        old = self._links.get(connection.peer)
        if old is not None:
            self.drop(old, "the peer restarted or opened a new link", "network")
        connection.limits = after_hello(self.max_payload_bytes)
        link = Link(self, connection, hello)
        self._links[connection.peer] = link
        link.start()
        self._on_event(LinkUp(connection.peer, hello, connection.outbound, connection.host))
        return link

    async def _stay(self, link: Link) -> None:
        try:
            await self._read_control(link)
        except (NetworkError, ProtocolViolation) as error:
            logger.info("link to peer %s ended: %s", show(link.peer), error)

    async def _read_control(self, link: Link) -> None:
        """Hand on what comes until the link ends; whoever breaks a rule loses it."""
        try:
            while True:
                frame = await link.control.read_frame()
                if isinstance(frame, tuple):
                    await self._readable.wait()
                    self._on_event(DataFrame(link.peer, *frame))
                elif not link.own_business(frame):
                    link.account()
                    self._on_event(Received(link.peer, frame))
        except LinkLostError as error:
            self.drop(link, str(error), "network")
        except ProtocolViolation as error:
            logger.warning("closing the link to peer %s: %s", show(link.peer), error)
            self.drop(link, str(error), "remote")

    async def _read_lane(self, link: Link, lane: Connection) -> None:
        link.incoming.append(lane)
        try:
            while not link.down:
                frame = await lane.read_frame()
                await self._readable.wait()
                if isinstance(frame, tuple) and not link.down:
                    link.control.last_received_s = time.monotonic()
                    self._on_event(DataFrame(link.peer, *frame))
        except ProtocolViolation as error:
            logger.warning("closing the link to peer %s: %s", show(link.peer), error)
            self.drop(link, str(error), "remote")
        finally:
            link.incoming.remove(lane)

    def drop(self, link: Link, reason: str, blame: Blame, quiet: bool = False) -> None:
        """End a link and its lanes; LinkDown is emitted once."""
        if link.down:
            return
        link.down = True
        if self._links.get(link.peer) is link:
            del self._links[link.peer]
        link.close()
        if not quiet:
            self._on_event(LinkDown(link.peer, reason, blame))

    async def open_lane(self, link: Link) -> Connection | None:
        """A new data lane to a linked peer, or None if it cannot be dialled (data then uses the link)."""
        addresses = announced(link.hello.listen, link.control.host)
        if not addresses or time.monotonic() < link.no_lane_until_s:
            return None
        try:
            connection, _ = await self._dial_any(addresses, link.peer, "lane")
        except P2PDilocoError as error:
            logger.info("no data lane to peer %s (%s): using its control link", show(link.peer), error)
            link.no_lane_until_s = time.monotonic() + _LANE_PAUSE_S
            return None
        if link.down:
            connection.close()
            return None
        return connection

    # --- what the driver calls ---

    def peers(self) -> list[PeerId]:
        """Peers with an open control link, sorted."""
        return sorted(self._links)

    def send(self, peer: PeerId, message: Message) -> bool:
        """Queue a control message; False if there is no link. A queue that is full ends the link."""
        link = self._links.get(peer)
        return link is not None and link.queue(message)

    async def send_data(self, peer: PeerId, header: DataHeader, payload: bytes) -> None:
        """Send one data frame on the least busy lane; LinkLostError if it cannot be delivered."""
        link = self._links.get(peer)
        if link is None:
            raise LinkLostError(f"no link to peer {show(peer)}")
        await link.send_data(header, payload)

    def pause_data(self) -> None:
        """Stop reading data frames: the senders' windows fill, and they wait."""
        self._readable.clear()

    def resume_data(self) -> None:
        self._readable.set()

    def close(self, peer: PeerId, reason: str) -> None:
        """Close the link to a peer that broke a rule."""
        link = self._links.get(peer)
        if link is not None:
            self.drop(link, reason, "remote")

    def totals(self) -> tuple[int, int]:
        """Bytes sent and received on all connections so far."""
        return self.counters.sent, self.counters.received

    def clock_offset_s(self, peer: PeerId) -> float | None:
        """How far the peer's clock is ahead of ours, as last measured; only ever shown."""
        link = self._links.get(peer)
        return None if link is None else link.offset_s

    def rtt_s(self, peer: PeerId) -> float | None:
        """Last measured round trip."""
        link = self._links.get(peer)
        return None if link is None else link.rtt_s


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no handshake in time"
    return str(error) or type(error).__name__
