"""A peer's whole state: two slots of anchor and momentum, the delta, and who may read or write them when.

The *current* slot is certified and never written. The outer step goes into the other one (`begin_apply`,
`apply_chunk`), and `swap` makes it current once its root is certified; a joiner's fetched chunks go there
as well. Donors read the current slot, the other one while it is complete, or a copy that was set aside
for a joiner that was still reading when the slot had to be reused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.errors import InternalError, ProtocolViolation
from p2p_diloco.numerics.digest import leaf_hash, merkle_root
from p2p_diloco.numerics.int8 import Codec, ErrorStats
from p2p_diloco.numerics.layout import Layout
from p2p_diloco.numerics.outer import nesterov_update

Flat = NDArray[np.float32]
_MAX_ASIDE: Final = 1  # snapshots kept in extra memory for slow joiners (guess: one joiner's worth)
_SUB: Final = 64 * 1024  # values of one pass of the outer step; its five arrays stay in cache


class SnapshotGone(LookupError):  # noqa: N818 - it says what happened
    """The state with this root is not held (any more)."""


class Buffers(Protocol):
    """fp32 1-D areas of one length."""

    @property
    def anchor0(self) -> Flat: ...
    @property
    def anchor1(self) -> Flat: ...
    @property
    def momentum0(self) -> Flat: ...
    @property
    def momentum1(self) -> Flat: ...
    @property
    def delta(self) -> Flat: ...


@dataclass(frozen=True)
class StateBuffers:
    """Plain private memory, for peers whose trainer lives in the same process."""

    anchor0: Flat
    anchor1: Flat
    momentum0: Flat
    momentum1: Flat
    delta: Flat

    @classmethod
    def allocate(cls, total_values: int) -> StateBuffers:
        return cls(*(np.zeros(total_values, np.float32) for _ in range(5)))


@dataclass(frozen=True)
class DeltaCheck:
    """One chunk of the delta: whether it is finite, the first flat index that is not (-1), sum of
    squares, and its leaf hash."""

    finite: bool
    bad_index: int
    sum_squares: float
    leaf: bytes


@dataclass(frozen=True)
class Applied:
    """One chunk of the next state."""

    leaf: bytes
    payload_hash: bytes
    finite: bool


@dataclass
class _Slot:
    """One anchor with its momentum. `root` is set while every chunk of it is complete."""

    anchor: Flat
    momentum: Flat
    leaves: list[bytes]
    root: bytes = b""
    read: bool = False  # a joiner read from it since it stopped being the current one


class FlatState:
    """See the module's text. Chunk operations on different chunks may run in several threads at once."""

    def __init__(self, layout: Layout, codec: Codec, lr: float, mu: float, buffers: Buffers) -> None:
        self.layout, self.codec, self.buffers = layout, codec, buffers
        self._lr, self._mu = lr, mu
        none = [b""] * layout.chunks
        self._slots = (
            _Slot(buffers.anchor0, buffers.momentum0, list(none)),
            _Slot(buffers.anchor1, buffers.momentum1, list(none)),
        )
        self.slot = 0
        self.epoch = -1
        self._lock = threading.Lock()
        self._readers = 0
        self._no_readers = threading.Condition(self._lock)
        self._aside: OrderedDict[bytes, _Slot] = OrderedDict()
        self._stats = ErrorStats()
        self._wanted: list[bytes] = []
        self._wanted_root = b""

    # --- the certified state ---

    @property
    def root(self) -> bytes:
        """Merkle root of the current slot, 32 bytes; empty before `initialise` or an install."""
        return self._slots[self.slot].root

    @property
    def anchor(self) -> Flat:
        """The certified weights, fp32 [total_values]; do not write."""
        return self._slots[self.slot].anchor

    @property
    def momentum(self) -> Flat:
        """The certified outer momentum, fp32 [total_values]; do not write."""
        return self._slots[self.slot].momentum

    def initialise(self, epoch: int) -> None:
        """Take what lies in the current slot as the state of ``epoch`` and hash it."""
        slot = self._slots[self.slot]
        for chunk in range(self.layout.chunks):
            slot.leaves[chunk] = self._leaf(slot, chunk)
        slot.root = merkle_root(slot.leaves)
        self.epoch = epoch

    def _leaf(self, slot: _Slot, chunk: int) -> bytes:
        start, stop = self.layout.bounds(chunk)
        return leaf_hash(chunk, slot.anchor[start:stop], slot.momentum[start:stop])

    # --- our contribution ---

    def check_delta(self, chunk: int) -> DeltaCheck:
        """Look at one chunk of the delta before it is offered to others."""
        start, stop = self.layout.bounds(chunk)
        delta = self.buffers.delta[start:stop]
        good = np.isfinite(delta)
        if not good.all():
            return DeltaCheck(False, start + int(np.argmin(good)), 0.0, b"")
        squares = float(np.square(delta, dtype=np.float64).sum())
        return DeltaCheck(True, -1, squares, leaf_hash(chunk, delta))

    def first(self, chunk: int, weight: int) -> bytes:
        """Payload of our weighted delta: the start of a route."""
        return self.codec.first(self._delta(chunk), float(weight), self._stats)

    def hop(self, chunk: int, weight: int, payload: bytes) -> bytes:
        """Payload of what came plus our weighted delta; ProtocolViolation for a bad payload."""
        return self.codec.hop(payload, self._delta(chunk), float(weight), self._stats)

    def finish(self, chunk: int, weight: int, total_weight: int, payload: bytes) -> bytes:
        """Payload of the mean, by the chunk's owner; ProtocolViolation for a bad payload."""
        delta = self._delta(chunk)
        return self.codec.finish(payload, delta, float(weight), float(total_weight), self._stats)

    def single(self, chunk: int) -> bytes:
        """Payload of the mean of a ring of one."""
        return self.codec.single(self._delta(chunk), self._stats)

    def _delta(self, chunk: int) -> Flat:
        start, stop = self.layout.bounds(chunk)
        return self.buffers.delta[start:stop]

    def quantisation_error(self) -> float:
        """Relative error of what we encoded since `begin_apply`: root of lost over encoded energy."""
        return self._stats.relative()

    # --- the outer step into the copy ---

    def begin_apply(self) -> None:
        """Start (again) to fill the other slot from the current one."""
        self._clear_target()
        self._stats = ErrorStats()

    def apply_chunk(self, chunk: int, payload: bytes) -> Applied:
        """Outer step of one chunk from the current slot into the other, hashed while in cache. May be
        repeated: it always starts from the certified values. ProtocolViolation for a bad payload."""
        start, stop = self.layout.bounds(chunk)
        source, target = self._slots[self.slot], self._slots[1 - self.slot]
        mean = self.codec.decode(payload, stop - start)
        scratch = np.empty(min(_SUB, stop - start), np.float32)
        finite = True
        with np.errstate(over="ignore", invalid="ignore"):
            for low in range(start, stop, _SUB):
                high = min(low + _SUB, stop)
                new = target.anchor[low:high]
                part = mean[low - start : high - start]
                nesterov_update(
                    source.anchor[low:high],
                    source.momentum[low:high],
                    part,
                    self._lr,
                    self._mu,
                    new,
                    target.momentum[low:high],
                    scratch,
                )
                finite = finite and bool(np.isfinite(new).all())
        leaf = self._leaf(target, chunk)
        target.leaves[chunk] = leaf
        return Applied(leaf, leaf_hash(chunk, payload), finite)

    def next_root(self) -> bytes:
        """Root of the other slot; InternalError while a chunk of it is missing."""
        target = self._slots[1 - self.slot]
        if not target.root:
            if any(not leaf for leaf in target.leaves):
                raise InternalError("the copy is not complete")
            target.root = merkle_root(target.leaves)
        return target.root

    def swap(self, epoch: int | None = None) -> None:
        """Make the complete other slot the current one, as ``epoch`` (the next one by default)."""
        self.next_root()
        with self._lock:
            self._slots[self.slot].read = self._slots[1 - self.slot].read = False
            self.slot = 1 - self.slot
            self.epoch = self.epoch + 1 if epoch is None else epoch

    # --- serving ---

    def leaves_of(self, root: bytes) -> list[bytes]:
        """Leaf hashes of a state that is held; raises SnapshotGone."""
        with self._lock:
            slot = self._find(root)
            if slot is None:
                raise SnapshotGone(f"no state with root {root.hex()[:12]} is held")
            slot.read = True
            return list(slot.leaves)

    def read_chunk(self, root: bytes, chunk: int) -> bytes:
        """Anchor bytes, then momentum bytes of one chunk (8 bytes a value); raises SnapshotGone."""
        with self._lock:
            slot = self._find(root)
            if slot is None:
                raise SnapshotGone(f"no state with root {root.hex()[:12]} is held")
            slot.read = True
            self._readers += 1
        try:
            start, stop = self.layout.bounds(chunk)
            return slot.anchor[start:stop].tobytes() + slot.momentum[start:stop].tobytes()
        finally:
            with self._lock:
                self._readers -= 1
                self._no_readers.notify_all()

    def _find(self, root: bytes) -> _Slot | None:
        for slot in (*self._slots, *self._aside.values()):
            if root and slot.root == root:
                return slot
        return None

    def _clear_target(self) -> None:
        """Take the other slot for new content. If a joiner read from it lately it is copied aside first;
        a copy aside that nobody read since the last time is dropped."""
        with self._lock:
            target = self._slots[1 - self.slot]
            for root in [root for root, slot in self._aside.items() if not slot.read]:
                del self._aside[root]
            for slot in self._aside.values():
                slot.read = False
            if target.root and target.read:
                copy = _Slot(target.anchor.copy(), target.momentum.copy(), list(target.leaves), target.root)
                self._aside[target.root] = copy
                while len(self._aside) > _MAX_ASIDE:
                    self._aside.popitem(last=False)
            target.root = b""
            while self._readers:  # a reader holds a chunk for microseconds
                self._no_readers.wait()
            target.leaves[:] = [b""] * self.layout.chunks

    # --- installing a fetched state ---

    def install_begin(self, epoch: int, root: bytes, leaves: Sequence[bytes]) -> None:
        """Get ready to take the chunks of the state with this root into the other slot."""
        if merkle_root(leaves) != root:
            raise ProtocolViolation("the leaves do not hash to the certified root")
        self._clear_target()
        self._wanted, self._wanted_root = list(leaves), root

    def install_chunk(self, chunk: int, data: bytes) -> bool:
        """Take one chunk if it hashes to its leaf; False leaves everything as it was."""
        start, stop = self.layout.bounds(chunk)
        size = 4 * (stop - start)
        if len(data) != 2 * size:
            return False
        anchor = np.frombuffer(data, np.float32, stop - start)
        momentum = np.frombuffer(data, np.float32, stop - start, size)
        if leaf_hash(chunk, anchor, momentum) != self._wanted[chunk]:
            return False
        target = self._slots[1 - self.slot]
        target.anchor[start:stop] = anchor
        target.momentum[start:stop] = momentum
        target.leaves[chunk] = self._wanted[chunk]
        return True

    def install_finish(self) -> None:
        """Check the whole copy against the root once more (from memory, not from what was said)."""
        target = self._slots[1 - self.slot]
        leaves = [self._leaf(target, chunk) for chunk in range(self.layout.chunks)]
        if merkle_root(leaves) != self._wanted_root:
            raise InternalError("the installed state does not have the certified root")
        target.leaves[:] = leaves
        target.root, target.read = self._wanted_root, False
