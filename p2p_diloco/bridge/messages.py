"""Control messages between the peer process and its trainer ranks, and their framing.

A frame is a big-endian u32 length and a msgpack array ``[kind, field, field, ...]``. Decoding checks the
number of fields and the exact type and bounds of each one; anything else is a `ProtocolViolation`. The
peer sends *commands*, a rank sends *reports*. Tensors never travel here: they lie in `SharedState`.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import Any

import msgpack

from p2p_diloco.errors import InternalError, ProtocolViolation

CONTROL_LIMIT_BYTES = 64 * 1024
# A Hello carries the schema, which reaches megabytes for models with many thousands of tensors.
HELLO_LIMIT_BYTES = 4 * 1024 * 1024 + 1024
AREAS = ("anchor0", "anchor1", "momentum0", "momentum1", "delta")
TEXT_LIMIT = 8192

_HEADER = struct.Struct(">I")
_INT_LIMIT = 1 << 63


@dataclasses.dataclass(frozen=True)
class Attach:
    """Peer to rank; carries the shared file's descriptor. ``offsets``: byte offset of each of `AREAS`."""

    total_values: int
    offsets: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class WriteInitial:
    """Peer to rank: write the initial weights to anchor slot 0."""


@dataclasses.dataclass(frozen=True)
class Round:
    """Peer to rank: load the anchor of ``slot``, train up to ``steps`` inner steps, leave the delta.

    ``global_step`` counts the inner steps of the run before this round; ``shares_key`` decides which
    sequences are this peer's (hash of certificate and peer); ``evaluate`` asks for the anchor's held-out
    loss first.
    """

    epoch: int
    slot: int
    steps: int
    global_step: int
    shares_key: bytes
    evaluate: bool


@dataclasses.dataclass(frozen=True)
class StopEarly:
    """Peer to rank: end the round of ``epoch`` after the step under way (at least one is taken)."""

    epoch: int


@dataclasses.dataclass(frozen=True)
class Shutdown:
    """Peer to rank: end the process."""


@dataclasses.dataclass(frozen=True)
class Hello:
    """Rank to peer, first and once. ``schema`` is `Schema.to_bytes` on rank 0 and empty elsewhere."""

    rank: int
    ranks: int
    pid: int
    schema: bytes
    device: str


@dataclasses.dataclass(frozen=True)
class InitialWritten:
    """Rank to peer: this rank's part of anchor slot 0 is written."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Rank 0 to peer, some times a second. ``step`` counts from 1 in the round; ``loss`` is rank 0's
    training loss of that step; ``tokens`` counts the whole peer's tokens in this round so far."""

    epoch: int
    step: int
    global_step: int
    loss: float
    tokens: int
    tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class RoundDone:
    """Rank to peer: this rank's part of the delta is final. The peer hears the figures of rank 0, which
    are those of the whole peer: mean training ``loss``, held-out ``eval_loss`` of the anchor if asked for,
    mean gradient norm before clipping."""

    epoch: int
    steps: int
    tokens: int
    loss: float
    eval_loss: float | None
    grad_norm: float


@dataclasses.dataclass(frozen=True)
class Failed:
    """Rank to peer: why this rank is about to end (one line)."""

    text: str


Command = Attach | WriteInitial | Round | StopEarly | Shutdown
Report = Hello | InitialWritten | Progress | RoundDone | Failed
Control = Command | Report

_KINDS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        Attach,
        WriteInitial,
        Round,
        StopEarly,
        Shutdown,
        Hello,
        InitialWritten,
        Progress,
        RoundDone,
        Failed,
    )
}


def encode(message: Control) -> bytes:
    """The frame of ``message``; InternalError if it would exceed the receiver's limit."""
    values = [getattr(message, field.name) for field in dataclasses.fields(message)]
    body: bytes = msgpack.packb([type(message).__name__, *values], use_bin_type=True)
    limit = HELLO_LIMIT_BYTES if isinstance(message, Hello) else CONTROL_LIMIT_BYTES
    if len(body) > limit:
        raise InternalError(f"{type(message).__name__} of {len(body)} bytes exceeds {limit}")
    return _HEADER.pack(len(body)) + body


def decode(body: bytes) -> Control:
    """The message in one frame's body; raises ProtocolViolation for anything malformed."""
    try:
        data = msgpack.unpackb(
            body,
            raw=False,
            use_list=True,
            max_array_len=64,
            max_map_len=0,
            max_ext_len=0,
            max_bin_len=HELLO_LIMIT_BYTES,
            max_str_len=4 * TEXT_LIMIT,
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolViolation(f"control message is not msgpack: {type(error).__name__}") from None
    if not isinstance(data, list) or not data or not isinstance(data[0], str):
        raise ProtocolViolation("control message is not a list that starts with its kind")
    cls = _KINDS.get(data[0])
    if cls is None:
        raise ProtocolViolation(f"unknown control message {data[0][:40]!r}")
    fields = dataclasses.fields(cls)
    if len(data) != len(fields) + 1:
        raise ProtocolViolation(f"{data[0]} has {len(data) - 1} fields instead of {len(fields)}")
    values = [
        _check(f"{data[0]}.{field.name}", str(field.type), value)
        for field, value in zip(fields, data[1:], strict=True)
    ]
    message: Control = cls(*values)
    return message


def _check(where: str, kind: str, value: Any) -> Any:
    if kind == "tuple[int, ...]":
        if not isinstance(value, list):
            raise ProtocolViolation(f"{where} must be a list")
        return tuple(_check(where, "int", item) for item in value)
    if kind == "float | None" and value is None:
        return None
    wanted: type[Any] = {"int": int, "bytes": bytes, "bool": bool, "str": str}.get(kind, float)
    if type(value) is not wanted:
        raise ProtocolViolation(f"{where} must be {kind}")
    if wanted is int and not 0 <= value < _INT_LIMIT:
        raise ProtocolViolation(f"{where} must be in 0..2^63-1")
    if wanted is str and len(value) > TEXT_LIMIT:
        raise ProtocolViolation(f"{where} is longer than {TEXT_LIMIT} characters")
    return value


class FrameReader:
    """Splits a byte stream into messages; holds at most one unfinished frame.

    ``limit_bytes`` may be lowered once the large first message is through.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Control]:
        """Messages completed by ``data``; raises ProtocolViolation for a bad frame."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer)
            if length > self.limit_bytes:
                raise ProtocolViolation(f"control frame of {length} bytes exceeds {self.limit_bytes}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield decode(body)
