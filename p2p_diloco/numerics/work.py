"""The operations that the protocol asks of workers (`proto.events.Compute`), on one `FlatState`.

Each is a plain function of the state and its arguments, safe to run in a thread; the same table serves
the thread pool of a real peer and, inline, a simulator. Chunks are independent of each other; the protocol
sees to it that `begin`, `roots`, `swap` and the installs do not overlap with work on the same copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from p2p_diloco.errors import InternalError, ProtocolViolation
from p2p_diloco.numerics.digest import leaf_hash, merkle_root
from p2p_diloco.numerics.layout import Schema
from p2p_diloco.numerics.state import FlatState, SnapshotGone


class WorkTable:
    """``run(op, arguments)``; raises ProtocolViolation if remote bytes were at fault."""

    def __init__(self, state: FlatState, schema: Schema) -> None:
        self.state = state
        self.schema = schema
        self.delta_norm = 0.0
        self._wanted: tuple[bytes, ...] = ()  # leaf hashes of the payloads of the round being replayed
        self._table: dict[str, Callable[..., Any]] = {
            "check_delta": self._check_delta,
            "begin": state.begin_apply,
            "first": state.first,
            "hop": state.hop,
            "finish": self._finish,
            "single": self._single,
            "apply": self._apply,
            "roots": self._roots,
            "swap": self._swap,
            "install_begin": state.install_begin,
            "install_chunk": state.install_chunk,
            "install_finish": state.install_finish,
            "replay_begin": self._replay_begin,
            "replay_chunk": self._replay_chunk,
            "replay_finish": self._replay_finish,
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

    def _finish(self, chunk: int, weight: int, total_weight: int, payload: bytes) -> tuple[bytes, bytes]:
        """The mean's payload and its leaf hash."""
        mean = self.state.finish(chunk, weight, total_weight, payload)
        return mean, leaf_hash(chunk, mean)

    def _single(self, chunk: int) -> tuple[bytes, bytes]:
        mean = self.state.single(chunk)
        return mean, leaf_hash(chunk, mean)

    def _apply(self, chunk: int, payload: bytes) -> tuple[bytes, bytes, bool]:
        applied = self.state.apply_chunk(chunk, payload)
        return applied.payload_hash, applied.leaf, applied.finite

    def _roots(self, payloads: tuple[bytes, ...], leaves: tuple[bytes, ...]) -> tuple[bytes, bytes]:
        root = merkle_root(leaves)
        if self.state.next_root() != root:
            raise InternalError("the copy's root differs from the leaves that its chunks reported")
        return merkle_root(payloads), root

    def _replay_begin(self, epoch: int, root: bytes, hashes: tuple[bytes, ...]) -> None:
        """Get ready to take a finished round, named by the root over its payloads' hashes, into the copy."""
        if len(hashes) != self.state.layout.chunks or merkle_root(hashes) != root:
            raise ProtocolViolation(f"the leaves do not hash to the chunk root of epoch {epoch}")
        self.state.begin_apply()
        self._wanted = hashes

    def _replay_chunk(self, chunk: int, payload: bytes) -> bool:
        """Take the outer step of one chunk of that round; False if the payload is not the one."""
        if not 0 <= chunk < len(self._wanted) or leaf_hash(chunk, payload) != self._wanted[chunk]:
            return False
        self.state.apply_chunk(chunk, payload)
        return True

    def _replay_finish(self, state_root: bytes) -> None:
        """The copy must now be the state that the round was said to lead to."""
        if self.state.next_root() != state_root:
            raise ProtocolViolation("the round does not lead to the state that was voted for")

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


def replay(state: FlatState, epoch: int, state_root: bytes, payloads: Sequence[bytes]) -> bool:
    """Take a finished round from the current state to that of ``epoch``; False, with nothing changed, if
    the payloads do not lead to the state with this root."""
    if len(payloads) != state.layout.chunks:
        return False
    state.begin_apply()
    try:
        for chunk, payload in enumerate(payloads):
            state.apply_chunk(chunk, payload)
    except ProtocolViolation:
        return False
    if state.next_root() != state_root:
        return False
    state.swap(epoch)
    return True
