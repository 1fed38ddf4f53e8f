"""The operations that the protocol asks of workers (`proto.events.Compute`), on one `FlatState`.

Each is a plain function of the state and its arguments, safe to run in a thread; the same table serves
the thread pool of a real peer and, inline, a simulator. Chunks are independent of each other; the protocol
sees to it that `begin`, `roots`, `swap` and the installs do not overlap with work on the same copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from p2p_diloco.errors import InternalError, ProtocolViolation
from p2p_diloco.numerics.digest import merkle_root
from p2p_diloco.numerics.layout import Schema
from p2p_diloco.numerics.state import FlatState, SnapshotGone


class WorkTable:
    """``run(op, arguments)``; raises ProtocolViolation if remote bytes were at fault."""

    def __init__(self, state: FlatState, schema: Schema) -> None:
        self.state = state
        self.schema = schema
        self.delta_norm = 0.0
        self._table: dict[str, Callable[..., Any]] = {
            "check_delta": self._check_delta,
            "begin": self._begin,
            "first": state.first,
            "hop": state.hop,
            "finish": state.finish,
            "single": state.single,
            "apply": self._apply,
            "roots": self._roots,
            "swap": self._swap,
            "install_begin": state.install_begin,
            "install_chunk": state.install_chunk,
            "install_finish": state.install_finish,
            "read_leaves": self._read_leaves,
            "read_chunk": self._read_chunk,
        }

    def run(self, op: str, arguments: tuple[Any, ...]) -> Any:
        """Carry out one operation and return its result."""
        return self._table[op](*arguments)

    def _check_delta(self) -> tuple[str, bytes]:
        """Why the delta cannot be used ('' if it can) and its commitment (32 bytes)."""
        leaves: list[bytes] = []
        squares = 0.0
        for chunk in range(self.state.layout.chunks):
            check = self.state.check_delta(chunk)
            if not check.finite:
                where = self.schema.tensor_at(check.bad_index)
                return f"the delta is not finite or beyond all reason (first in {where})", bytes(32)
            squares += check.sum_squares
            leaves.append(check.leaf)
        self.delta_norm = squares**0.5
        return "", merkle_root(leaves)

    def _begin(self) -> None:
        self.state.begin_apply()

    def _apply(self, chunk: int, payload: bytes) -> tuple[bytes, bytes, bool]:
        applied = self.state.apply_chunk(chunk, payload)
        return applied.payload_hash, applied.leaf, applied.finite

    def _roots(self, payloads: tuple[bytes, ...], leaves: tuple[bytes, ...]) -> tuple[bytes, bytes]:
        root = merkle_root(leaves)
        if self.state.next_root() != root:
            raise InternalError("the copy's root differs from the leaves that its chunks reported")
        return merkle_root(payloads), root

    def _swap(self, root: bytes, epoch: int) -> None:
        if self.state.next_root() != root:
            raise InternalError("asked to swap in a copy that does not have the certified root")
        self.state.swap(epoch)

    def _read_leaves(self, root: bytes) -> list[bytes]:
        try:
            return list(self.state.leaves_of(root))
        except SnapshotGone as gone:
            raise ProtocolViolation(str(gone)) from None

    def _read_chunk(self, root: bytes, chunk: int) -> bytes:
        if not 0 <= chunk < self.state.layout.chunks:
            raise ProtocolViolation(f"chunk {chunk} does not exist")
        try:
            return self.state.read_chunk(root, chunk)
        except SnapshotGone as gone:
            raise ProtocolViolation(str(gone)) from None
