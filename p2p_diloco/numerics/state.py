"""A peer's whole state: two slots of anchor and momentum, the delta, and who may read or write them when.

The *current* slot is certified and never written. The outer step goes into the other one (`begin_apply`,
`apply_chunk`), and `swap` makes it current once its root is certified; a joiner's fetched chunks go there
as well. Donors read the current slot, the other one while it is complete, or a copy that was set aside
for a joiner that was still reading when the slot had to be reused.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.errors import InternalError, ProtocolViolation
from p2p_diloco.numerics.digest import leaf_hash, merkle_root
from p2p_diloco.numerics.int8 import Codec, ErrorStats
from p2p_diloco.numerics.layout import Layout
from p2p_diloco.numerics.outer import nesterov_update

Flat = NDArray[np.float32]
_MAX_ASIDE: Final = 1  # snapshots kept in extra memory for slow joiners (guess: one joiner's worth)
_SUB: Final = 64 * 1024  # values of one pass of the outer step; its arrays stay in cache
# No sum of 2^7 peers' deltas under this bound, each times a weight of at most 2^40, overflows fp32; so who
# meets an overflow in a ring knows that it is not an honest neighbour's doing.
LARGEST_DELTA: Final = np.float32(2.0**80)
_SAFE_SQUARES: Final = 1e-20  # above it, what single squares lost to underflow does not show
_LARGEST: Final = np.finfo(np.float32).max
_DRAIN_S: Final = 30.0  # a reader or writer holds one chunk, so for milliseconds


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
    """One chunk of the delta: whether it is finite and within `LARGEST_DELTA`, the first flat index that is
    not (-1), the sum of squares, and the leaf hash (empty if not finite)."""

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


def _within(x: Flat, bound: np.float32) -> bool:
    """True if no value is NaN or beyond ``bound``: two reductions, and no array of answers."""
    return not x.size or bool(x.max() <= bound and x.min() >= -bound)


def _sum_squares(x: Flat, scratch: Flat) -> float:
    """Sum of squares in fp32, pairwise; in fp64 where that overflows or loses everything. For people only."""
    with np.errstate(over="ignore", under="ignore"):
        squares = np.multiply(x, x, out=scratch[: x.size])
        total = float(squares.sum())
    if np.isfinite(total) and total > _SAFE_SQUARES:
        return total
    return float(np.square(x, dtype=np.float64).sum())


@dataclass
class _Slot:
    """One anchor with its momentum. `root` is set while every chunk of it is complete."""

    anchor: Flat
    momentum: Flat
    leaves: list[bytes]
    root: bytes = b""
    read: bool = False  # a joiner read from it since it stopped being the current one
    users: int = 0  # chunk reads, or chunk writes, under way


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
        self._unused = threading.Condition(self._lock)
        self._clearing = threading.Lock()  # one `begin_apply` or `install_begin` at a time
        self._filling: Literal["", "apply", "install"] = ""  # what goes into the other slot
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
        slot.root = b""
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
        squares = 0.0
        scratch = np.empty(min(_SUB, stop - start), np.float32)
        for low in range(start, stop, _SUB):
            part = self.buffers.delta[low : min(low + _SUB, stop)]
            if not _within(part, LARGEST_DELTA):
                good = np.abs(part) <= LARGEST_DELTA  # False for NaN as well
                return DeltaCheck(False, low + int(np.argmin(good)), 0.0, b"")
            squares += _sum_squares(part, scratch)
        return DeltaCheck(True, -1, squares, leaf_hash(chunk, self._delta(chunk)))

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

    def begin_apply(self, keep: Sequence[int] = ()) -> tuple[int, ...]:
        """Start (again) to fill the other slot from the current one. Chunks in ``keep`` that an unfinished
        fill of the same kind has written stay; returns which those are."""
        with self._clearing:
            target = self._slots[1 - self.slot]
            again = self._filling == "apply"
            kept = {chunk: target.leaves[chunk] for chunk in keep if again and target.leaves[chunk]}
            self._clear_target()
            for chunk, leaf in kept.items():
                target.leaves[chunk] = leaf
            self._filling = "apply"
            self._stats = ErrorStats()
            return tuple(sorted(kept))

    def apply_chunk(self, chunk: int, payload: bytes) -> Applied:
        """Outer step of one chunk from the current slot into the other, hashed while in cache. May be
        repeated: it always starts from the certified values. ProtocolViolation for a bad payload, which
        leaves the chunk missing; InternalError without a `begin_apply`."""
        start, stop = self.layout.bounds(chunk)
        source = self._slots[self.slot]
        read = self.codec.reader(payload, stop - start)
        with self._writing("apply") as target:
            if target is None:
                raise InternalError("an outer step without a begin")
            _require_denormals()
            target.leaves[chunk] = b""
            finite = True
            means, scratch = np.empty((2, min(_SUB, stop - start)), np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                for low in range(start, stop, _SUB):
                    high = min(low + _SUB, stop)
                    mean, new = means[: high - low], target.anchor[low:high]
                    read(low - start, high - start, mean)
                    nesterov_update(
                        source.anchor[low:high],
                        source.momentum[low:high],
                        mean,
                        self._lr,
                        self._mu,
                        new,
                        target.momentum[low:high],
                        scratch,
                    )
                    finite = finite and _within(new, _LARGEST)
            leaf = target.leaves[chunk] = self._leaf(target, chunk)
        return Applied(leaf, leaf_hash(chunk, payload), finite)

    def next_root(self) -> bytes:
        """Root of the other slot; InternalError while a chunk of it is missing."""
        with self._lock:
            target = self._slots[1 - self.slot]
            if not target.root:
                if target.users or not all(target.leaves):
                    raise InternalError("the copy is not complete")
                target.root = merkle_root(target.leaves)
            return target.root

    def swap(self, epoch: int | None = None) -> None:
        """Make the complete other slot the current one, as ``epoch`` (the next one by default)."""
        self.next_root()
        with self._lock:
            self._slots[self.slot].read = self._slots[1 - self.slot].read = False
            self._filling = ""
            self.slot = 1 - self.slot
            self.epoch = self.epoch + 1 if epoch is None else epoch

    # --- serving ---

    def leaves_of(self, root: bytes) -> list[bytes]:
        """Leaf hashes of a state that is held; raises SnapshotGone."""
        with self._lock:
            slot = self._find(root)
            slot.read = True
            return list(slot.leaves)

    def read_chunk(self, root: bytes, chunk: int) -> bytes:
        """Anchor bytes, then momentum bytes of one chunk (8 bytes a value); raises SnapshotGone. The slot is
        not reused before the read is over, so the bytes are never torn."""
        with self._lock:
            slot = self._find(root)
            slot.read = True
            slot.users += 1
        try:
            start, stop = self.layout.bounds(chunk)
            return slot.anchor[start:stop].tobytes() + slot.momentum[start:stop].tobytes()
        finally:
            self._release(slot)

    def _find(self, root: bytes) -> _Slot:
        for slot in (*self._slots, *self._aside.values()):
            if root and slot.root == root:
                return slot
        raise SnapshotGone(f"no state with root {root.hex()[:12]} is held")

    def _release(self, slot: _Slot) -> None:
        with self._lock:
            slot.users -= 1
            self._unused.notify_all()

    def _wait_unused(self, slot: _Slot) -> None:
        """With the lock held and after whatever lets nobody new in."""
        if not self._unused.wait_for(lambda: not slot.users, _DRAIN_S):
            raise InternalError(f"a chunk of the state has been in use for {_DRAIN_S:.0f} s")

    @contextmanager
    def _writing(self, what: Literal["apply", "install"]) -> Iterator[_Slot | None]:
        """The other slot, open for writing one chunk; None if it is not being filled in this way."""
        with self._lock:
            target = self._slots[1 - self.slot]
            allowed = self._filling == what
            if allowed and target.root:  # complete, and now not any more
                target.root = b""
                self._wait_unused(target)
            if allowed:
                target.users += 1
        if not allowed:
            yield None
            return
        try:
            yield target
        finally:
            self._release(target)

    def _clear_target(self) -> None:
        """Take the other slot for new content. If a joiner read from it lately it is copied aside first;
        a copy aside that nobody read since the last time is dropped."""
        with self._lock:
            self._filling = ""
            target = self._slots[1 - self.slot]
            for root in [root for root, slot in self._aside.items() if not slot.read]:
                del self._aside[root]
            for slot in self._aside.values():
                slot.read = False
            keep = bool(target.root) and target.read
            if keep:  # make room first: at most one copy's worth of extra memory
                while len(self._aside) >= _MAX_ASIDE:
                    self._aside.popitem(last=False)
        # Nobody writes a complete slot, so the copy needs no lock and readers go on meanwhile.
        copy = None
        if keep:
            copy = _Slot(target.anchor.copy(), target.momentum.copy(), list(target.leaves), target.root)
        with self._lock:
            if copy is not None:
                self._aside[copy.root] = copy
            target.root, target.read = b"", False
            self._wait_unused(target)
            target.leaves[:] = [b""] * self.layout.chunks

    # --- installing a fetched state ---

    def install_begin(self, epoch: int, root: bytes, leaves: Sequence[bytes]) -> None:
        """Get ready to take the chunks of the state with this root into the other slot. May be repeated, for
        this state or another. ProtocolViolation if the leaves do not belong to the root."""
        if len(leaves) != self.layout.chunks or any(len(leaf) != 32 for leaf in leaves):
            raise ProtocolViolation(f"not a list of {self.layout.chunks} leaves of 32 bytes")
        if merkle_root(leaves) != root:
            raise ProtocolViolation(f"the leaves do not hash to the certified root of epoch {epoch}")
        with self._clearing:
            self._clear_target()
            self._wanted, self._wanted_root = list(leaves), root
            self._filling = "install"

    def install_chunk(self, chunk: int, data: bytes) -> bool:
        """Take one chunk (anchor bytes, then momentum bytes) if it hashes to its leaf. False leaves
        everything as it was; also if no install is under way."""
        if not 0 <= chunk < self.layout.chunks:
            return False
        start, stop = self.layout.bounds(chunk)
        size = 4 * (stop - start)
        if len(data) != 2 * size:
            return False
        with self._writing("install") as target:
            if target is None or leaf_hash(chunk, data) != self._wanted[chunk]:
                return False
            target.anchor[start:stop] = np.frombuffer(data, "<f4", stop - start)
            target.momentum[start:stop] = np.frombuffer(data, "<f4", stop - start, size)
            target.leaves[chunk] = self._wanted[chunk]
        return True

    def install_finish(self) -> None:
        """Check the whole copy against the root once more (from memory, not from what was said); it is then
        ready for `swap`. InternalError if it differs, ProtocolViolation if it was certified not finite."""
        with self._writing("install") as target:
            if target is None or not all(target.leaves):
                raise InternalError("the installed state is not complete")
            for chunk in range(self.layout.chunks):
                if self._leaf(target, chunk) != self._wanted[chunk]:
                    raise InternalError("the installed state does not have the certified root")
                start, stop = self.layout.bounds(chunk)
                for area in (target.anchor[start:stop], target.momentum[start:stop]):
                    if not np.isfinite(area).all():
                        raise ProtocolViolation("the certified state holds a value that is not finite")
            with self._lock:
                target.root, target.read = self._wanted_root, False


def _require_denormals() -> None:
    """A thread that flushes denormal numbers to zero (a library built for fast mathematics may switch that
    on) would give other bits than everybody else once a momentum has decayed far enough."""
    if not np.multiply(np.full(1, 2.0**-126, np.float32), np.float32(0.5))[0] > 0:
        raise InternalError("denormal numbers are flushed to zero in this thread: replicas would differ")
