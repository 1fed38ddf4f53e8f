"""Frames on a connection: ``u32 length, u8 class``, then the body. Lengths are judged before allocation.

Class 0 is a small control message, 1 a large one (certificates, chains, leaf lists), 2 tensor bytes behind
a fixed binary header: those never pass through msgpack. A lane carries only class 2.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.wire.messages import CONTROL_BYTES, HELLO_BYTES, LARGE_BYTES, Message, encode, is_large

HEAD: Final = struct.Struct("!IB")
SMALL, LARGE, DATA = 0, 1, 2
KINDS: Final = {1: "reduce", 2: "gather", 3: "state"}

_MAGIC: Final = 0xD170
_DATA: Final = struct.Struct("!HBBIHHQ32sI")  # magic, kind, flags, chunk, hop, reserved, weight, tag, length
DATA_HEADER_BYTES: Final = _DATA.size


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a body of each class may be on one connection; 0 refuses the class."""

    small: int
    large: int
    data: int

    def check(self, length: int, kind: int) -> None:
        """Raise ProtocolViolation if such a frame is not allowed; nothing was allocated for it yet."""
        allowed = {SMALL: self.small, LARGE: self.large, DATA: self.data}.get(kind)
        if allowed is None:
            raise ProtocolViolation(f"frame of unknown class {kind}")
        if length > allowed:
            raise ProtocolViolation(f"frame of {length} bytes where {allowed} are allowed")


def before_hello() -> Limits:
    """Until the other side has said HELLO."""
    return Limits(HELLO_BYTES, 0, 0)


def dialler_before_hello() -> Limits:
    """What the dialler accepts as the answer to its HELLO: a refusal may enclose a schema."""
    return Limits(CONTROL_BYTES, 0, 0)


def after_hello(max_payload_bytes: int) -> Limits:
    """On a control link."""
    return Limits(CONTROL_BYTES, LARGE_BYTES, DATA_HEADER_BYTES + max_payload_bytes)


def on_lane(max_payload_bytes: int) -> Limits:
    """On a data lane."""
    return Limits(0, 0, DATA_HEADER_BYTES + max_payload_bytes)


def pack_message(message: Message) -> bytes:
    """The whole frame of a control message."""
    body = encode(message)
    return HEAD.pack(len(body), LARGE if is_large(message) else SMALL) + body


@dataclass(frozen=True, slots=True)
class DataHeader:
    """In front of tensor bytes. ``kind``: 1 reduce, 2 gather, 3 state; ``tag``: 32 bytes, the view hash or
    the state root; ``weight``: what a partial sum carries; ``length``: payload bytes."""

    kind: int
    chunk: int
    hop: int
    weight: int
    tag: bytes
    length: int

    def pack(self) -> bytes:
        """The frame up to the payload."""
        head = HEAD.pack(_DATA.size + self.length, DATA)
        return head + _DATA.pack(
            _MAGIC, self.kind, 0, self.chunk, self.hop, 0, self.weight, self.tag, self.length
        )

    @classmethod
    def unpack(cls, data: bytes, frame_bytes: int) -> DataHeader:
        """Read the first `DATA_HEADER_BYTES` of a data frame's body; raises ProtocolViolation."""
        if len(data) != _DATA.size:
            raise ProtocolViolation("data frame is shorter than its header")
        magic, kind, flags, chunk, hop, reserved, weight, tag, length = _DATA.unpack(data)
        if magic != _MAGIC or flags or reserved or kind not in KINDS:
            raise ProtocolViolation("data frame has a malformed header")
        if length != frame_bytes - _DATA.size:
            raise ProtocolViolation(f"data frame claims {length} payload bytes and brings another number")
        return cls(kind, chunk, hop, weight, tag, length)
