"""Named points at which a test can kill this process with SIGKILL: ``P2P_DILOCO_KILL=reduce@2``.

The word before ``@`` is a point (see POINTS), the number the epoch being agreed on. ``reduce@2`` means that
epoch and no other, ``reduce@2+`` the first one from it on in which this process comes by: one that is late
with its delta sits an epoch out and learns the verdict from others. Only a convener comes by
``convened_persisted`` and ``view``, and ``promise_persisted`` only comes after an attempt failed.
Without the variable nothing happens. Chaos tests use these to be sure where a peer was when it died.
"""

from __future__ import annotations

import os
import signal

from p2p_diloco.errors import ConfigError

VARIABLE = "P2P_DILOCO_KILL"
POINTS = (
    "ready", "convened_persisted", "view", "reduce", "gather", "ring_done", "round_kept", "vote_persisted",
    "vote_sent", "certificate", "promise_persisted",
)  # fmt: skip


class Failpoints:
    """Reads the variable once; `hit` is cheap when it is unset."""

    def __init__(self, setting: str | None = None) -> None:
        text = os.environ.get(VARIABLE, "") if setting is None else setting
        self._point, self._epoch, self._later = "", 0, False
        if text:
            point, _, when = text.partition("@")
            epoch = when.removesuffix("+")
            if point not in POINTS or not (epoch.isascii() and epoch.isdigit()):
                raise ConfigError(
                    f"{VARIABLE}={text}: expected POINT@EPOCH or POINT@EPOCH+, a point of {', '.join(POINTS)}"
                )
            self._point, self._epoch, self._later = point, int(epoch), when.endswith("+")

    def hit(self, point: str, epoch: int) -> None:
        """Die here, at once and without any clean-up, if this point is the one that was asked for."""
        if point == self._point and (epoch == self._epoch or (self._later and epoch > self._epoch)):
            os.kill(os.getpid(), signal.SIGKILL)
