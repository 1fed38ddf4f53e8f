"""``python -m p2p_diloco.sim``: thousands of simulated swarms, one failing seed in detail, planted bugs.

run --seeds 0:10000 --jobs 2     all seeds; every failure with its seed, then the totals
replay SEED [--plan FILE]        one seed in detail; the same trace hash every time
shrink SEED                      the smallest plan that still fails, as JSON for --plan
bugs                             plants each known bug and tells which seed caught it
figures [--out FILE]             the tables of docs/RELIABILITY.md, put between its marks
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from p2p_diloco.sim import figures, recoveries
from p2p_diloco.sim.bugs import BUGS
from p2p_diloco.sim.faults import Plan, draw
from p2p_diloco.sim.run import Result, run_plan, run_seed
from p2p_diloco.sim.shrink import shrink
from p2p_diloco.sim.tables import Table, put_between

_MOST_SEEDS = 1000  # in which every planted bug must be caught


def say(text: str) -> None:
    print(text, flush=True)


def run_many(first: int, last: int, jobs: int) -> Iterator[Result]:
    """The results of seeds first..last-1, in order, on several processes."""
    if jobs <= 1:
        yield from map(run_seed, range(first, last))
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(run_seed, range(first, last), chunksize=8)


def command_run(options: argparse.Namespace) -> int:
    first, _, last = options.seeds.partition(":")
    began, failed, rules = time.monotonic(), [], Counter[str]()
    seeds = epochs = 0
    virtual_s = 0.0
    for result in run_many(int(first), int(last or int(first) + 1), options.jobs):
        seeds, epochs, virtual_s = seeds + 1, epochs + result.epochs, virtual_s + result.virtual_s
        if not result.ok:
            failed.append(result.seed)
            rules[result.rule] += 1
            say(f"seed {result.seed} {result.rule}: {result.text.splitlines()[0][:200]}")
        if seeds % 1000 == 0:
            say(f"{seeds} seeds, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    say(
        f"{seeds} seeds, {epochs} epochs certified in {virtual_s / 3600:.1f} h of virtual time, "
        f"{len(failed)} failed {dict(rules)} ({time.monotonic() - began:.0f} s)"
    )
    return 1 if failed else 0


def command_replay(options: argparse.Namespace) -> int:
    plan = draw(options.seed)
    if options.plan:
        plan = Plan.from_json(json.loads(Path(options.plan).read_text()))
    result = run_plan(plan, options.seed)
    say(json.dumps(plan.to_json()))
    for line in result.faults:
        say(f"  {line}")
    say(f"seed {options.seed}: {result.epochs} epochs, {result.steps} steps, trace {result.trace}")
    say(result.text + "\n" + result.report if result.rule else "no rule broken")
    return 1 if result.rule else 0


def command_shrink(options: argparse.Namespace) -> int:
    first = run_seed(options.seed)
    if first.ok:
        say(f"seed {options.seed} breaks no rule")
        return 0
    best = shrink(first.plan, options.seed, first.rule, say)
    say(json.dumps(best.plan.to_json()))
    for line in best.faults:
        say(f"  {line}")
    say(best.text)
    return 1


def traces(seeds: range, bug: str = "") -> list[list[str]]:
    """The trace hashes of some seeds in two processes that hash differently."""
    found = []
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "p2p_diloco.sim", "traces", str(seeds.start), str(seeds.stop)]
        command += ["--bug", bug] if bug else []
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(done.stdout.split())
    return found


def command_traces(options: argparse.Namespace) -> int:
    if options.bug:
        with BUGS[options.bug][0]():
            for seed in range(options.first, options.last):
                say(run_seed(seed).trace)
        return 0
    for seed in range(options.first, options.last):
        say(run_seed(seed).trace)
    return 0


def catch(name: str, most: int = _MOST_SEEDS) -> tuple[int, str]:
    """Plant a bug and run seeds until a checker tells; the seed (-1 if none did) and the rule."""
    bug, rules = BUGS[name]
    if rules == ("trace",):
        one, other = traces(range(0, 4), name)
        return (
            next((i for i, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), -1),
            "trace",
        )
    for seed in range(most):
        with bug():
            result = run_seed(seed)
        if result.rule in rules:
            return seed, result.rule
    return -1, ""


def command_bugs(options: argparse.Namespace) -> int:
    missed = 0
    for name in BUGS:
        seed, rule = catch(name)
        missed += seed < 0
        say(f"{name}: " + (f"caught by {rule} at seed {seed}" if seed >= 0 else "NOT CAUGHT"))
    return 1 if missed else 0


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """All tables of the page, smaller ones with ``--short``."""
    jobs, short = options.jobs, options.short
    count = 40 if short else 500  # of the other runs
    yield figures.seeds(options.seeds, jobs, say)
    yield figures.single_crashes((3,) if short else (3, 4), jobs, step=20 if short else 1)
    yield figures.ring_sizes((1, 2, 3, 8) if short else (1, 2, 3, 4, 5, 8, 16, 32, 48, 64), jobs)
    yield figures.agreement((4, 16) if short else (4, 16, 64, 256), jobs)
    yield recoveries.deaths_in_a_ring(max(1, count // 20), jobs)
    yield recoveries.many_at_once(max(1, count // 25), jobs)
    yield recoveries.churn(max(1, count // 50), jobs, epochs=5 if short else 20)
    yield recoveries.partitions(max(1, count // 25), jobs)


def command_figures(options: argparse.Namespace) -> int:
    written, violations = [], 0
    for table in tables(options):
        written.append(table.markdown())
        violations += len(table.violations)
        say(written[-1] + "\n")
        if options.out:  # after each table: an hour's work is not lost with the last one
            page = Path(options.out)
            page.write_text(put_between(page.read_text(), "figures", "\n\n".join(written)))
    return 1 if violations else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m p2p_diloco.sim", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--seeds", default="0:200", help="FIRST:LAST, the last one not included")
    run.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    replay = commands.add_parser("replay")
    replay.add_argument("seed", type=int)
    replay.add_argument("--plan", default="", help="a JSON file with another plan than the seed's own")
    smaller = commands.add_parser("shrink")
    smaller.add_argument("seed", type=int)
    commands.add_parser("bugs")
    page = commands.add_parser("figures")
    page.add_argument("--out", default="", help="the page to put the tables into")
    page.add_argument("--seeds", type=int, default=10_000)
    page.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    page.add_argument("--short", action="store_true", help="little of everything: minutes")
    hashes = commands.add_parser("traces")
    hashes.add_argument("first", type=int)
    hashes.add_argument("last", type=int)
    hashes.add_argument("--bug", default="")
    options = parser.parse_args(arguments)
    found: int = globals()[f"command_{options.command}"](options)
    return found


if __name__ == "__main__":
    sys.exit(main())
