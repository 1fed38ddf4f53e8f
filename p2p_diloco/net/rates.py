"""How fast a link is, as its sender sees it: from real traffic, while the link is what holds it up."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

# Guesses. A window must be long against the pieces that are written (128 KiB take 100 ms at 10 Mbit/s) and
# the pauses of a busy event loop. At first the kernel's buffers take what the link has not carried yet.
_SKIP_S = 0.1
_WINDOW_S = 0.25
_PAUSE_S = 0.02  # between two frames of one backlog
_WINDOWS = 64  # newest that count


class RateMeter:
    """Counts what leaves on all lanes to one peer while frames for it wait."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._waiting = 0
        self._since_s = 0.0  # when the backlog began
        self._idle_s = float("-inf")  # when it last ended
        self._window_s = 0.0  # when the window under way began, 0 if none is
        self._bytes = 0
        self._rates: deque[float] = deque(maxlen=_WINDOWS)

    def begin(self) -> None:
        """A frame wants to leave."""
        now_s = self._clock_s()
        if not self._waiting and now_s - self._idle_s > _PAUSE_S:
            self._since_s, self._window_s = now_s, 0.0
        self._waiting += 1

    def end(self) -> None:
        """It has left, or was given up."""
        self._waiting -= 1
        if not self._waiting:
            self._idle_s = self._clock_s()

    def sent(self, count: int) -> None:
        """So many bytes were taken by the connection."""
        now_s = self._clock_s()
        if not self._waiting or now_s - self._since_s < _SKIP_S:
            return
        if not self._window_s:
            self._window_s, self._bytes = now_s, 0
            return
        self._bytes += count
        if now_s - self._window_s >= _WINDOW_S:
            self._rates.append(self._bytes / (now_s - self._window_s))
            self._window_s, self._bytes = now_s, 0

    def take_kbit_per_s(self) -> int:
        """The upper quartile of windows since the last call, 0 if the link never held us up for that long.
        Not the median: a new connection over a long way is slow for its first seconds."""
        if not self._rates:
            return 0
        rate = sorted(self._rates)[math.ceil(0.75 * (len(self._rates) - 1))]
        self._rates.clear()
        return max(1, round(rate * 8 / 1000))
