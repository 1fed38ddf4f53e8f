"""One seed: a swarm under a plan of faults, with every invariant watched, then healed and made to go on."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from p2p_diloco.config import AgreementConfig, CodecConfig, InnerConfig, PeerConfig, RunConfig
from p2p_diloco.sim.checks import BrokenRuleError, Checker
from p2p_diloco.sim.faults import Faults, Plan, draw
from p2p_diloco.sim.world import SimPeer, StandstillError, World

_CHUNK_VALUES = 256  # one block of the codec: small sums, real routes
_HEAL_S = 900.0  # virtual time in which a healed swarm must go on: several capped time-outs
_EPOCHS_AFTER = 2  # epochs that it must certify then

Sabotage = Callable[[World], None]


@dataclass
class Result:
    """How one seed went. `rule` is empty if nothing was broken."""

    seed: int
    plan: Plan
    rule: str = ""
    text: str = ""
    epochs: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    heal_s: float = 0.0
    trace: str = ""
    faults: list[str] = field(default_factory=list)
    report: str = ""

    @property
    def ok(self) -> bool:
        return not self.rule


def make_world(plan: Plan, seed: int, config: PeerConfig | None = None) -> World:
    """A world whose deltas differ for every training round that any peer ever did."""
    values = plan.chunks * _CHUNK_VALUES - (_CHUNK_VALUES // 3 if plan.chunks > 1 else 0)
    run = RunConfig(
        inner=InnerConfig(steps=10),
        codec=CodecConfig(kind="int8"),
        agreement=AgreementConfig(min_peers=plan.min_peers, quorum=plan.quorum),
        chunk_values=_CHUNK_VALUES,
    )

    def delta(peer: SimPeer, epoch: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        stream = np.random.default_rng([seed, peer.index, epoch, peer.lives, peer.rounds])
        return stream.standard_normal(values, np.float32)

    return World(run, config or PeerConfig(), values, seed, delta, toy_keys=True)


def run_seed(seed: int, sabotage: Sabotage | None = None) -> Result:
    """The run that a seed names."""
    return run_plan(draw(seed), seed, sabotage)


def run_plan(plan: Plan, seed: int, sabotage: Sabotage | None = None) -> Result:
    """Carry a plan out; a broken invariant, a crash of ours or a swarm that stands still is in the result."""
    world = make_world(plan, seed)
    result = Result(seed, plan)
    checker = Checker(world)
    faults = Faults(world, plan)
    if sabotage is not None:
        sabotage(world)
    try:
        faults.start()
        for index in range(plan.peers):
            clock = plan.clocks[index] if plan.clocks else 1.0
            slowness = plan.slowness[index] if plan.slowness else 1.0
            world.add(founder=index == 0, clock_rate=clock, slowness=slowness)
        world.run_for(plan.fault_s)
        faults.heal()
        result.heal_s = demand_liveness(world, _HEAL_S)
    except BrokenRuleError as broken:
        result.rule, result.text = broken.rule, str(broken)
    except StandstillError as still:
        result.rule, result.text = "liveness", str(still)
    except Exception:  # noqa: BLE001 - a defect of ours: it is the result
        result.rule, result.text = "crash", traceback.format_exc()
    result.epochs, result.steps = checker.certificates_seen, world.steps
    result.virtual_s, result.trace = world.now_ns / 1e9, world.trace_hash()
    result.faults, result.report = faults.done, world.report() if result.rule else ""
    return result


def demand_liveness(world: World, limit_s: float) -> float:
    """After healing: all live peers must reach a common height some epochs on; the time that it took."""
    began = world.now_ns
    live = [peer for peer in world.peers if peer.alive]
    if not live:
        return 0.0
    goal = max(peer.live.chain.epoch for peer in live) + _EPOCHS_AFTER

    def there() -> bool:
        return all(
            p.live.chain.epoch >= goal and p.live.epoch.state in ("training", "ready")
            for p in world.peers
            if p.alive
        )

    world.run_until(there, limit_s)
    return (world.now_ns - began) / 1e9
