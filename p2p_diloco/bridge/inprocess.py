"""A trainer that is a plain function in the peer's own process: for tests and simulated swarms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.bridge.api import OnEvent, TrainerDied, TrainerEvent
from p2p_diloco.bridge.messages import Progress, Round, RoundDone
from p2p_diloco.bridge.shared import Flat, StateAreas, anchor_of
from p2p_diloco.errors import InternalError
from p2p_diloco.numerics.layout import Schema

RoundFunction = Callable[[Round, Flat, Flat], tuple[int, float]]


class FunctionTrainer:
    """Runs ``function(round, anchor, delta_out) -> (tokens, loss)`` for each round.

    ``anchor`` is read-only fp32 [total_values]; the function fills ``delta_out`` (fp32, same length). With
    ``auto`` a round ends in the next turn of the event loop. Without, it is held until `release` or, as a
    real trainer would, until `stop_early` names its epoch. ``evaluate(anchor)`` gives the held-out loss.
    """

    def __init__(
        self,
        schema: Schema,
        initial: NDArray[np.float32],
        function: RoundFunction,
        *,
        auto: bool = True,
        evaluate: Callable[[Flat], float] | None = None,
    ) -> None:
        if initial.shape != (schema.total_values,):
            raise InternalError(f"initial weights have shape {initial.shape}, not ({schema.total_values},)")
        self.on_event: OnEvent | None = None
        self.auto = auto
        self.rounds: list[Round] = []
        self.starts = 0
        self._schema = schema
        self._initial = initial
        self._function = function
        self._evaluate = evaluate
        self._state: StateAreas | None = None
        self._running = False
        self._round: Round | None = None
        self._generation = 0

    @property
    def held(self) -> Round | None:
        """The round under way, None if none is."""
        return self._round

    async def start(self) -> Schema:
        """See `Trainer.start`."""
        self._running = True
        self.starts += 1
        return self._schema

    def attach(self, state: StateAreas) -> None:
        """See `Trainer.attach`."""
        self._state = state

    async def write_initial(self) -> None:
        """See `Trainer.write_initial`."""
        self._need_state().anchor0[:] = self._initial

    def start_round(self, command: Round) -> None:
        """See `Trainer.start_round`; InternalError if a round is under way."""
        self._need_state()
        if not self._running:
            raise InternalError("the trainer is not running")
        if self._round is not None:
            raise InternalError(f"the round of epoch {self._round.epoch} is still under way")
        self.rounds.append(command)
        self._round = command
        if self.auto:
            self._finish_soon(command.steps)

    def release(self) -> None:
        """Let the held round end with all its steps; InternalError if none is held."""
        if self._round is None:
            raise InternalError("no round is held")
        self._finish_soon(self._round.steps)

    def stop_early(self, epoch: int) -> None:
        """See `Trainer.stop_early`; the round then reports one step."""
        if self._round is not None and self._round.epoch == epoch and not self.auto:
            self._finish_soon(1)

    def progress(self, step: int, loss: float, tokens: int = 0) -> None:
        """Report progress of the held round, in the next turn of the loop."""
        if self._round is None:
            raise InternalError("no round is held")
        command = self._round
        event = Progress(command.epoch, step, command.global_step + step, loss, tokens, 0.0)
        asyncio.get_running_loop().call_soon(self._emit, event)

    def die(self, text: str) -> None:
        """Behave as if the trainer processes crashed."""
        self._forget_round()
        self._running = False
        asyncio.get_running_loop().call_soon(self._emit, TrainerDied(text))

    async def stop(self, timeout_s: float) -> None:
        """See `Trainer.stop`; a round under way is dropped without an event."""
        self._forget_round()
        self._running = False

    def _finish_soon(self, steps: int) -> None:
        asyncio.get_running_loop().call_soon(self._finish, self._generation, steps)

    def _finish(self, generation: int, steps: int) -> None:
        command = self._round
        if command is None or generation != self._generation:
            return  # already ended, died or stopped since it was scheduled
        state = self._need_state()
        anchor = anchor_of(state, command.slot).view()
        anchor.flags.writeable = False
        eval_loss = self._evaluate(anchor) if command.evaluate and self._evaluate is not None else None
        tokens, loss = self._function(command, anchor, state.delta)
        self._forget_round()
        self._emit(RoundDone(command.epoch, steps, tokens, loss, eval_loss, 0.0))

    def _forget_round(self) -> None:
        self._round = None
        self._generation += 1

    def _emit(self, event: TrainerEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)

    def _need_state(self) -> StateAreas:
        if self._state is None:
            raise InternalError("attach() must come first")
        return self._state
