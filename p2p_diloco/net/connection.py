"""One TLS connection with frames on it: bounded reads, bounded writes, byte counts."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_diloco.errors import LinkLostError, ProtocolViolation
from p2p_diloco.identity import PeerId, peer_id_of
from p2p_diloco.net.tls import peer_public_key
from p2p_diloco.wire.framing import (
    DATA,
    DATA_HEADER_BYTES,
    HEAD,
    DataHeader,
    Limits,
    pack_message,
)
from p2p_diloco.wire.messages import LARGE_BYTES, Message, decode

# Written between two looks at back-pressure, and what a transport may hold before writers wait. Together
# they bound memory, and the rate under which a slow connection counts as stalled (some 25 KB/s at 15 s).
_PIECE_BYTES = 128 << 10
_BUFFER_BYTES = 256 << 10


def abort(writer: asyncio.StreamWriter) -> None:
    """Drop a connection, whatever state it is in."""
    try:
        writer.transport.abort()
    except AttributeError:
        # A TLS transport of early Python 3.11 (3.11.2; 3.11.7 checks for it) that was closed twice has let go
        # of its protocol: nothing is left to abort.
        if not writer.transport.is_closing():
            raise


@dataclass
class Counters:
    """Bytes on the wire, frame headers included (TLS overhead is not); ``parent`` counts them too."""

    sent: int = 0
    received: int = 0
    parent: Counters | None = None

    def add(self, sent: int, received: int) -> None:
        """Count here and in all parents."""
        self.sent += sent
        self.received += received
        if self.parent is not None:
            self.parent.add(sent, received)


@dataclass(eq=False)
class Connection:
    """``limits`` change once HELLO is through. `peer` is the key that TLS proved the other side to hold.

    ``stall_s``: how long a frame under way may go without a byte, in either direction.
    ``gone``: done once the socket is closed.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    limits: Limits
    outbound: bool
    counters: Counters
    stall_s: float
    gone: asyncio.Future[None]
    peer: PeerId = field(init=False)
    host: str = field(init=False)
    last_received_s: float = field(default_factory=time.monotonic)
    last_sent_s: float = field(default_factory=time.monotonic)
    closed: bool = False
    on_sent: Callable[[int], None] | None = None  # told of what left

    def __post_init__(self) -> None:
        ssl_object: ssl.SSLObject | None = self.writer.get_extra_info("ssl_object")
        self.peer = peer_id_of(peer_public_key(ssl_object))
        name = self.writer.get_extra_info("peername") or ("?",)
        self.host = str(name[0])
        self.writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    async def read_frame(self) -> Message | tuple[DataHeader, bytes]:
        """The next frame; LinkLostError at the end of the stream, ProtocolViolation for a bad frame."""
        try:
            length, kind = HEAD.unpack(await self._read_head())
            self.limits.check(length, kind)
            if kind != DATA:
                return decode(await self._read(length), LARGE_BYTES)
            if length < DATA_HEADER_BYTES:
                raise ProtocolViolation("data frame is shorter than its header")
            header = DataHeader.unpack(await self._read(DATA_HEADER_BYTES), length)
            return header, await self._read(header.length)
        except TimeoutError:
            raise LinkLostError(f"no byte came for {self.stall_s:g} s in the middle of a frame") from None
        except OSError as error:
            raise LinkLostError(f"connection broken: {error}") from None

    async def _read_head(self) -> bytes:
        """The wait for a frame's first byte has no deadline here; liveness is the link's business."""
        first = await self.reader.read(HEAD.size)
        if not first:
            raise LinkLostError("the other side closed the connection")
        self._count(len(first))
        return first if len(first) == HEAD.size else first + await self._read(HEAD.size - len(first))

    async def _read(self, length: int) -> bytes:
        """Whatever has come is taken at once: memory grows with bytes received, never with bytes claimed,
        and any byte of a slow frame counts as life."""
        pieces: list[bytes] = []
        left, loop = length, asyncio.get_running_loop()
        renewed_s = loop.time()
        # One deadline for the frame, moved now and then: one for each piece costs more than reading it.
        async with asyncio.timeout(self.stall_s) as deadline:
            while left:
                piece = await self.reader.read(left)
                if not piece:
                    raise LinkLostError("the other side closed the connection in the middle of a frame")
                pieces.append(piece)
                left -= len(piece)
                self._count(len(piece))
                if (now_s := loop.time()) - renewed_s > self.stall_s / 16:
                    renewed_s = now_s
                    deadline.reschedule(now_s + self.stall_s)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _count(self, count: int) -> None:
        self.counters.add(0, count)
        self.last_received_s = time.monotonic()

    async def write(self, data: bytes) -> None:
        """Send bytes; LinkLostError if none leave for ``stall_s`` or the connection breaks."""
        view = memoryview(data)
        try:
            for start in range(0, len(data), _PIECE_BYTES):
                if self.closed or self.writer.transport.is_closing():
                    raise LinkLostError("the connection is closed")
                piece = view[start : start + _PIECE_BYTES]
                self.writer.write(piece)
                await self._drain()
                self.counters.add(len(piece), 0)
                if self.on_sent is not None:
                    self.on_sent(len(piece))
                self.last_sent_s = time.monotonic()
        except (OSError, RuntimeError) as error:  # RuntimeError: uvloop's word for a closed transport
            raise LinkLostError(f"connection broken: {error}") from None
        if self.closed:
            raise LinkLostError("the connection was closed before everything had left")

    async def _drain(self) -> None:
        if self.writer.transport.get_write_buffer_size() < _BUFFER_BYTES:
            return  # there is room for another piece
        while True:
            before = self.writer.transport.get_write_buffer_size()
            try:
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes as it completes.
                async with asyncio.timeout(self.stall_s):
                    await self.writer.drain()
                return
            except TimeoutError:
                if self.closed or self.writer.transport.get_write_buffer_size() >= before:
                    raise LinkLostError(f"no byte left for {self.stall_s:g} s") from None

    async def send(self, message: Message) -> None:
        """Send one control message."""
        await self.write(pack_message(message))

    async def until_closed(self) -> None:
        """On a connection that only we write to: returns when the other side closes or breaks it.

        Raises ProtocolViolation if it sends anything.
        """
        try:
            if await self.reader.read(1):
                raise ProtocolViolation("sent bytes on a lane that it only receives on")
        except OSError:
            return  # broken is closed; who was writing hears the reason

    def close(self) -> None:
        """Close once everything buffered has left; the transport gives up after two seconds."""
        if not self.closed:
            self.closed = True
            self.writer.close()

    def abort(self) -> None:
        """Drop the connection and whatever is buffered."""
        self.closed = True
        abort(self.writer)
