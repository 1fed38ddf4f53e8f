"""The wire codec: int8 with one fp32 absmax scale per block of 256 values, sums in fp32.

A payload is the blocks' scales (fp32, little-endian) and then the codes (int8, the last block partial).
Work goes in sub-blocks that fit the cache, through single operations (numpy's, and two of torch's where a
thread chose them, see `kernels`) in a fixed order, so every CPU and every thread count gives the same bits.
Kind ``fp32`` sends the values as they are, for tests of exactness; its payload is little-endian fp32.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.numerics.kernels import chosen
from p2p_diloco.numerics.layout import BLOCK

Flat = NDArray[np.float32]
_SUB: Final = 128 * 1024  # values handled at a time: two arrays of 512 KiB, in a core's L2 cache
_SAMPLE: Final = 16 * BLOCK  # values of each call that `ErrorStats` looks at
# A scale below the smallest normal number has no finite inverse on all CPUs: such a block becomes zeros.
_SMALLEST_SCALE: Final = np.float32(2.0**-126)
# One below max/127, which rounds up: 127 times this is finite.
_LARGEST_SCALE: Final = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))


class NonFiniteError(ValueError):
    """A value to be encoded is NaN or infinite."""


@dataclass
class ErrorStats:
    """Squares of what encoding lost and of what was encoded, over the first blocks of each call: a sample,
    since measuring costs as much as encoding."""

    lost: float = 0.0
    total: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, lost: float, total: float) -> None:
        """Count one sub-block; safe from several threads."""
        with self._lock:
            self.lost += lost
            self.total += total

    def relative(self) -> float:
        """Root of lost over total, 0 if nothing was encoded."""
        return float((self.lost / self.total) ** 0.5) if self.total > 0 else 0.0


class _Scratch(threading.local):
    """Per thread: two fp32 work arrays of one sub-block, and three of one value per block of it."""

    def __init__(self) -> None:
        self.values: Flat = np.empty(_SUB, np.float32)
        self.work: Flat = np.empty(_SUB, np.float32)
        self.scales, self.inverse, self.spare = np.empty((3, -(-_SUB // BLOCK)), np.float32)


_scratch = _Scratch()


class Codec:
    """Stateless; all methods may run in several threads at once. Arrays are 1-D fp32, C-contiguous."""

    def __init__(self, kind: Literal["int8", "fp32"] = "int8") -> None:
        self.kind = kind

    def payload_bytes(self, values: int) -> int:
        """Length of the payload of ``values`` values."""
        return 4 * values if self.kind == "fp32" else 4 * _blocks(values) + values

    def encode(self, x: Flat, stats: ErrorStats | None = None) -> bytes:
        """Payload of ``x``; raises NonFiniteError."""
        return self._build(x.size, None, x, None, None, stats)

    def first(self, own: Flat, weight: float, stats: ErrorStats | None = None) -> bytes:
        """Payload of ``weight * own``: the start of a chunk's route; raises NonFiniteError."""
        return self._build(own.size, None, own, np.float32(weight), None, stats)

    def hop(self, payload: bytes, own: Flat, weight: float, stats: ErrorStats | None = None) -> bytes:
        """Payload of ``decoded + weight * own``. ProtocolViolation for a bad payload or a sum that it makes
        overflow; NonFiniteError if our own part is not finite."""
        return self._build(own.size, payload, own, np.float32(weight), None, stats)

    def finish(
        self,
        payload: bytes,
        own: Flat,
        weight: float,
        total_weight: float,
        stats: ErrorStats | None = None,
    ) -> bytes:
        """Payload of ``(decoded + weight * own) / total_weight``: the mean, encoded once. Raises as `hop`."""
        return self._build(own.size, payload, own, np.float32(weight), np.float32(total_weight), stats)

    def single(self, own: Flat, stats: ErrorStats | None = None) -> bytes:
        """Payload of a mean over one contribution."""
        return self.encode(own, stats)

    def decode(self, payload: bytes, values: int, out: Flat | None = None) -> Flat:
        """fp32 values of a payload; raises ProtocolViolation for a wrong length or bad content."""
        result = np.empty(values, np.float32) if out is None else out
        read = self.reader(payload, values)
        for start in range(0, values, _SUB):
            stop = min(start + _SUB, values)
            read(start, stop, result[start:stop])
        return result

    def reader(self, payload: bytes, values: int) -> Callable[[int, int, Flat], None]:
        """``read(start, stop, out)`` that decodes values start..stop of a payload, ``start`` being a multiple
        of the block. Both calls raise ProtocolViolation, this one for a wrong length or scale."""
        parts = self._open(payload, values)
        return lambda start, stop, out: self._decode_part(parts, start, stop, out)

    def error_bound(self, x: Flat) -> Flat:
        """Largest ``|decode(encode(x)) - x|`` per value: half a step of its block, rounding, and what a
        block too small for a scale loses."""
        if self.kind == "fp32":
            return np.zeros_like(x)
        peaks = np.repeat(_peaks(np.abs(x)), BLOCK)[: x.size]
        bound = peaks * np.float32(0.5 / 127) * np.float32(1 + 1e-5) + peaks * np.float32(2.0**-20)
        small = peaks < np.float32(127) * _SMALLEST_SCALE * np.float32(1.001)
        return np.where(small, np.maximum(peaks, bound), bound).astype(np.float32)

    # --- parts ---

    def _build(
        self,
        values: int,
        payload: bytes | None,
        own: Flat,
        weight: np.float32 | None,
        divisor: np.float32 | None,
        stats: ErrorStats | None,
    ) -> bytes:
        out = np.empty(self.payload_bytes(values), np.uint8)
        target = self._parts(out, values)
        source = None if payload is None else self._open(payload, values)
        # What is not finite is found below, so the floating-point warnings would only repeat it.
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, values, _SUB):
                stop = min(start + _SUB, values)
                x = _scratch.values[: stop - start]
                self._weigh(own[start:stop], weight, x)
                if source is not None:
                    work = _scratch.work[: stop - start]
                    self._decode_part(source, start, stop, work)
                    np.add(work, x, out=x)
                if divisor is not None:
                    np.divide(x, divisor, out=x)
                if not self._encode_part(x, target, start, stop):
                    self._weigh(own[start:stop], weight, x)
                    if source is not None and np.isfinite(x).all():
                        raise ProtocolViolation("the sum with this payload is not finite")
                    raise NonFiniteError("a value to be sent is not finite")
                if stats is not None and start == 0:
                    self._measure(x[:_SAMPLE], target, stats)
        return out.tobytes()

    @staticmethod
    def _weigh(own: Flat, weight: np.float32 | None, out: Flat) -> None:
        if weight is None:
            np.copyto(out, own)
        else:
            np.multiply(own, weight, out=out)

    def _parts(self, buffer: NDArray[np.uint8], values: int) -> tuple[Any, ...]:
        if self.kind == "fp32":
            return (buffer.view("<f4"),)
        head = 4 * _blocks(values)
        return buffer[:head].view("<f4"), buffer[head:].view(np.int8)

    def _open(self, payload: bytes, values: int) -> tuple[Any, ...]:
        """Views of a payload whose length and scales are sound."""
        wanted = self.payload_bytes(values)
        if len(payload) != wanted:
            raise ProtocolViolation(f"payload of {len(payload)} bytes where {wanted} are due")
        parts = self._parts(np.frombuffer(payload, np.uint8), values)
        if self.kind == "fp32":
            if not np.isfinite(parts[0]).all():
                raise ProtocolViolation("payload holds a value that is not finite")
            return parts
        scales = parts[0]
        if scales.size and not (scales.min() >= 0 and scales.max() <= _LARGEST_SCALE):  # NaN fails both
            raise ProtocolViolation("payload holds a scale that is not finite, negative or oversized")
        return parts

    def _decode_part(self, parts: tuple[Any, ...], start: int, stop: int, out: Flat) -> None:
        if self.kind == "fp32":
            np.copyto(out, parts[0][start:stop])
            return
        scales, codes = parts
        piece = codes[start:stop]
        if piece.size and piece.min() == -128:
            raise ProtocolViolation("payload holds the code -128")
        np.copyto(out, piece, casting="same_kind")
        first = start // BLOCK
        factors = _scratch.scales[: _blocks(piece.size)]
        np.copyto(factors, scales[first : first + factors.size])  # a payload cannot be written to
        _scale(out, factors, out)

    def _encode_part(self, x: Flat, target: tuple[Any, ...], start: int, stop: int) -> bool:
        """Encode one sub-block into its place; ``x`` is left as it is. False if it is not finite."""
        work = _scratch.work[: x.size]
        np.abs(x, out=work)
        peaks = _peaks(work)
        if not np.isfinite(peaks).all():
            return False
        if self.kind == "fp32":
            target[0][start:stop] = x
            return True
        scales, inverse = _scratch.scales[: peaks.size], _scratch.inverse[: peaks.size]
        np.divide(peaks, np.float32(127), out=scales)
        np.minimum(scales, _LARGEST_SCALE, out=scales)
        scales[scales < _SMALLEST_SCALE] = 0
        inverse.fill(0)
        np.divide(np.float32(1), scales, out=inverse, where=scales > 0)
        _scale(x, inverse, work)
        np.rint(work, out=work)
        first = start // BLOCK
        target[0][first : first + scales.size] = scales
        np.copyto(target[1][start:stop], work, casting="unsafe")
        return True

    def _measure(self, x: Flat, target: tuple[Any, ...], stats: ErrorStats) -> None:
        work = _scratch.work[: x.size]
        self._decode_part(target, 0, x.size, work)
        np.subtract(work, x, out=work)
        # In fp64, whose range holds the squares of all fp32 values.
        stats.add(float(np.square(work, dtype=np.float64).sum()), float(np.square(x, dtype=np.float64).sum()))


def _blocks(values: int) -> int:
    return -(-values // BLOCK)


def _peaks(magnitudes: Flat) -> Flat:
    """Largest magnitude of each block (NaN if it has one); the last block may be partial. The result is good
    until the thread's next call."""
    whole = magnitudes.size // BLOCK
    blocks = _blocks(magnitudes.size)
    peaks = _scratch.spare[:blocks] if blocks <= _scratch.spare.size else np.empty(blocks, np.float32)
    chosen().peaks(magnitudes[: whole * BLOCK].reshape(whole, BLOCK), peaks[:whole])
    if whole < peaks.size:
        peaks[whole] = magnitudes[whole * BLOCK :].max()
    return peaks


def _scale(x: Flat, factors: Flat, out: Flat) -> None:
    """Each block of ``x`` times its factor; the last block may be partial, ``out`` may be ``x``."""
    whole = x.size // BLOCK
    rows, target = x[: whole * BLOCK].reshape(whole, BLOCK), out[: whole * BLOCK].reshape(whole, BLOCK)
    chosen().scale(rows, factors[:whole], target)
    if whole < factors.size:
        np.multiply(x[whole * BLOCK :], factors[whole], out=out[whole * BLOCK :])
