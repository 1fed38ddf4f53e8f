"""One TLS connection with frames on it: bounded reads, bounded writes, byte counts."""

from __future__ import annotations

import asyncio
import ssl
import time
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

_PIECE_BYTES = 256 << 10  # written between two looks at back-pressure (guess)
_BUFFER_BYTES = 1 << 20  # a transport's write buffer above which writers wait (guess)


@dataclass
class Counters:
    """Bytes on the wire, frame headers included (TLS overhead is not)."""

    sent: int = 0
    received: int = 0


@dataclass
class Connection:
    """``limits`` change once HELLO is through. `peer` is the key that TLS proved the other side to hold."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    limits: Limits
    outbound: bool
    counters: Counters
    peer: PeerId = field(init=False)
    host: str = field(init=False)
    last_received_s: float = field(default_factory=time.monotonic)
    closed: bool = False

    def __post_init__(self) -> None:
        ssl_object: ssl.SSLObject | None = self.writer.get_extra_info("ssl_object")
        self.peer = peer_id_of(peer_public_key(ssl_object))
        name = self.writer.get_extra_info("peername") or ("?",)
        self.host = str(name[0])
        self.writer.transport.set_write_buffer_limits(high=_BUFFER_BYTES)

    async def read_frame(self) -> Message | tuple[DataHeader, bytes]:
        """The next frame; LinkLostError at the end of the stream, ProtocolViolation for a bad frame."""
        try:
            length, kind = HEAD.unpack(await self.reader.readexactly(HEAD.size))
            self.limits.check(length, kind)
            if kind != DATA:
                body = await self.reader.readexactly(length)
                self._count(HEAD.size + length)
                return decode(body, LARGE_BYTES)
            if length < DATA_HEADER_BYTES:
                raise ProtocolViolation("data frame is shorter than its header")
            header = DataHeader.unpack(await self.reader.readexactly(DATA_HEADER_BYTES), length)
            payload = await self._read_payload(header.length)
        except asyncio.IncompleteReadError as error:
            half = " in the middle of a frame" if error.partial else ""
            raise LinkLostError(f"the other side closed the connection{half}") from None
        except (OSError, ssl.SSLError) as error:
            raise LinkLostError(f"connection broken: {error}") from None
        return header, payload

    async def _read_payload(self, length: int) -> bytes:
        """In pieces, so that progress on a slow lane is seen as life."""
        pieces: list[bytes] = []
        left = length
        while left:
            piece = await self.reader.readexactly(min(left, _PIECE_BYTES))
            pieces.append(piece)
            left -= len(piece)
            self._count(len(piece))
        self._count(HEAD.size + DATA_HEADER_BYTES)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _count(self, count: int) -> None:
        self.counters.received += count
        self.last_received_s = time.monotonic()

    async def write(self, data: bytes, stall_s: float) -> None:
        """Send bytes; LinkLostError if none leave for ``stall_s`` or the connection breaks."""
        if self.closed:
            raise LinkLostError("the connection is closed")
        view = memoryview(data)
        try:
            for start in range(0, len(data), _PIECE_BYTES):
                self.writer.write(view[start : start + _PIECE_BYTES])
                await self._drain(stall_s)
        except (OSError, RuntimeError, ssl.SSLError) as error:
            raise LinkLostError(f"connection broken: {error}") from None
        self.counters.sent += len(data)

    async def _drain(self, stall_s: float) -> None:
        while True:
            before = self.writer.transport.get_write_buffer_size()
            try:
                # Not wait_for: in Python 3.11 it swallows a cancellation that comes as it completes.
                async with asyncio.timeout(stall_s):
                    await self.writer.drain()
                return
            except TimeoutError:
                if self.writer.transport.get_write_buffer_size() >= before:
                    raise LinkLostError(f"no byte left for {stall_s:g} s") from None

    async def send(self, message: Message, stall_s: float) -> None:
        """Send one control message."""
        await self.write(pack_message(message), stall_s)

    def close(self) -> None:
        """Close without waiting for what is still buffered on the other side."""
        if not self.closed:
            self.closed = True
            self.writer.close()

    def abort(self) -> None:
        """Drop the connection and whatever is buffered."""
        self.closed = True
        self.writer.transport.abort()
