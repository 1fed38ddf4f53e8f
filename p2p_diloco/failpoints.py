"""Named points at which a test can kill this process with SIGKILL: ``P2P_DILOCO_KILL=reduce@2``.

The word before ``@`` is a point (see POINTS), the number the epoch being agreed on. Only a convener comes
by ``convened_persisted`` and ``view``, and ``promise_persisted`` only comes after an attempt failed.
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
        self._point, self._epoch = "", 0
        if text:
            point, _, epoch = text.partition("@")
            if point not in POINTS or not epoch.isdigit():
                raise ConfigError(
                    f"{VARIABLE}={text}: expected POINT@EPOCH with a point of {', '.join(POINTS)}"
                )
            self._point, self._epoch = point, int(epoch)

    def hit(self, point: str, epoch: int) -> None:
        """Die here, at once and without any clean-up, if this point is the one that was asked for."""
        if point == self._point and epoch == self._epoch:
            os.kill(os.getpid(), signal.SIGKILL)
