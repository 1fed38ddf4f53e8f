"""Some hundred simulated swarms under faults, planted bugs, and whether a seed always says the same."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from p2p_diloco.sim.__main__ import catch, traces
from p2p_diloco.sim.bugs import BUGS, forget_after_restart
from p2p_diloco.sim.faults import Aim, Fault, Plan, draw
from p2p_diloco.sim.run import run_plan, run_seed
from p2p_diloco.sim.shrink import shrink

# Seeds that broke a rule once, each for a reason of its own; docs/LOG.md tells what it was.
ONCE_BROKEN = (14, 50, 67, 130, 268, 272, 279, 283, 303, 306, 327, 535, 949, 1240, 1963, 8107)


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_no_rule_is_broken_and_every_healed_swarm_goes_on(first: int) -> None:
    for seed in range(first, first + 20):
        result = run_seed(seed)
        assert result.ok, f"seed {seed}: {result.text}\n{result.report}"


@pytest.mark.parametrize("seed", ONCE_BROKEN)
def test_what_was_broken_once_stays_whole(seed: int) -> None:
    result = run_seed(seed)
    assert result.ok, f"seed {seed}: {result.text}\n{result.report}"


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_caught_within_a_thousand_seeds(name: str) -> None:
    seed, rule = catch(name)
    assert seed >= 0, f"{name} was not caught"
    assert rule in BUGS[name][1]


def test_a_seed_gives_the_same_trace_in_processes_that_hash_differently() -> None:
    one, other = traces(range(20, 26))
    assert one == other
    assert len(set(one)) == 6


def test_a_plan_survives_json_and_replays_exactly() -> None:
    plan = draw(8)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert run_plan(again, 8).trace == run_seed(8).trace


def test_a_failing_plan_shrinks_to_what_the_failure_needs() -> None:
    noise = tuple(Fault(1.0 + i, "slow", (i % 3,), (), 1.0, 0.1) for i in range(4))
    aims = (Aim("persist:vote", 0, 1, True, 2.0), Aim("frame:state", 2, 5, False, 2.0))
    plan = Plan(peers=3, min_peers=3, faults=noise, aims=aims, fault_s=15.0, chunks=3)
    with forget_after_restart():
        broken = run_plan(plan, 3)
        if broken.ok:  # this kill did no harm with this seed: take one that does
            plan = next(p for p in map(draw, range(1000)) if not run_plan(p, 3).ok)
            broken = run_plan(plan, 3)
        small = shrink(plan, 3, broken.rule, tries=60)
    assert small.rule == broken.rule
    before, after = len(plan.faults) + len(plan.aims), len(small.plan.faults) + len(small.plan.aims)
    assert after < before or before <= 1


def test_a_swarm_without_faults_breaks_no_rule_and_certifies_steadily() -> None:
    for peers in (1, 2, 5):
        plan = replace(draw(0), peers=peers, min_peers=peers, rates={}, faults=(), aims=(), clocks=(),
                       slowness=())  # fmt: skip
        result = run_plan(plan, 1)
        assert result.ok, result.text
        assert result.epochs > 3
