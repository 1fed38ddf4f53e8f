"""The simulator's tables of docs/RELIABILITY.md about losses: a peer in the middle of a ring, many at once,
churn, partitions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from p2p_diloco.proto import events as ev
from p2p_diloco.proto.plans import chunks_in
from p2p_diloco.sim.run import demand_liveness
from p2p_diloco.sim.tables import LIMIT_S, SETTLED, Swarm, Table, attempt_of, guarded, in_parallel, span
from p2p_diloco.sim.world import SimPeer
from p2p_diloco.wire import messages as msg

_S = 1_000_000_000
_CHUNKS = 64


def _frames_of(n: int, seed: int, victim: int) -> int:
    """How many ring frames a peer sends in the epoch after `SETTLED` if nobody dies."""
    swarm, sent = Swarm.of(n, seed, _CHUNKS), 0
    world = swarm.world

    def on_effect(peer: SimPeer, effect: ev.Effect) -> bool:
        nonlocal sent
        sent += isinstance(effect, ev.SendFrame) and peer.index == victim and swarm.height == SETTLED
        return True

    world.on_effect = on_effect
    swarm.settle(SETTLED + 1)
    return sent


def _finished_by(peers: Sequence[SimPeer]) -> int:
    """How many chunks of this epoch one of these peers or more hold complete, with a receipt."""
    found: set[int] = set()
    for peer in peers:
        run = peer.live.epoch.run
        if run.ring is not None and run.ring.plan.plan.epoch == SETTLED + 1:
            found |= set(run.ring.finished)
        names = {plan.name for plan in run.finished.plans() if plan.epoch == SETTLED + 1}
        for holding in run.finished.holdings():
            found |= set(chunks_in(holding.chunks)) if holding.plan in names else set()
    return len(found)


def _count_at_views(swarm: Swarm, counts: list[int]) -> None:
    """Note what survivors hold each time the view of a later attempt is first said."""
    check, said = swarm.world.on_send, set[bytes]()

    def on_send(peer: SimPeer, message: msg.Message) -> None:
        check(peer, message)
        if not isinstance(message, msg.Statement) or message.signed.kind != "view":
            return
        view = msg.decode_body("view", message.signed.body)
        assert isinstance(view, msg.View)
        if view.epoch == SETTLED + 1 and view.attempt > 0 and message.signed.digest() not in said:
            said.add(message.signed.digest())
            counts.append(_finished_by(swarm.live()))

    swarm.world.on_send = on_send


@dataclass(frozen=True)
class Death:
    """Peers die when the first of them has sent this share of its ring frames."""

    n: int
    seed: int
    victims: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class Recovery:
    """`took_s`: from the death to the certificate at the last survivor. Chunks that survivors held finished
    at the death, and when the last retry began; how many of these it took over. `whole_s`: an epoch without
    a death."""

    took_s: float
    at_death: int
    finished: int
    reused: int
    attempt: int
    whole_s: float


def _die_in_ring(death: Death) -> tuple[Recovery | None, str]:
    swarm = Swarm.of(death.n, death.seed, _CHUNKS)
    world = swarm.world
    last = max(1, round(death.share * _frames_of(death.n, death.seed, death.victims[0])))
    sent, died_ns, at_death, counts = 0, 0, 0, list[int]()
    _count_at_views(swarm, counts)

    def on_effect(peer: SimPeer, effect: ev.Effect) -> bool:
        nonlocal sent, died_ns, at_death
        acts = isinstance(effect, ev.SendFrame) and peer.index == death.victims[0]
        if died_ns or not acts or swarm.height != SETTLED:
            return True
        sent += 1
        if sent < last:
            return True
        died_ns = world.now_ns
        for victim in death.victims:
            world.kill(world.peers[victim])
        at_death = _finished_by(swarm.live())
        return False

    world.on_effect = on_effect

    def work() -> Recovery:
        swarm.settle(SETTLED + 1)
        link = swarm.checker.links[SETTLED + 1]
        assert link.view is not None
        assert died_ns, "nobody died"
        took = (swarm.last_ns[SETTLED + 1] - died_ns) / 1e9
        reused = sum(len(source.chunks) for source in link.view.sources)
        whole = statistics.median(swarm.epoch_s(2, SETTLED))
        world.run_until(lambda: all(p.live.chain.epoch > SETTLED + 2 for p in swarm.live()), LIMIT_S)
        return Recovery(took, at_death, counts[-1] if counts else 0, reused, attempt_of(link), whole)

    return guarded(f"{death}", work)


def _summed_up(cases: Sequence[Death], jobs: int, table: Table) -> list[Recovery]:
    found = list(in_parallel(_die_in_ring, cases, jobs))
    table.violations += [broken for _, broken in found if broken]
    return [recovery for recovery, _ in found if recovery is not None]


def _mean(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f}" if values else "-"


def _share(recoveries: Sequence[Recovery]) -> str:
    finished = sum(recovery.finished for recovery in recoveries)
    return "-" if not finished else f"{100 * sum(r.reused for r in recoveries) / finished:.0f} %"


def deaths_in_a_ring(runs: int, jobs: int, n: int = 8) -> Table:
    """One peer dies at 10, 50 and 90 % of its ring frames and stays dead."""
    table = Table(
        "A peer dies in the middle of a ring",
        (
            "dies at", "runs", "finished chunks then (of 64)", "when the retry began", "of these reused",
            "from death to certificate s (median / longest)", "whole epoch undisturbed s",
        ),
        note=f"{n} peers, {_CHUNKS} chunks, 3 to 30 ms one way. The dead peer's links break at once (a "
        "process that died); if a machine vanishes, add the time until silence is noticed. Finished: some "
        "survivor held the mean with its owner's receipt.",
    )  # fmt: skip
    for share in (0.1, 0.5, 0.9):
        cases = [Death(n, seed, (seed % n,), share) for seed in range(runs)]
        found = _summed_up(cases, jobs, table)
        table.rows.append(
            (
                f"{share:.0%}",
                str(len(cases)),
                _mean([r.at_death for r in found]),
                _mean([r.finished for r in found]),
                _share(found),
                span([r.took_s for r in found]),
                span([r.whole_s for r in found]),
            )
        )
    return table


def many_at_once(runs: int, jobs: int, n: int = 12, lost: int = 4) -> Table:
    """Several voters die in the same instant in the middle of a ring and stay dead."""
    table = Table(
        f"{lost} of {n} die at once",
        (
            "runs", "rolled back", "finished chunks then (of 64)", "when the retry began", "of these reused",
            "from death to certificate s (median / longest)", "highest attempt",
        ),
        note="Half way through a ring. The checker fails a run in which any peer's height falls or in which "
        "a certificate does not hold the mean that its contributors' original deltas give.",
    )  # fmt: skip
    cases = [Death(n, seed, tuple((seed + 3 * i) % n for i in range(lost)), 0.5) for seed in range(runs)]
    found = _summed_up(cases, jobs, table)
    table.rows.append(
        (
            str(len(cases)),
            str(len(table.violations)),
            _mean([r.at_death for r in found]),
            _mean([r.finished for r in found]),
            _share(found),
            span([r.took_s for r in found]),
            str(max((r.attempt for r in found), default=0)),
        )
    )
    return table


def _churn(case: tuple[int, int, int, int]) -> tuple[tuple[list[float], list[int]] | None, str]:
    """(peers, gone in each epoch, epochs, seed): how long each epoch took and how many contributed."""
    n, gone, epochs, seed = case
    swarm = Swarm.of(n, seed)
    world = swarm.world

    def strike() -> None:
        live = [p for p in swarm.live() if p.live.epoch.me in p.live.chain.voters]
        for victim in world.random.sample(live, min(gone, (len(live) - 1) // 2)):
            world.kill(victim)
            world.after(3 * _S, lambda victim=victim: world.restart(victim))  # type: ignore[misc]

    def work() -> tuple[list[float], list[int]]:
        swarm.settle(SETTLED)
        for epoch in range(SETTLED + 1, SETTLED + 1 + epochs):
            for _ in range(gone > 0):
                world.after(world.random.randrange(2 * _S), strike)
            world.run_until(lambda epoch=epoch: swarm.height >= epoch, LIMIT_S)  # type: ignore[misc]
        last = SETTLED + epochs
        demand_liveness(world, LIMIT_S)
        counts = [len(swarm.checker.links[e].contributors) for e in range(SETTLED + 1, last + 1)]
        return swarm.epoch_s(SETTLED + 1, last), counts

    return guarded(f"churn {case}", work)


def churn(runs: int, jobs: int, n: int = 10, epochs: int = 20) -> Table:
    """A fifth of the peers is killed in each epoch, at a random instant, and back 3 s later."""
    table = Table(
        "Churn of 20 % an epoch",
        ("killed in each epoch", "runs", "epochs", "epoch s (median / longest)", "contributors (mean)"),
        note=f"{n} peers; training takes 0.5 to 2 s. Who is killed starts again 3 s later from its own disk.",
    )
    for gone in (0, n // 5):
        found = list(in_parallel(_churn, [(n, gone, epochs, seed) for seed in range(runs)], jobs))
        table.violations += [broken for _, broken in found if broken]
        times = [t for result, _ in found if result for t in result[0]]
        counts = [c for result, _ in found if result for c in result[1]]
        table.rows.append((f"{gone} of {n}", str(runs), str(len(times)), span(times), _mean(counts)))
    return table


@dataclass(frozen=True)
class Split:
    """What each side certified while it was cut off for a minute, and how long until all agreed again."""

    sides: tuple[int, int]
    heal_s: float


def _split(case: tuple[int, int, int]) -> tuple[Split | None, str]:
    left, right, seed = case
    swarm = Swarm.of(left + right, seed)
    world = swarm.world

    def height(side: Sequence[SimPeer]) -> int:
        return max(peer.live.chain.epoch for peer in side)

    def work() -> Split:
        swarm.settle(SETTLED)
        world.run_for(world.random.uniform(0.0, 3.0))  # anywhere in an epoch
        order = list(world.peers)
        world.random.shuffle(order)
        one, other = order[:left], order[left:]
        # A certificate that was decided when the cut came may be on its way through one side: let it arrive.
        for a in one:
            for b in other:
                world.cut(a, b)
        world.run_for(2.0)
        before = height(one), height(other)
        world.run_for(60.0)
        sides = height(one) - before[0], height(other) - before[1]
        world.mend()
        return Split(sides, demand_liveness(world, LIMIT_S))

    return guarded(f"split {case}", work)


def partitions(runs: int, jobs: int, sides: Sequence[tuple[int, int]] = ((5, 5), (6, 4))) -> Table:
    """Two sides, cut off from each other at a random instant for a minute."""
    table = Table(
        "Partitions",
        (
            "sides", "runs", "epochs certified by the side that goes on (least / most)",
            "by the other side (most)", "from healing until all are two epochs on, s (median / longest)",
        ),
        note="In 5/5 the side with the lowest id among the voters goes on (exact half, DESIGN section 8); "
        "in 6/4 the six. A second certificate for an epoch would be a violation.",
    )  # fmt: skip
    for left, right in sides:
        found = list(in_parallel(_split, [(left, right, seed) for seed in range(runs)], jobs))
        table.violations += [broken for _, broken in found if broken]
        splits = [split for split, _ in found if split is not None]
        winners, losers = [max(s.sides) for s in splits], [min(s.sides) for s in splits]
        table.violations += [f"{left}/{right}: both sides certified" for lost in losers if lost]
        table.rows.append(
            (
                f"{left} / {right}", str(runs), f"{min(winners, default=0)} / {max(winners, default=0)}",
                str(max(losers, default=0)), span([s.heal_s for s in splits]),
            )
        )  # fmt: skip
    return table
