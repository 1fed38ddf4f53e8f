"""How long an epoch waits, after how many attempts were lost in it. Pure."""

from __future__ import annotations

from p2p_diloco.config import TimeoutConfig

_S = 1_000_000_000
_PAUSE_NS = _S // 20  # before the next attempt once `_QUICK` were lost; doubles with each (guess)
_QUICK = 3  # attempts that may follow each other at once: what fails after them is not one death (guess)


class Patience:
    """Waits double with each lost attempt, as in any agreement that must end some day whatever the delays
    (Dwork, Lynch & Stockmeyer 1988); and attempts that fail as soon as they begin come ever more slowly."""

    def __init__(self, timeouts: TimeoutConfig) -> None:
        self._timeouts = timeouts
        self.attempts_lost = 0
        self.reason = ""  # why the pause began
        self._paused_after = -1
        self._until_ns = 0

    def wait_ns(self, seconds: float) -> int:
        """A time-out of ``seconds`` in the first attempt, doubled for each lost one, up to the cap."""
        doubled = seconds * float(2 ** min(self.attempts_lost, 10))
        return round(min(doubled, self._timeouts.timeout_cap_s) * _S)

    def whole_ring_ns(self) -> int:
        """How long a ring and its votes may take that we are no part of."""
        return self.wait_ns(self._timeouts.stall_s + self._timeouts.vote_s)

    def pause_until_ns(self, attempt: int, reason: str, now_ns: int) -> int:
        """When we may go on from ``attempt``, which failed (first) for ``reason``."""
        if self._paused_after != attempt:
            doubled = min(self.attempts_lost - _QUICK, 10)
            longest_ns = round(self._timeouts.view_s * _S)
            pause_ns = min(_PAUSE_NS << doubled, longest_ns) if doubled >= 0 else 0
            self._paused_after, self.reason, self._until_ns = attempt, reason, now_ns + pause_ns
        return self._until_ns
