"""Does harm to real swarms of peer processes and measures what comes of it.

Runs scenarios (all, or those named) on this machine, in loopback or in network namespaces made for the
purpose, and prints for each: epochs certified, digests that diverged (must be 0), how long it took from a
fault to the next certificate, and the longest wait for one. Writes OUT/chaos.json. The exit status is 1 if a
digest diverged or an expectation did not hold. What a machine or user cannot make (namespaces and small disks
need Linux and root) is skipped, with the reason.

    python tools/chaos.py [scenario ...] [--out FOLDER] [--table PAGE] [--peers N] [--minutes M] [--seed S]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from chaosnet import CannotBeMadeError
from chaosreport import Report, summarise
from chaosscenarios import SCENARIOS, Options, Stage
from chaosswarm import ROOT, NeverCameError
from rich.console import Console
from rich.table import Table

from p2p_diloco.sim.tables import put_between


def run_scenario(name: str, options: Options, console: Console) -> Report:
    """Run one scenario to its end, whatever that is, and report it."""
    report = Report(name)
    began = time.monotonic()

    def say(text: str) -> None:
        line = f"[{name} {time.monotonic() - began:5.1f} s] {text}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    stage = Stage(report, options, say)
    say(str(SCENARIOS[name].__doc__).splitlines()[0])
    try:
        SCENARIOS[name](stage)
    except CannotBeMadeError as reason:
        report.status, report.reason = "skipped", str(reason)
        say(f"skipped: {reason}")
    except NeverCameError as failure:
        stage.expect(False, str(failure))
    report.seconds = round(time.monotonic() - began, 1)
    if report.status != "skipped":
        summarise(report, [(swarm.metrics(), swarm.faults) for swarm in stage.swarms])
    return report


def show_seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def picture(reports: Sequence[Report]) -> Table:
    """One row per scenario; the recovery times are from a fault to the next certificate of a survivor."""
    table = Table(title="chaos")
    table.add_column("scenario", no_wrap=True)
    table.add_column("outcome", no_wrap=True)
    for column in ("epochs", "diverged", "faults", "p50 s", "p99 s", "gap s", "attempt", "took s"):
        table.add_column(column, justify="right", no_wrap=True)
    for report in reports:
        table.add_row(
            report.name,
            report.status,
            str(report.epochs),
            str(len(report.diverged)),
            str(report.faults),
            show_seconds(report.recovery_p50_s),
            show_seconds(report.recovery_p99_s),
            show_seconds(report.longest_gap_s),
            str(report.highest_attempt),
            show_seconds(report.seconds),
        )
    return table


def markdown(reports: Sequence[Report], options: Options) -> str:
    """The table of docs/RELIABILITY.md, with what the scenarios noted below it."""
    lines = [
        f"{options.peers} peers; recovery is from a fault to the next certificate that a peer which was not "
        "struck sees; a gap is the longest wait between two certificates of a swarm, its start included.",
        "",
        "| scenario | outcome | epochs | divergent digests | faults | recovery p50 s | p99 s | longest gap s "
        "| highest attempt |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for report in reports:
        cells = [report.name, report.status, report.epochs, len(report.diverged), report.faults]
        times = (report.recovery_p50_s, report.recovery_p99_s, report.longest_gap_s)
        cells += [*map(show_seconds, times), report.highest_attempt]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines.append("")
    for report in reports:
        said = [report.reason] if report.status == "skipped" else [*report.failures, *report.notes]
        first = [text.splitlines()[0] for text in (str(SCENARIOS[report.name].__doc__), *said)]
        lines.append(f"- **{report.name}**: {first[0]} {'; '.join(first[1:])}.")
    return "\n".join(lines)


def conclude(reports: Sequence[Report], options: Options, console: Console, page: Path | None = None) -> int:
    """Print the table and what did not hold, write chaos.json, and return the exit status.

    With ``page`` the table also goes between that page's marks.
    """
    console.print(picture(reports))
    for report in reports:
        if report.status == "skipped":
            console.print(f"{report.name} was skipped: {report.reason}", markup=False, soft_wrap=True)
        for line in [*report.diverged, *report.failures]:
            console.print(f"{report.name}: {line}", highlight=False, markup=False, soft_wrap=True)
    settings = {key: str(value) for key, value in dataclasses.asdict(options).items()}
    document = {"options": settings, "scenarios": [dataclasses.asdict(report) for report in reports]}
    (options.out / "chaos.json").write_text(json.dumps(document, indent=1) + "\n")
    if page is not None:
        page.write_text(put_between(page.read_text(), "chaos", markdown(reports, options)))
    console.print(f"written: {options.out / 'chaos.json'}; each peer's log and metrics lie beside it")
    return 1 if any(report.bad for report in reports) else 0


def _end(number: int, frame: FrameType | None) -> None:
    """SIGTERM unwinds as Ctrl-C does, so that everything is cleaned up."""
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", nargs="*", help="which to run (default: all but quick)")
    parser.add_argument("--out", type=Path, help="where to put everything (default: runs/chaos-TIME)")
    parser.add_argument("--table", type=Path, help="a page to put the table into, between its chaos marks")
    parser.add_argument("--peers", type=int, default=5, help="peers in a swarm, 3 to 9 (default: 5)")
    parser.add_argument("--minutes", type=float, default=2.0, help="length of kill_loop (default: 2)")
    parser.add_argument("--seed", type=int, help="of kill_loop's dice (default: drawn, and printed)")
    parser.add_argument("--list", action="store_true", help="name the scenarios and end")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        for name, scenario in SCENARIOS.items():
            print(f"{name:13} {str(scenario.__doc__).splitlines()[0]}")
        return 0
    unknown = [name for name in chosen.scenario if name not in SCENARIOS]
    if unknown:
        parser.error(f"unknown scenario {' '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    if not 3 <= chosen.peers <= 9:
        parser.error("--peers must be 3 to 9")
    if chosen.table is not None:
        try:
            put_between(chosen.table.read_text(), "chaos", "")  # a page without marks is told of now
        except (OSError, ValueError) as error:
            parser.error(f"--table: {error}")
    out = (chosen.out or ROOT / "runs" / time.strftime("chaos-%Y%m%d-%H%M%S")).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        parser.error(f"{out} is not empty")
    seed = random.SystemRandom().randrange(1 << 32) if chosen.seed is None else chosen.seed
    options = Options(out=out, peers=chosen.peers, minutes=chosen.minutes, seed=seed)
    signal.signal(signal.SIGTERM, _end)
    console = Console(width=None if sys.stdout.isatty() else 110)
    names = chosen.scenario or [name for name in SCENARIOS if name != "quick"]
    reports = [run_scenario(name, options, console) for name in names]
    return conclude(reports, options, console, chosen.table)


if __name__ == "__main__":
    sys.exit(main())
