"""The inner learning rate as a function of the global inner step."""

from __future__ import annotations

import math

from p2p_diloco.config import ScheduleConfig


def learning_rate(step: int, peak: float, schedule: ScheduleConfig) -> float:
    """Warm-up, stable, decay (arXiv:2405.18392): the rate of the inner step with index ``step`` >= 0.

    Linear from peak/warmup_steps to ``peak`` over the first ``warmup_steps``, flat, then
    ``1 - sqrt(progress)`` over the last ``decay_steps`` before ``total_steps``, down to
    ``peak * min_lr_ratio``, which holds from then on. A peer that joins late gets the others' rate, since
    the step is the run's and not its own.
    """
    floor = peak * schedule.min_lr_ratio
    if step >= schedule.total_steps:
        return floor
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    decay_start = schedule.total_steps - schedule.decay_steps
    if step < decay_start:
        return peak
    progress = (step - decay_start) / schedule.decay_steps
    return floor + (peak - floor) * (1.0 - math.sqrt(progress))
