"""What a peer needs of a trainer, whatever runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from p2p_diloco.bridge.messages import Progress, Round, RoundDone
from p2p_diloco.bridge.shared import StateAreas
from p2p_diloco.numerics.layout import Schema


@dataclasses.dataclass(frozen=True)
class TrainerDied:
    """The trainer is gone and has left nothing running; ``text`` says why, with the end of its log."""

    text: str


TrainerEvent = Progress | RoundDone | TrainerDied
OnEvent = Callable[[TrainerEvent], None]


class Trainer(Protocol):
    """Lives in the peer's event loop; every method is called there and every event arrives there.

    Order: `start`, `attach`, optionally `write_initial`, then rounds one at a time, then `stop`. After
    `TrainerDied` or `stop`, `start` may be called again.
    """

    on_event: OnEvent | None

    async def start(self) -> Schema:
        """Bring the trainer up; raises TrainerError if it ends or says nothing in time."""
        ...

    def attach(self, state: StateAreas) -> None:
        """Give it the memory with the anchors and the delta."""
        ...

    async def write_initial(self) -> None:
        """Have the initial weights written to anchor slot 0; returns when they are all there."""
        ...

    def start_round(self, command: Round) -> None:
        """Begin a round; `Progress` and in the end one `RoundDone` follow (or `TrainerDied`)."""
        ...

    def stop_early(self, epoch: int) -> None:
        """End that epoch's round after the step under way; nothing happens if it is not running."""
        ...

    async def stop(self, timeout_s: float) -> None:
        """End it, politely at first, and surely within about ``timeout_s``; idempotent."""
        ...
