"""Fail points for tests, set by the environment variable ``P2P_DILOCO_FAULT``."""

from __future__ import annotations

import dataclasses
import os

from p2p_diloco.bridge.client import ENV_STARTS
from p2p_diloco.errors import ConfigError

ENV_FAULT = "P2P_DILOCO_FAULT"
KINDS = ("nan_delta", "inf_delta", "crash", "crash_always")
CRASH_STATUS = 17


@dataclasses.dataclass(frozen=True)
class Faults:
    """The epochs at which each fault strikes on rank 0; none by default.

    ``nan_delta`` and ``inf_delta`` spoil one value of the delta. ``crash`` ends rank 0 in the middle of the
    round, in the first start of the trainer only; ``crash_always`` in every start.
    """

    points: tuple[tuple[str, int], ...] = ()
    starts: int = 1

    @classmethod
    def from_environment(cls) -> Faults:
        """Read ``kind:epoch[,kind:epoch...]``; ConfigError for anything else."""
        text = os.environ.get(ENV_FAULT, "")
        points: list[tuple[str, int]] = []
        for part in filter(None, text.split(",")):
            kind, _, epoch = part.partition(":")
            if kind not in KINDS or not epoch.isdecimal():
                raise ConfigError(f"{ENV_FAULT}: {part!r} is not one of {', '.join(KINDS)} with :epoch")
            points.append((kind, int(epoch)))
        return cls(tuple(points), int(os.environ.get(ENV_STARTS, "1")))

    def spoils(self, epoch: int) -> float | None:
        """The value to plant in this epoch's delta, None for none."""
        if ("nan_delta", epoch) in self.points:
            return float("nan")
        return float("inf") if ("inf_delta", epoch) in self.points else None

    def crashes(self, epoch: int) -> bool:
        """True if rank 0 is to end in the middle of this epoch's round."""
        first = ("crash", epoch) in self.points and self.starts <= 1
        return first or ("crash_always", epoch) in self.points
