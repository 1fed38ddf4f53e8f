"""Making a failing plan smaller: drop what the failure does not need, as long as it still fails alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from p2p_diloco.sim.faults import Plan
from p2p_diloco.sim.run import Result, run_plan

Say = Callable[[str], None]


def shrink(plan: Plan, seed: int, rule: str, say: Say = lambda text: None, tries: int = 400) -> Result:
    """The result of the smallest plan found that breaks the same rule; the plan itself is in it."""
    best = run_plan(plan, seed)
    left = tries
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _smaller(best.plan):
            left -= 1
            result = run_plan(candidate, seed)
            if result.rule == rule:
                say(f"{len(candidate.faults)} faults, {len(candidate.aims)} aims, {candidate.peers} peers")
                best, smaller = result, True
                break
            if left <= 0:
                break
    return best


def _smaller(plan: Plan) -> Iterator[Plan]:
    """Plans with one thing less, the greatest cuts first."""
    half = len(plan.faults) // 2
    if half:
        yield replace(plan, faults=plan.faults[:half])
        yield replace(plan, faults=plan.faults[half:])
    for index in range(len(plan.aims)):
        yield replace(plan, aims=plan.aims[:index] + plan.aims[index + 1 :])
    for index in range(len(plan.faults)):
        yield replace(plan, faults=plan.faults[:index] + plan.faults[index + 1 :])
    for name in sorted(plan.rates):
        if name != "delay_ms" and plan.rates[name]:
            yield replace(plan, rates={**plan.rates, name: 0.0})
    if any(clock != 1.0 for clock in plan.clocks):
        yield replace(plan, clocks=())
    if any(factor != 1.0 for factor in plan.slowness):
        yield replace(plan, slowness=())
    if plan.chunks > 1:
        yield replace(plan, chunks=1)
