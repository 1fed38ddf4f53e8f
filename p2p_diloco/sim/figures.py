"""Tables of docs/RELIABILITY.md: drawn faults, every single crash, sizes (`recoveries` has the others).

Every swarm here runs under the `Checker`: a broken invariant or a swarm that stands still is counted as a
violation and named, never left out. Times are virtual: delays are drawn, computing costs what the world
says, and nothing depends on the machine that runs it.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from p2p_diloco.proto import events as ev
from p2p_diloco.sim.run import demand_liveness, run_seed
from p2p_diloco.sim.tables import LIMIT_S, SETTLED, Swarm, Table, attempt_of, guarded, in_parallel, span
from p2p_diloco.sim.world import SimPeer
from p2p_diloco.wire import messages as msg

_S = 1_000_000_000

# --- random and aimed faults ---


def seeds(count: int, jobs: int, say: Callable[[str], None]) -> Table:
    """``count`` drawn plans of faults."""
    table = Table(
        "Drawn faults",
        ("seeds", "epochs", "virtual time", "faults that struck", "failed"),
    )
    epochs, virtual_s, struck, failed = 0, 0.0, Counter[str](), 0
    for number, result in enumerate(in_parallel(run_seed, range(count), jobs, 8), 1):
        epochs, virtual_s = epochs + result.epochs, virtual_s + result.virtual_s
        struck.update(text.split()[1] for text in result.faults)
        if not result.ok:
            failed += 1
            table.violations.append(f"seed {result.seed}: {(result.text.splitlines() or [result.rule])[0]}")
        if number % 1000 == 0:
            say(f"{number} seeds, {failed} failed")
    kinds = ", ".join(f"{kind} {number:,}" for kind, number in sorted(struck.items()))
    table.rows.append((f"{count:,}", f"{epochs:,}", f"{virtual_s / 3600:.0f} h", kinds, str(failed)))
    return table


def _acts(effect: ev.Effect) -> bool:
    """True if others or the disk could tell whether a peer died before this effect or after it."""
    return isinstance(effect, ev.Send | ev.SendFrame | ev.Persist | ev.KeepRound)


def _until_settled(n: int, counted: Callable[[SimPeer], bool]) -> Swarm:
    """A swarm that counts effects from the certificate before `SETTLED` + 1 on."""
    swarm = Swarm.of(n, chunks=n)
    world = swarm.world

    def on_effect(peer: SimPeer, effect: ev.Effect) -> bool:
        if swarm.height < SETTLED or swarm.height > SETTLED or not _acts(effect):
            return True
        return counted(peer)

    world.on_effect = on_effect
    return swarm


def count_messages(n: int) -> int:
    """How many messages, frames and records the peers make in one settled epoch."""
    total = 0

    def counted(peer: SimPeer) -> bool:
        nonlocal total
        total += 1
        return True

    _until_settled(n, counted).settle(SETTLED + 2)
    return total


def crash_at(case: tuple[int, int]) -> tuple[float, str]:
    """Kill the peer that is about to make message ``index`` of the epoch and start it again 5 s later. The
    time from the kill until all have gone on, and what broke."""
    n, index = case
    count, killed_ns = 0, 0

    def counted(peer: SimPeer) -> bool:
        nonlocal count, killed_ns
        count += 1
        if count - 1 != index:
            return True
        killed_ns = world.now_ns
        world.kill(peer)
        world.after(5 * _S, lambda: world.restart(peer))
        return False

    swarm = _until_settled(n, counted)
    world = swarm.world

    def work() -> float:
        world.run_until(lambda: killed_ns > 0, LIMIT_S)
        world.run_for(5.1)
        demand_liveness(world, LIMIT_S)
        return (world.now_ns - killed_ns) / 1e9

    took, broken = guarded(f"n = {n}, message {index}", work)
    return took or 0.0, broken


def single_crashes(sizes: Sequence[int], jobs: int, step: int = 1) -> Table:
    """Kill at every message, frame and record of one epoch (``step`` 1: at each)."""
    table = Table(
        "One crash at each message of an epoch",
        ("peers", "messages", "crashes tried", "two epochs on, all of them: median / longest s"),
        note="Whoever is about to send message k (or write record k) dies instead and starts again 5 s "
        "later; one run for each k of one epoch in which all peers are voters.",
    )
    for n in sizes:
        total = count_messages(n)
        cases = [(n, index) for index in range(0, total, step)]
        found = list(in_parallel(crash_at, cases, jobs))
        table.violations += [broken for _, broken in found if broken]
        times = [took for took, broken in found if not broken]
        table.rows.append((str(n), str(total), str(len(cases)), span(times)))
    return table


# --- sizes ---


def _ring_of(n: int) -> tuple[tuple[str, ...], str]:
    def work() -> tuple[str, ...]:
        swarm = Swarm.of(n, chunks=max(n, 6))
        swarm.settle(SETTLED)
        links = [swarm.checker.links[epoch] for epoch in range(2, SETTLED + 1)]
        members = min(len(link.contributors) for link in links)
        attempts = max(attempt_of(link) for link in links)
        return str(n), str(members), str(attempts), span(swarm.epoch_s(2, SETTLED))

    row, broken = guarded(f"{n} peers", work)
    return row or (str(n), "-", "-", "-"), broken


def ring_sizes(sizes: Sequence[int], jobs: int) -> Table:
    """Rings of many sizes, started all at once."""
    table = Table(
        "Ring sizes",
        ("peers", "members of the smallest ring", "highest attempt", "epoch s (median / longest)"),
        note="All start at once; epochs 2 and 3. 3 to 30 ms one way, training 0.5 to 2 s.",
    )
    for row, broken in in_parallel(_ring_of, sizes, jobs):
        table.rows.append(row)
        table.violations += [broken] if broken else []
    return table


def _note_readies(swarm: Swarm) -> dict[int, int]:
    """When the last READY of each epoch was said for the first time (they are said again to new links)."""
    last_ns: dict[int, int] = {}
    said: set[tuple[int, int]] = set()
    check = swarm.world.on_send

    def on_send(peer: SimPeer, message: msg.Message) -> None:
        check(peer, message)
        if not isinstance(message, msg.Statement) or message.signed.kind != "ready":
            return
        ready = msg.decode_body("ready", message.signed.body)
        assert isinstance(ready, msg.Ready)
        key = (peer.index, ready.epoch)
        if message.signed.public_key == peer.identity.public_key and key not in said:
            said.add(key)
            last_ns[ready.epoch] = swarm.world.now_ns

    swarm.world.on_send = on_send
    return last_ns


def agreement_of(n: int) -> tuple[tuple[str, ...], str]:
    """Without numbers to sum (no parameters) an epoch is training and agreement."""

    def work() -> tuple[str, ...]:
        swarm = Swarm.of(n, chunks=0)
        world, last_ready_ns = swarm.world, _note_readies(swarm)
        swarm.settle(SETTLED)
        before = {peer.index: peer.control_bytes for peer in world.peers}
        began_ns, last = world.now_ns, SETTLED + 2
        swarm.settle(last)
        seconds = (world.now_ns - began_ns) / 1e9 / (last - SETTLED)
        spent = [(peer.control_bytes - before[peer.index]) / (last - SETTLED) for peer in world.peers]
        times = [(swarm.last_ns[e] - last_ready_ns[e]) / 1e9 for e in range(SETTLED + 1, last + 1)]
        voters = len(swarm.checker.links[last].certificate.votes)
        sent = f"{statistics.mean(spent) / 1e3:,.1f}", f"{max(spent) / 1e3:,.1f}"
        return str(n), span(times), *sent, f"{seconds:.1f}", str(voters)

    row, broken = guarded(f"{n} peers", work)
    return row or (str(n), "-", "-", "-", "-", "-"), broken


def agreement(sizes: Sequence[int], jobs: int) -> Table:
    """What agreeing costs, without the bytes of the reduction."""
    table = Table(
        "Agreement",
        (
            "peers", "last READY to last certificate s (median / longest)", "kB sent per peer and epoch",
            "at most", "epoch s", "votes in a certificate",
        ),
        note="A model without parameters: training and agreement only. Gossip's own traffic is in the bytes.",
    )  # fmt: skip
    for row, broken in in_parallel(agreement_of, sizes, jobs):
        table.rows.append(row)
        table.violations += [broken] if broken else []
    return table
