"""Links to other peers: accepting, dialling, HELLO, one control link per peer, data lanes on demand.

A peer is connected once both HELLOs are through and nobody refused. Of two dials that cross, the one by
the lower PeerId is kept. Every wait has a deadline, every queue an end; who floods, stalls or breaks the
framing loses its connection, with one log line that names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
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
from p2p_diloco.net.connection import Connection, Counters, abort
from p2p_diloco.net.link import MAX_INCOMING, Link
from p2p_diloco.net.sockets import accept_forever, connect, listen, secure
from p2p_diloco.net.tls import client_context, server_context
from p2p_diloco.wire.addresses import announced, split_address
from p2p_diloco.wire.framing import DataHeader, after_hello, before_hello, dialler_before_hello, on_lane
from p2p_diloco.wire.messages import Hello, Message, Refuse

logger = logging.getLogger(__name__)

_BOOTSTRAP_S = 60.0  # how long a newcomer may hold a bootstrap link (guess)
_LANE_PAUSE_S = 30.0  # before a lane that could not be dialled is tried again (guess)
_REFUSAL_READ_S = 1.0  # for the other side to read why it was refused (guess)
_FLUSH_S = 0.5  # for good-byes to leave when we stop (guess)


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


@dataclass(frozen=True)
class LinkStats:
    """One open link. Bytes are those of its control connection (with data frames that found no lane) and
    of its lanes in both directions; `rtt_s` and `clock_offset_s` are None until the first pong."""

    outbound: bool
    host: str
    control_sent: int
    control_received: int
    data_sent: int
    data_received: int
    rtt_s: float | None
    clock_offset_s: float | None


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
        self._listening: list[socket.socket] = []
        self._links: dict[PeerId, Link] = {}
        self._dialling: Counter[PeerId] = Counter()
        self._pending: Counter[str] = Counter()  # handshakes under way, by host
        self._bootstraps = 0
        self._plain: set[socket.socket] = set()  # accepted, TLS not begun
        self._connections: dict[Connection, None] = {}  # open ones past HELLO, both directions
        self._tasks: set[asyncio.Task[Any]] = set()
        self._readable = asyncio.Event()
        self._readable.set()
        self._closing = False

    # --- life ---

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the bound port. OSError if the address cannot be bound."""
        self._listening = await listen(host, port)
        for listening in self._listening:
            self.spawn(accept_forever(listening, self._accepted), "accept")
        return int(self._listening[0].getsockname()[1])

    async def stop(self) -> None:
        """Flush good-byes for a moment, then close everything: a second or so, no LinkDown, no task left."""
        self._closing = True
        links = list(self._links.values())
        await asyncio.gather(*(link.flush(_FLUSH_S) for link in links))
        # Control first, and lanes once the others have answered: the end of a lane must not overtake what we
        # said last, for whoever sees a lane break drops the whole link, unread messages and all.
        for link in links:
            link.control.close()
        if links:
            await asyncio.wait([link.control.gone for link in links], timeout=_FLUSH_S)
        for link in list(self._links.values()):
            self.drop(link, "we are leaving", "network", quiet=True)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for plain in [*self._listening, *self._plain]:
            plain.close()
        connections = list(self._connections)
        for connection in connections:
            connection.close()
        if connections:
            await asyncio.wait([connection.gone for connection in connections], timeout=_FLUSH_S)
        for connection in connections:
            connection.abort()
        await asyncio.gather(*(connection.gone for connection in connections))

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

    def _accepted(self, plain: socket.socket, host: str) -> None:
        pending = self._pending.total()
        # One host gets at most half of the places, so that it alone cannot shut everybody else out.
        crowded = pending >= self.config.max_pending or self._pending[host] > self.config.max_pending // 2
        full = len(self._connections) + pending >= self.config.max_connections
        if self._closing or full or crowded:
            logger.warning("turned %s away: too many %s", host, "connections" if full else "handshakes")
            plain.close()
            return
        self._pending[host] += 1
        self._plain.add(plain)
        self.spawn(self._greet(plain, host), f"greet {host}")

    async def _greet(self, plain: socket.socket, host: str) -> None:
        connection: Connection | None = None
        self._plain.discard(plain)
        try:
            async with asyncio.timeout(self.config.timeouts.handshake_s):
                connection = await self._secure(plain, server_side=True)
                hello = await connection.read_frame()
            if not isinstance(hello, Hello):
                raise ProtocolViolation("the first message was no HELLO")
        except (OSError, P2PDilocoError) as error:
            logger.warning("closed the connection from %s: %s", host, _words(error))
            if connection is not None:
                connection.abort()
            return
        except asyncio.CancelledError:
            if connection is not None:
                connection.abort()
            raise
        finally:
            self._pending -= Counter({host: 1})  # forgets the host at zero
        self._keep(connection)
        try:
            await self._serve_accepted(connection, hello)
        finally:
            connection.close()

    async def _secure(self, plain: socket.socket, server_side: bool) -> Connection:
        """TLS on a new socket. Raises OSError, or ProtocolViolation for a key that is no identity."""
        context = self._server_context if server_side else self._client
        timeouts = self.config.timeouts
        reader, writer, gone = await secure(plain, context, server_side, timeouts.handshake_s)
        limits = before_hello() if server_side else dialler_before_hello()
        try:
            return Connection(reader, writer, limits, not server_side, self.counters, timeouts.stall_s, gone)
        except ProtocolViolation:
            abort(writer)
            raise

    def _keep(self, connection: Connection) -> None:
        """Count a connection until its socket is gone, which can be a moment after we closed it."""
        self._connections[connection] = None
        connection.gone.add_done_callback(lambda _: self._connections.pop(connection))

    async def _serve_accepted(self, connection: Connection, hello: Hello) -> None:
        """Answer an accepted HELLO and stay with the connection until it ends."""
        peer = connection.peer
        refusal = self._refusal(hello, peer)
        try:
            if refusal is not None:
                logger.info("refused peer %s (%s): %s", show(peer), refusal.code, refusal.text)
                await connection.send(refusal)
                with contextlib.suppress(TimeoutError, NetworkError):
                    async with asyncio.timeout(_REFUSAL_READ_S):
                        await connection.read_frame()  # let it read before the close
            elif hello.mode == "lane":
                link = self._links[peer]
                await connection.send(self._hello("lane"))
                connection.limits = on_lane(self.max_payload_bytes)
                await self._read_lane(link, connection)
            elif hello.mode == "bootstrap":
                await connection.send(self._hello("bootstrap"))
                await self._serve_bootstrap(connection)
            else:
                await self._read_control(self._register(connection, hello))
        except (NetworkError, ProtocolViolation) as error:
            logger.info("%s connection of peer %s ended: %s", hello.mode, show(peer), error)

    def _refusal(self, hello: Hello, peer: PeerId) -> Refuse | None:
        if peer == self.me:
            return Refuse("self", "that is me")
        judged = self._judge(hello, peer)
        if judged is not None:
            return judged
        existing = self._links.get(peer)
        if self._closing:
            return Refuse("full", "leaving")
        if hello.mode == "lane":
            if existing is None:
                return Refuse("lane", "no control link is open")
            return Refuse("lane", "too many lanes") if len(existing.incoming) >= MAX_INCOMING else None
        if hello.mode == "bootstrap":
            crowded = self._bootstraps >= self.config.max_pending
            return Refuse("bootstrap", "too many newcomers at once") if crowded else None
        if existing is not None and existing.hello.nonce == hello.nonce and existing.fresh():
            return Refuse("duplicate", "a link is open already")
        if existing is None and self._dialling[peer] and self.me < peer:
            return Refuse("duplicate", "our own dial is under way")
        return None

    async def _serve_bootstrap(self, connection: Connection) -> None:
        """A newcomer without a schema may ask a few things, for a minute."""
        self._bootstraps += 1
        try:
            async with asyncio.timeout(_BOOTSTRAP_S):
                for _ in range(8):
                    message = await connection.read_frame()
                    reply = None if isinstance(message, tuple) else self._bootstrap_reply(message)
                    if reply is None:
                        raise ProtocolViolation("asked for something that a bootstrap link does not give")
                    await connection.send(reply)
        except TimeoutError:
            logger.info("closed the bootstrap link of peer %s: its time is up", show(connection.peer))
        finally:
            self._bootstraps -= 1

    # --- dialling ---

    async def dial(self, addresses: Sequence[str], expect: PeerId | None, mode: str = "full") -> PeerId:
        """Open a control link; addresses are tried together, the first good one wins.

        Returns the peer; at once if a link to ``expect`` is open. Raises DialError if none answers in time,
        RefusedByPeer, or ProtocolViolation if another key than ``expect`` answers.
        """
        if expect is not None and expect in self._links:
            return expect
        if expect is not None:
            self._dialling[expect] += 1
        try:
            connection, hello = await self._dial_any(addresses, expect, mode)
            peer = connection.peer
            if self._closing or peer in self._links:
                connection.close()
                if self._closing:
                    raise DialError("leaving")
                return peer
            link = self._register(connection, hello)
            self.spawn(self._read_control(link), f"link {show(peer)}")
            return peer
        except _LinkedMeanwhile as found:
            return found.peer
        except RefusedByPeer as refusal:
            if refusal.code == "duplicate" and expect is not None:
                return await self._await_link(expect)
            raise
        finally:
            if expect is not None:
                self._dialling -= Counter({expect: 1})

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
        winner: tuple[Connection, Hello] | None = None
        try:
            while tries and winner is None:
                done, tries = await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
                for outcome in await asyncio.gather(*done, return_exceptions=True):
                    if isinstance(outcome, BaseException):
                        errors.append(outcome)
                    elif winner is None:
                        winner = outcome
                    else:
                        outcome[0].abort()
        except asyncio.CancelledError:
            if winner is not None:
                winner[0].abort()
            raise
        finally:
            for task in tries:
                task.cancel()
            for late in await asyncio.gather(*tries, return_exceptions=True):
                if isinstance(late, tuple):
                    late[0].abort()
        if winner is not None:
            return winner
        for kind in (_LinkedMeanwhile, RefusedByPeer, ProtocolViolation):
            for error in errors:
                if isinstance(error, kind):
                    raise error
        for error in errors:
            if not isinstance(error, DialError | LinkLostError):
                raise error  # a defect, not the network
        raise DialError("; ".join(_words(error) for error in errors) or "no address to dial")

    async def _dial_one(self, address: str, expect: PeerId | None, mode: str) -> tuple[Connection, Hello]:
        timeouts = self.config.timeouts
        connection: Connection | None = None
        try:
            host, port = split_address(address)
            async with asyncio.timeout(timeouts.dial_s):
                plain = await connect(host, port)
            async with asyncio.timeout(timeouts.handshake_s):
                connection = await self._secure(plain, server_side=False)
                answer = await self._exchange_hello(connection, address, expect, mode)
        except (OSError, ValueError) as error:
            text = "no answer in time" if isinstance(error, TimeoutError) else _words(error)
            raise DialError(f"{address}: {text}") from None
        except LinkLostError as error:
            raise DialError(f"{address}: {error}") from None
        else:
            self._keep(connection)
            kept, connection = connection, None
            kept.limits = (on_lane if mode == "lane" else after_hello)(self.max_payload_bytes)
            return kept, answer
        finally:
            if connection is not None:
                connection.abort()

    async def _exchange_hello(
        self, connection: Connection, address: str, expect: PeerId | None, mode: str
    ) -> Hello:
        peer = connection.peer
        if peer == self.me and expect in (None, peer):
            raise RefusedByPeer("self", f"we ourselves answer at {address}")
        if expect is not None and peer != expect:
            raise ProtocolViolation(f"peer {show(peer)} answers at {address} instead of {show(expect)}")
        if mode == "full" and peer in self._links:
            raise _LinkedMeanwhile(peer)
        self._dialling[peer] += 1  # from HELLO on we are seen: an unexpected peer may be dialling us as well
        try:
            await connection.send(self._hello(mode))
            answer = await connection.read_frame()
        finally:
            self._dialling -= Counter({peer: 1})
        if isinstance(answer, Refuse):
            raise RefusedByPeer(answer.code, answer.text, answer.schema)
        if not isinstance(answer, Hello) or answer.mode != mode:
            raise ProtocolViolation("the answer to our HELLO does not fit it")
        refusal = self._judge(answer, peer) if mode == "full" else None
        if refusal is not None:
            raise RefusedByPeer(refusal.code, refusal.text, refusal.schema)
        return answer

    # --- links ---

    def _register(self, connection: Connection, hello: Hello) -> Link:
        old = self._links.get(connection.peer)
        if old is not None:
            self.drop(old, "the peer restarted or opened a new link", "network")
        connection.limits = after_hello(self.max_payload_bytes)
        link = Link(self, connection, hello)
        self._links[connection.peer] = link
        if not connection.outbound:
            link.queue(self._hello("full"))  # our answer: ahead of whatever the consumer sends on LinkUp
        link.start()
        self._on_event(LinkUp(connection.peer, hello, connection.outbound, connection.host))
        return link

    async def _read_control(self, link: Link) -> None:
        """Hand on what comes until the link ends; whoever breaks a rule loses it."""
        try:
            while True:
                frame = await link.control.read_frame()
                if isinstance(frame, tuple):
                    link.paused = True
                    await self._readable.wait()
                    link.paused = False
                    link.control.last_received_s = time.monotonic()  # we did not look before
                    self._hand_on(link, DataFrame(link.peer, *frame))
                else:
                    link.account()
                    if not link.own_business(frame):
                        self._hand_on(link, Received(link.peer, frame))
        except LinkLostError as error:
            if not link.down:
                logger.info("link to peer %s ended: %s", show(link.peer), error)
            self.drop(link, str(error), "network")
        except ProtocolViolation as error:
            logger.warning("closing the link to peer %s: %s", show(link.peer), error)
            self.drop(link, str(error), "remote")
        finally:
            self.drop(link, "nobody reads it any more", "ours")

    def _hand_on(self, link: Link, event: LinkEvent) -> None:
        """Nothing comes from a link after its LinkDown, even what had been read before."""
        if link.down:
            raise LinkLostError("it is down")
        self._on_event(event)

    async def _read_lane(self, link: Link, lane: Connection) -> None:
        if link.down:
            return  # it went down while we said HELLO
        link.incoming.append(lane)
        lane.counters = link.data_bytes
        try:
            while True:
                frame = await lane.read_frame()
                await self._readable.wait()
                if isinstance(frame, tuple):
                    self._hand_on(link, DataFrame(link.peer, *frame))
        except LinkLostError as error:
            logger.debug("lane from peer %s ended: %s", show(link.peer), error)
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
        if not (quiet or self._closing):
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
            connection.abort()
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

    def stats(self) -> dict[PeerId, LinkStats]:
        """Open links in order of their PeerId."""
        return {
            peer: LinkStats(
                link.control.outbound,
                link.control.host,
                link.control_bytes.sent,
                link.control_bytes.received,
                link.data_bytes.sent,
                link.data_bytes.received,
                link.rtt_s,
                link.offset_s,
            )
            for peer, link in sorted(self._links.items())
        }

    def take_rates(self) -> dict[PeerId, int]:
        """kbit/s of the links that held us up since the last call (`RateMeter`)."""
        found = {peer: link.meter.take_kbit_per_s() for peer, link in sorted(self._links.items())}
        return {peer: rate for peer, rate in found.items() if rate}

    def clock_offset_s(self, peer: PeerId) -> float | None:
        """How far the peer's clock is ahead of ours, as last measured; only ever shown."""
        link = self._links.get(peer)
        return None if link is None else link.offset_s

    def rtt_s(self, peer: PeerId) -> float | None:
        """Last measured round trip."""
        link = self._links.get(peer)
        return None if link is None else link.rtt_s


class _LinkedMeanwhile(Exception):  # noqa: N818 - not an error
    """While we dialled, the peer's own dial came through."""

    def __init__(self, peer: PeerId) -> None:
        super().__init__(f"a link to peer {show(peer)} is open")
        self.peer = peer


def _words(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no handshake in time"
    return str(error) or type(error).__name__
