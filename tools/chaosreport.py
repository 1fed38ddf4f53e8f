"""What a chaos run showed, from the peers' own files: pure functions over metrics and vote logs.

A *certificate* here is what peers wrote about an epoch into metrics.jsonl. Peers that were away learn of old
epochs late and write them down then, so the time of an epoch is always that of whoever saw it first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Metrics = Mapping[str, Sequence[Mapping[str, Any]]]  # peer's name -> records of its metrics.jsonl


@dataclass(frozen=True)
class Fault:
    """Something that was done to peers at a wall-clock time; ``struck`` are the names of the peers."""

    at_ms: int
    struck: tuple[str, ...]
    what: str


@dataclass(frozen=True)
class Certified:
    """One epoch as the first peer that saw it certified wrote it down."""

    epoch: int
    seen_ms: int
    contributors: tuple[str, ...]
    attempt: int = 0


@dataclass
class Report:
    """The outcome of one scenario. ``failures`` holds the expectations that did not hold."""

    name: str
    status: str = "passed"
    reason: str = ""
    seconds: float = 0.0
    epochs: int = 0
    diverged: list[str] = field(default_factory=list)
    faults: int = 0
    recovery_p50_s: float | None = None
    recovery_p99_s: float | None = None
    longest_gap_s: float | None = None
    highest_attempt: int = 0
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def bad(self) -> bool:
        return self.status == "failed"


def epoch_records(metrics: Metrics, names: Iterable[str] | None = None) -> list[Mapping[str, Any]]:
    """All records of certified epochs of these peers (None: of all)."""
    chosen = metrics if names is None else [name for name in names if name in metrics]
    return [record for name in chosen for record in metrics[name] if record["kind"] == "epoch"]


def certificates(metrics: Metrics, names: Iterable[str] | None = None) -> list[Certified]:
    """The certified epochs in order, each at the time when the first of these peers saw it."""
    first: dict[int, Certified] = {}
    for record in epoch_records(metrics, names):
        who = tuple(record["contributors"])
        seen = Certified(record["epoch"], record["t_ms"], who, record.get("attempt", 0))
        if seen.epoch not in first or seen.seen_ms < first[seen.epoch].seen_ms:
            first[seen.epoch] = seen
    return [first[epoch] for epoch in sorted(first)]


def divergences(metrics: Metrics) -> list[str]:
    """One line for each epoch that was certified with more than one state root or set of contributors.

    Every record counts, also two of one peer: a peer that lived twice must not contradict itself.
    """
    seen: dict[int, dict[tuple[str, tuple[str, ...]], set[str]]] = {}
    for name in metrics:
        for record in epoch_records(metrics, [name]):
            digest = (record["state_root"], tuple(sorted(record["contributors"])))
            seen.setdefault(record["epoch"], {}).setdefault(digest, set()).add(name)
    lines: list[str] = []
    for epoch in sorted(seen):
        if len(seen[epoch]) > 1:
            sides = [
                f"{'+'.join(sorted(names))}: {root[:12]} by {' '.join(who)}"
                for (root, who), names in sorted(seen[epoch].items())
            ]
            lines.append(f"epoch {epoch}: {'; '.join(sides)}")
    return lines


def recovery_s(fault: Fault, metrics: Metrics) -> float | None:
    """Seconds from a fault to the next certificate that a peer which was not struck sees; None if none came.

    The next certificate is of an epoch above all that these peers had seen when the fault struck.
    """
    survivors = [name for name in metrics if name not in fault.struck]
    seen = certificates(metrics, survivors)
    height = max((entry.epoch for entry in seen if entry.seen_ms <= fault.at_ms), default=0)
    later = [entry.seen_ms for entry in seen if entry.epoch > height and entry.seen_ms > fault.at_ms]
    return (min(later) - fault.at_ms) / 1000 if later else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value that ``share`` of all do not exceed (nearest rank); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def longest_gap_s(seen: Sequence[Certified], since_ms: int = 0, until_ms: int | None = None) -> float | None:
    """The longest wait for a certificate between two moments; None if there is nothing to measure.

    Waits that began before ``since_ms`` count from there; with ``until_ms`` the one that goes on then counts.
    """
    times = sorted(entry.seen_ms for entry in seen if entry.seen_ms >= since_ms)
    if until_ms is not None:
        times = [time for time in times if time <= until_ms] + [until_ms]
    if since_ms:
        times = [since_ms, *times]
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    return max(waits) / 1000 if waits else None


def left_out_s(seen: Sequence[Certified], peer: str, since_ms: int, until_ms: int) -> float:
    """The longest time within which others certified epochs without ``peer`` (its id as metrics show it).

    Counted from the last certificate with it (or ``since_ms``) to the next with it (or ``until_ms``); 0 if it
    was in every certificate.
    """
    longest, with_it, missed = 0, since_ms, False
    for entry in sorted(seen, key=lambda entry: entry.seen_ms):
        if not since_ms <= entry.seen_ms <= until_ms:
            continue
        if peer in entry.contributors:
            longest = max(longest, entry.seen_ms - with_it) if missed else longest
            with_it, missed = entry.seen_ms, False
        else:
            missed = True
    if missed:
        longest = max(longest, until_ms - with_it)
    return longest / 1000


def seen_between(metrics: Metrics, names: Iterable[str], since_ms: int, until_ms: int) -> list[int]:
    """The epochs that these peers saw certified between two moments."""
    records = epoch_records(metrics, names)
    return sorted({r["epoch"] for r in records if since_ms < r["t_ms"] <= until_ms})


def in_a_row(seen: Sequence[Certified], peer: str, since_ms: int) -> int:
    """The longest row of successive certificates since a moment that ``peer`` contributed to."""
    best = row = 0
    for entry in seen:
        if entry.seen_ms > since_ms:
            row = row + 1 if peer in entry.contributors else 0
            best = max(best, row)
    return best


def summarise(report: Report, swarms: Sequence[tuple[Metrics, Sequence[Fault]]]) -> None:
    """Fill in a report's figures from the metrics of the swarms that its scenario ran."""
    waits: list[float] = []
    gaps: list[float] = []
    for metrics, faults in swarms:
        seen = certificates(metrics)
        report.epochs += len(seen)
        report.diverged += divergences(metrics)
        report.faults += len(faults)
        report.highest_attempt = max([report.highest_attempt, *(entry.attempt for entry in seen)])
        found = [(fault, recovery_s(fault, metrics)) for fault in faults]
        waits += [wait for _, wait in found if wait is not None]
        report.failures += [
            f"no certificate followed {fault.what} of {' '.join(fault.struck)}"
            for fault, wait in found
            if wait is None
        ]
        gap = longest_gap_s(seen)
        gaps += [] if gap is None else [gap]
    report.recovery_p50_s, report.recovery_p99_s = percentile(waits, 0.5), percentile(waits, 0.99)
    report.longest_gap_s = max(gaps, default=None)
    if report.diverged or report.failures:
        report.status = "failed"
