"""Benchmarks: what is compared runs in turn in one call, and what is printed are medians and their ratios.

    python tools/bench.py codec                  kernels in GB/s, numpy's and torch's loops
    python tools/bench.py error                  what the mean loses: ring, direct, and whole-tensor 6 sigma
    python tools/bench.py loop                   how late the event loop is while workers quantise
    python tools/bench.py loopback               4 peers x 25 million fp32 against gloo (and hivemind)
    python tools/bench.py wan SCENARIO ...       the same on emulated links (tools/wan.py; needs root)
    python tools/bench.py order SCENARIO ...     how rings get faster as the swarm learns its links

Each prints a table; --json FILE also writes the figures, --page FILE puts the table between its marks there.
hivemind needs an environment of its own (it does not work with numpy 2.4): name its interpreter with
--hivemind PYTHON, or it is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bench_numbers as numbers
from bench_runs import BenchError, Place, Result, gloo, hivemind, ours
from wan import Wan, WanError, unavailable
from wan_scenario import ScenarioError, load

from p2p_diloco.identity import PeerId
from p2p_diloco.numerics.int8 import Codec
from p2p_diloco.numerics.layout import Layout
from p2p_diloco.proto.speed import fastest_order
from p2p_diloco.sim.tables import put_between

MB = 1e6


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, CPython {platform.python_version()}"


def command_codec(options: argparse.Namespace) -> tuple[str, Any]:
    values = options.values
    chunk = Layout.choose(values).chunk_values
    found = {
        name: numbers.in_own_thread(torch_loops, lambda: numbers.kernel_rates(values, chunk))
        for name, torch_loops in (("numpy", False), ("torch", True))
    }
    rows = [
        (
            name,
            f"{found['numpy'][name]:.1f}",
            f"{found['torch'][name]:.1f}",
            f"{found['torch'][name] / found['numpy'][name]:.2f}",
            f"{found['torch'][name] / found['torch']['memory copy']:.2f}",
        )
        for name in found["numpy"]
    ]
    columns = ("one thread", "numpy's loops GB/s", "torch's loops GB/s", "ratio", "to a memory copy")
    head = f"{values:,} fp32 values in chunks of {chunk:,}; GB/s of fp32 handled, best of {numbers.TIMES}."
    return f"{head}\n\n{table(columns, rows)}", found


def command_error(options: argparse.Namespace) -> tuple[str, Any]:
    found, rows = [], []
    for kind in numbers.KINDS:
        for peers in (2, 4, 8, 16, 32, 64):
            ring, direct, sigma = numbers.mean_errors(peers, kind)
            found.append({"kind": kind, "peers": peers, "ring": ring, "direct": direct, "six_sigma": sigma})
            shown = (f"{ring:.4f}", f"{direct:.4f}", f"{sigma:.4f}", f"{sigma / ring:.1f}")
            rows.append((kind, str(peers), *shown))
    columns = ("deltas", "peers", "ring", "direct", "6 sigma, whole tensor", "6 sigma to ring")
    head = "Relative error of the mean of one round (root of lost over whole energy), independent deltas."
    return f"{head}\n\n{table(columns, rows)}", found


def command_loop(options: argparse.Namespace) -> tuple[str, Any]:
    found: dict[str, list[float]] = {}
    for threads in (0, 1, 2):
        name = f"{threads} workers quantise 1 GB" if threads else "nothing to do"
        found[name] = asyncio.run(numbers.loop_lateness_ms(10**9, max(1, threads), threads > 0))
    rows = []
    for name, late in found.items():
        cuts = statistics.quantiles(late, n=100)
        rows.append((name, str(len(late)), f"{cuts[49]:.2f}", f"{cuts[98]:.2f}", f"{max(late):.2f}"))
    columns = ("meanwhile", "times asked", "late by ms, median", "p99", "most")
    return f"An event loop that wants to wake up every 5 ms.\n\n{table(columns, rows)}", found


def compared(place: Place, options: argparse.Namespace, **config: Any) -> list[Result]:
    """Ours (with this config) and the others in turn, ``rounds`` times; who cannot run is named once and left
    out."""
    epochs, values = options.epochs, options.values
    runs: dict[str, Callable[[], Result]] = {"p2p_diloco": lambda: ours(place, values, epochs, **config)}
    if not options.alone:
        runs["gloo fp32"] = lambda: gloo(place, values, epochs)
    for compression in ("none", "fp16", "uniform8") if options.hivemind else ():
        runs[f"hivemind {compression}"] = lambda compression=compression: hivemind(  # type: ignore[misc]
            place, options.hivemind, values, epochs, compression
        )
    found: dict[str, Result] = {}
    for _ in range(options.rounds):
        for name, run in list(runs.items()):
            try:
                result = run()
            except BenchError as error:
                print(f"bench: {name}: {error}", file=sys.stderr)
                del runs[name]
                continue
            if name in found:
                found[name].take(result)
            else:
                found[name] = result
    if "p2p_diloco" not in found:
        raise BenchError("our own peers did not run")
    return list(found.values())


def row_of(result: Result, best: Result, values: int) -> tuple[str, ...]:
    gigabytes = 4 * values / 1e9
    return (
        result.name,
        f"{result.round_s:.2f}",
        f"{result.round_s / best.round_s:.2f}",
        f"{sorted(result.epochs_s)[len(result.epochs_s) // 2]:.2f}" if result.epochs_s else "-",
        f"{result.sent_bytes / MB:.1f}" if result.sent_bytes else "-",
        f"{result.cpu_s / gigabytes:.1f}",
        f"{result.peak_bytes / MB:.0f}",
        f"{1e3 * result.lag_s:.0f}" if result.lag_s else "-",
    )


COLUMNS = (
    "what",
    "round s",
    "to ours",
    "whole epoch s",
    "MB sent a peer",
    "CPU s per GB, all peers",
    "peak MB a peer",
    "loop late at most ms",
)


def command_loopback(options: argparse.Namespace) -> tuple[str, Any]:
    results = compared(Place(options.peers), options)
    rows = [row_of(result, results[0], options.values) for result in results]
    head = (
        f"{options.peers} peers x {options.values:,} fp32 values on loopback, medians of "
        f"{len(results[0].rounds_s)} rounds, in turn."
    )
    return f"{head}\n\n{table(COLUMNS, rows)}", [asdict(result) for result in results]


def slowest_bits_per_s(wan: Wan) -> float:
    """The slowest edge of the best ring over all peers (two ends share none of its links: found exactly up to
    ten peers, nearly above)."""
    scenario, count = wan.scenario, len(wan.addresses)
    peers = tuple(PeerId(bytes([peer]) * 32) for peer in range(count))
    rates = {
        (peers[a], peers[b]): round((scenario.path_bits_per_s(a, b) or 1e12) / 1e3)
        for a in range(count)
        for b in range(count)
        if a != b
    }
    order = fastest_order(peers, rates, frozenset())
    return 1e3 * min(rates[edge] for edge in zip(order, [*order[1:], order[0]], strict=True))


def networks(options: argparse.Namespace) -> Iterator[tuple[str, Wan, Place]]:
    """Each scenario that was asked for, up while it is looked at."""
    reason = unavailable()
    if reason:
        raise WanError(reason)
    for name in options.scenario:
        scenario = load(name, options.scale)
        with Wan(scenario) as wan:
            yield name, wan, Place(len(scenario.peers), wan)


def command_wan(options: argparse.Namespace) -> tuple[str, Any]:
    found, rows = [], []
    for name, wan, place in networks(options):
        results = compared(place, options, first=options.first)
        line = slowest_bits_per_s(wan)
        for result in results:
            share = 8 * result.sent_bytes / result.round_s / line if result.sent_bytes else 0.0
            rows.append(
                (
                    f"{name}, {place.peers} peers",
                    *row_of(result, results[0], options.values)[:5],
                    f"{line / 1e6:.0f}",
                    f"{100 * share:.0f} %",
                )
            )
            found.append({"scenario": name, "line_bits_per_s": line, "share": share, **asdict(result)})
        print(
            table(("scenario", *COLUMNS[:5], "line Mbit/s", "share of it"), rows[-len(results) :]), flush=True
        )
    columns = ("scenario", *COLUMNS[:5], "slowest line Mbit/s", "share of it")
    head = (
        f"{options.values:,} fp32 values; rates of each scenario divided by its scale. The line is the "
        "slowest edge of the best ring; the share counts the bytes that one peer sends. Ours counts from "
        f"epoch {options.first + 1} on, when it knows its links."
    )
    return f"{head}\n\n{table(columns, rows)}", found


def command_order(options: argparse.Namespace) -> tuple[str, Any]:
    found, rows = [], []
    for name, wan, place in networks(options):
        result = ours(place, options.values, options.epochs, first=0)
        line = slowest_bits_per_s(wan)
        sends = 2 * (place.peers - 1) / place.peers * Codec("int8").payload_bytes(options.values)
        times = " ".join(f"{took:.1f}" for took in result.rounds_s)
        rows.append((f"{name}, {place.peers} peers", times, f"{8 * sends / line:.1f}"))
        found.append({"scenario": name, "line_bits_per_s": line, **asdict(result)})
    columns = ("scenario", "round s, epoch by epoch", "bytes over the slowest edge of the best ring, s")
    head = (
        f"{options.values:,} fp32 values. The first ring is ordered by id; each later one by what was "
        "measured until then."
    )
    return f"{head}\n\n{table(columns, rows)}", found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("codec", "error", "loop", "loopback", "wan", "order"):
        each = commands.add_parser(name)
        each.add_argument("--json", default="", help="write the figures here")
        each.add_argument("--page", default="", help="put the table between its marks in this file")
        each.add_argument("--values", type=int, default=25_000_000, help="fp32 values")
        if name in ("wan", "order"):
            each.add_argument("scenario", nargs="+", help="names from tools/wan/, or files")
            each.add_argument("--scale", type=float, help="instead of the scenario's own")
            each.add_argument(
                "--first", type=int, default=8, help="epochs before ours count: rates get known"
            )
        if name in ("loopback", "wan", "order"):
            each.add_argument("--peers", type=int, default=4, help="loopback only")
            each.add_argument("--epochs", type=int, default=5, help="counted in each run")
            each.add_argument("--rounds", type=int, default=2, help="how often all are run, in turn")
            each.add_argument("--hivemind", default="", help="an interpreter that has hivemind")
            each.add_argument("--alone", action="store_true", help="only ours")
    options = parser.parse_args(arguments)
    try:
        text, found = globals()[f"command_{options.command}"](options)
    except (BenchError, WanError, ScenarioError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    text = f"{text}\n\n{machine()}."
    print(text)
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": machine(), "found": found}, indent=1) + "\n")
    if options.page:
        page = Path(options.page)
        page.write_text(put_between(page.read_text(), options.command, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
