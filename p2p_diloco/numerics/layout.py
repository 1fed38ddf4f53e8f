"""Schema, flat vector and chunks: the sizes that all peers share. No arrays here; the protocol reads it."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import msgpack

from p2p_diloco.errors import ProtocolViolation

MAX_SCHEMA_BYTES: Final = 4 << 20
MAX_TENSORS: Final = 100_000
MAX_VALUES: Final = 1 << 40
DTYPES: Final = ("float32", "bfloat16", "float16")

BLOCK: Final = 256  # values under one scale (DESIGN 2)
_LARGEST_CHUNK: Final = 1 << 20  # DESIGN 2
# Below this a hop costs more than its bytes (5 peers, 10^6 values, 2 cores: 0.6 s an epoch; 4096: 2.4 s).
_SMALLEST_CHUNK: Final = 16_384
_WANTED_CHUNKS: Final = 96  # 4 peers, 25 million values: 256 chunks took twice as long (docs/LOG.md)


@dataclass(frozen=True)
class TensorSpec:
    """Name, shape and dtype of one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{'x'.join(str(size) for size in self.shape) or 'scalar'} {self.dtype}"


@dataclass(frozen=True)
class Schema:
    """Ordered parameters; the flat vector is their fp32 concatenation in this order."""

    tensors: tuple[TensorSpec, ...]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First flat index of each tensor."""
        starts, position = [], 0
        for tensor in self.tensors:
            starts.append(position)
            position += tensor.values
        return tuple(starts)

    @cached_property
    def total_values(self) -> int:
        return sum(tensor.values for tensor in self.tensors)

    def to_bytes(self) -> bytes:
        """Canonical msgpack: a list of [name, shape, dtype]."""
        return bytes(msgpack.packb([[t.name, list(t.shape), t.dtype] for t in self.tensors]))

    @classmethod
    def from_bytes(cls, data: bytes) -> Schema:
        """Strictly read `to_bytes`; raises ProtocolViolation."""
        if len(data) > MAX_SCHEMA_BYTES:
            raise ProtocolViolation(f"schema of {len(data)} bytes where {MAX_SCHEMA_BYTES} are allowed")
        try:
            rows = msgpack.unpackb(
                data,
                raw=False,
                max_array_len=MAX_TENSORS,
                max_ext_len=0,
                max_map_len=0,
                list_hook=_ListBudget(),
            )
        except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
            raise ProtocolViolation(f"schema is not msgpack: {type(error).__name__}") from None
        if type(rows) is not list or len(rows) > MAX_TENSORS:
            raise ProtocolViolation(f"schema must be a list of at most {MAX_TENSORS} tensors")
        schema = cls(tuple(_tensor(row) for row in rows))
        if schema.total_values > MAX_VALUES:
            raise ProtocolViolation(f"schema has {schema.total_values} values where {MAX_VALUES} are allowed")
        if len({tensor.name for tensor in schema.tensors}) != len(schema.tensors):
            raise ProtocolViolation("schema names a tensor twice")
        if schema.to_bytes() != data:
            raise ProtocolViolation("schema is not in its canonical form")
        return schema

    def hash(self) -> bytes:
        """SHA-256 of `to_bytes`, 32 bytes."""
        return hashlib.sha256(b"p2p-diloco/schema\0" + self.to_bytes()).digest()

    def tensor_at(self, index: int) -> str:
        """Name of the tensor that holds this flat index."""
        if not 0 <= index < self.total_values:
            return "no tensor"
        place = bisect_right(self.offsets, index) - 1
        return self.tensors[place].name

    def first_difference(self, other: Schema) -> str:
        """Name the first tensor on which ours and the run's (``other``) differ; '' if they are equal."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=False):
            if mine.name != theirs.name:
                return f"tensor {mine.name} is here where the run has {theirs.name}"
            if mine != theirs:
                return f"tensor {mine.name} is {mine} here and {theirs} in the run"
        ours, all_theirs = len(self.tensors), len(other.tensors)
        if ours > all_theirs:
            return f"tensor {self.tensors[all_theirs].name} is here and not in the run"
        if ours < all_theirs:
            return f"tensor {other.tensors[ours].name} is in the run and not here"
        return ""


class _ListBudget:
    """Counts the lists of a schema while they are read: 4 MiB of one-byte empty lists would take some
    hundred MiB of memory before anyone looked at them."""

    def __init__(self) -> None:
        self._left = 2 * MAX_TENSORS + 1  # a row and a shape for each tensor, and the list of rows

    def __call__(self, items: list[Any]) -> list[Any]:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many lists")
        return items


def _tensor(row: Any) -> TensorSpec:
    if type(row) is not list or len(row) != 3:
        raise ProtocolViolation("a schema entry must be [name, shape, dtype]")
    name, shape, dtype = row
    if type(name) is not str or not 0 < len(name) <= 256 or not name.isprintable():
        raise ProtocolViolation("a tensor's name must be 1 to 256 printable characters")
    sizes = type(shape) is list and len(shape) <= 8
    if not sizes or any(type(size) is not int or not 0 <= size <= MAX_VALUES for size in shape):
        raise ProtocolViolation(f"tensor {name} has an impossible shape")
    if dtype not in DTYPES:
        raise ProtocolViolation(f"tensor {name} has a dtype that is none of {', '.join(DTYPES)}")
    return TensorSpec(name, tuple(shape), dtype)


@dataclass(frozen=True)
class Layout:
    """How the flat vector is cut into chunks; the last one may be shorter."""

    total_values: int
    chunk_values: int

    @classmethod
    def choose(cls, total_values: int, configured: int = 0) -> Layout:
        """``configured`` values a chunk, or (0) 2^20, less for models that would have under a hundred."""
        if configured:
            return cls(total_values, configured)
        wanted = -(-total_values // _WANTED_CHUNKS)
        rounded = -(-wanted // BLOCK) * BLOCK
        return cls(total_values, max(_SMALLEST_CHUNK, min(_LARGEST_CHUNK, rounded)))

    @property
    def chunks(self) -> int:
        return -(-self.total_values // self.chunk_values)

    def bounds(self, chunk: int) -> tuple[int, int]:
        """First flat index of a chunk and the one after its last."""
        start = chunk * self.chunk_values
        return start, min(start + self.chunk_values, self.total_values)

    def values(self, chunk: int) -> int:
        start, stop = self.bounds(chunk)
        return stop - start
