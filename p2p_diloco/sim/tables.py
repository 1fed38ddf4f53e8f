"""What the tables of docs/RELIABILITY.md are made with: watched swarms, tables, several processes."""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from p2p_diloco.proto.chain import Link
from p2p_diloco.sim.checks import BrokenRuleError, Checker
from p2p_diloco.sim.faults import Plan
from p2p_diloco.sim.run import make_world
from p2p_diloco.sim.world import SimPeer, World
from p2p_diloco.wire import messages as msg

LIMIT_S = 900.0
SETTLED = 3  # the first epoch that begins with everybody a voter

In = TypeVar("In")
Out = TypeVar("Out")


@dataclass
class Table:
    """Rows of text under a heading, and what was broken while they were made."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    note: str = ""

    def markdown(self) -> str:
        lines = [f"### {self.title}", ""]
        lines += [self.note, ""] if self.note else []
        lines += ["| " + " | ".join(self.columns) + " |", "|" + " --- |" * len(self.columns)]
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        lines += ["", f"Violations: {len(self.violations)}."]
        return "\n".join([*lines, *(f"- {text}" for text in self.violations[:20])])


@dataclass
class Swarm:
    """A world of ``n`` peers that all start at once, its checker, and when each certificate was first and
    last taken over."""

    world: World
    checker: Checker
    first_ns: dict[int, int] = field(default_factory=dict)
    last_ns: dict[int, int] = field(default_factory=dict)
    _heights: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, n: int, seed: int = 0, chunks: int = 6, delay_ms: float = 30.0) -> Swarm:
        world = make_world(Plan(peers=n, min_peers=n, chunks=chunks), seed)
        world.network.rates.delay_ns = (round(delay_ms * 1e5), round(delay_ms * 1e6))
        swarm = cls(world, Checker(world))
        check = world.watch

        def watch(peer: SimPeer) -> None:
            check(peer)
            swarm._note(peer)

        world.watch = watch
        for index in range(n):
            world.add(founder=index == 0)
        return swarm

    def _note(self, peer: SimPeer) -> None:
        if peer.machine is None:
            return
        height = peer.live.chain.epoch
        for epoch in range(self._heights.get(peer.index, 0) + 1, height + 1):
            self.first_ns.setdefault(epoch, self.world.now_ns)
            self.last_ns[epoch] = self.world.now_ns
        self._heights[peer.index] = height

    @property
    def height(self) -> int:
        return max(self.first_ns, default=0)

    def live(self) -> list[SimPeer]:
        return [peer for peer in self.world.peers if peer.alive]

    def settle(self, epoch: int = SETTLED, limit_s: float = LIMIT_S) -> None:
        """Run until all hold the certificate of this epoch."""
        self.world.run_until(lambda: all(p.live.chain.epoch >= epoch for p in self.live()), limit_s)

    def epoch_s(self, first: int, last: int) -> list[float]:
        """How long each epoch took, from certificate to certificate."""
        at = self.first_ns
        return [(at[e] - at[e - 1]) / 1e9 for e in range(first, last + 1) if e in at and e - 1 in at]


def in_parallel(work: Callable[[In], Out], items: Iterable[In], jobs: int, batch: int = 1) -> Iterator[Out]:
    """Results in order, on several processes."""
    if jobs <= 1:
        yield from map(work, items)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(work, items, chunksize=batch)


def guarded(name: str, work: Callable[[], Out]) -> tuple[Out | None, str]:
    """What the work returns, or the one line that says what broke."""
    try:
        return work(), ""
    except (BrokenRuleError, AssertionError) as broken:
        return None, f"{name}: {str(broken).splitlines()[0]}"
    except Exception:  # noqa: BLE001 - a defect of ours: it is the result
        return None, f"{name}: crash: {traceback.format_exc().splitlines()[-1]}"


def attempt_of(link: Link) -> int:
    """The attempt in which a certificate was decided."""
    vote = msg.decode_body("vote", link.certificate.votes[0].body)
    assert isinstance(vote, msg.Vote)
    return vote.attempt


def span(values: Sequence[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} / {max(values):.2f}"


def put_between(page: str, mark: str, text: str) -> str:
    """The page with ``text`` between ``<!-- mark -->`` and ``<!-- /mark -->``; ValueError if they are not
    there."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n{text.strip()}\n{end}{after}"
