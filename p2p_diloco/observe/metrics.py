"""Figures of a run as JSON lines: one object per line, with ``t_ms`` (wall clock, Unix) and ``kind``.

The file is for people and plots; the peer never reads it back, and a full disk must not end training. So a
failed write is reported once and the writer then stays silent until one succeeds.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

ROTATE_BYTES: Final = 256 << 20  # then the file becomes FILE.1, over an older one; bounds disk use (guess)

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class EpochMetrics:
    """One certified epoch. Losses are nats per token, None where this peer has none; ``quantisation_error``
    is the relative L2 error of our own delta's codec; bytes are payload and framing of all links;
    ``rates_kbit_per_s`` are those of the links that held this peer's ring frames up, by peer."""

    kind: ClassVar[str] = "epoch"

    epoch: int
    attempt: int
    peers: int
    contributors: tuple[str, ...]
    tokens: int
    ring_ms: float
    bytes_sent: int
    bytes_received: int
    quantisation_error: float
    mean_loss: float | None
    eval_loss: float | None
    state_root: str
    rates_kbit_per_s: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
    """One inner step of this peer; ``loss`` in nats per token, before the step."""

    kind: ClassVar[str] = "step"

    epoch: int
    step: int
    global_step: int
    loss: float
    tokens_per_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class NoticeMetrics:
    """A line that the user was shown. ``level`` is info, warning or error."""

    kind: ClassVar[str] = "notice"

    level: str
    text: str


Metrics = EpochMetrics | StepMetrics | NoticeMetrics


class MetricsWriter:
    """Appends to ``path`` (its folder is made). Safe to call from several threads; never raises OSError
    after construction. Each line reaches the kernel in one write, so a killed process leaves whole lines."""

    def __init__(
        self,
        path: Path,
        rotate_bytes: int = ROTATE_BYTES,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.path = path
        self._rotate_bytes = rotate_bytes
        self._wall_ms = wall_ms
        self._lock = threading.Lock()
        self._failing = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._open()

    def write(self, metrics: Metrics) -> None:
        """Append one typed record."""
        self.write_values(metrics.kind, dataclasses.asdict(metrics))

    def write_values(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append one record of any kind. Bytes become hex and numbers that JSON lacks become null."""
        record = {"t_ms": self._wall_ms(), "kind": kind, **{str(k): _plain(v) for k, v in values.items()}}
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                self._append(line)
            except OSError as error:
                if not self._failing:
                    logger.warning("metrics are not written to %s: %s", self.path, error.strerror or error)
                self._failing = True
            else:
                self._failing = False

    def close(self) -> None:
        """Close the file; later records are dropped. May be called twice."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self) -> int:
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")  # an earlier process died in the middle of a line
        return descriptor

    def _append(self, line: bytes) -> None:
        start = os.fstat(self._descriptor).st_size
        if start and start + len(line) > self._rotate_bytes:
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            fresh = self._open()
            os.close(self._descriptor)
            self._descriptor, start = fresh, 0
        written = os.write(self._descriptor, line)
        if written < len(line):  # the disk is full: take the half line back
            os.ftruncate(self._descriptor, start)
            raise OSError(f"only {written} of {len(line)} bytes fit")


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Records of one metrics file in order. A torn or foreign line is skipped; a missing file has none."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                logger.debug("%s: skipped a line that is not JSON", path)
                continue
            if isinstance(record, dict) and "kind" in record and "t_ms" in record:
                yield record


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, (bytes, bytearray)):
        return bytes(value).hex()
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(_plain(inner)) for inner in value)
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:  # a numpy scalar
        return _plain(value.item())
    return str(value)
