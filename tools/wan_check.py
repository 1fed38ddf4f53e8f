"""Measures an emulated network with real TCP connections and holds the figures against the scenario's.

How to read the table: rates are payload, and the configured one has the headers already taken off. "off"
holds the mean of the jitter (half of it each way) and what waking the two programs costs. A ratio a little
over 1 means that bytes which a hole had held back were counted in the window; one below 1 over a long way, on
a lossy link, or with all pairs at once is what one TCP connection makes of that way, not an error of the
emulator.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from wan import Wan, WanError

PROBE = str(Path(__file__).resolve().with_name("wan_probe.py"))
ECHOES = 20
GOODPUT = 1448 / 1500  # of a full segment's bytes that are payload: IPv4, TCP, time stamps


@dataclass(frozen=True)
class Line:
    """What one ordered pair should be and is; rates in bits per second of payload."""

    source: str
    target: str
    delay_s: float
    trip_s: float
    rate: float
    measured: float

    def text(self) -> str:
        off = f"{1e3 * (self.trip_s - self.delay_s):+8.2f}"
        trip = f"{1e3 * self.delay_s:9.2f} {1e3 * self.trip_s:9.2f} {off}"
        ratio = f"{self.measured / self.rate:6.2f}" if self.rate else "     -"
        rate = f"{self.rate / 1e6:10.1f}" if self.rate else "         -"
        return f"{self.source:>14} {self.target:>14} {trip} {rate} {self.measured / 1e6:10.1f} {ratio}"


HEAD = (
    f"{'from':>14} {'to':>14} {'rtt ms':>9} {'measured':>9} {'off':>8} "
    f"{'Mbit/s':>10} {'measured':>10} {'ratio':>6}"
)


def start(wan: Wan, peer: int, *arguments: str) -> subprocess.Popen[str]:
    command = wan.command(peer, [sys.executable, "-S", PROBE, *arguments])
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def result(process: subprocess.Popen[str]) -> str:
    out, _ = process.communicate()
    if process.returncode:
        raise WanError(f"a probe ended with status {process.returncode}")
    return out


def warm_s(wan: Wan, a: int, b: int, seconds: float) -> float:
    """Slow start is left out: some tens of round trips, at most half of the time."""
    return min(seconds / 2, 0.2 + 20 * wan.scenario.round_trip_s(a, b))


def start_stream(wan: Wan, a: int, b: int, seconds: float, streams: int) -> subprocess.Popen[str]:
    warm = warm_s(wan, a, b, seconds)
    return start(wan, a, "stream", wan.addresses[b], str(seconds), str(warm), str(streams))


def line(wan: Wan, a: int, b: int, trip_s: float, measured: float) -> Line:
    peers, scenario = wan.scenario.peers, wan.scenario
    rate = scenario.path_bits_per_s(a, b) * GOODPUT
    return Line(peers[a].name, peers[b].name, scenario.round_trip_s(a, b), trip_s, rate, measured)


def check(wan: Wan, seconds: float, streams: int, together: bool) -> int:
    """Measure each neighbour pair of the ring of all peers, print the table; 0 unless a probe failed."""
    count = len(wan.addresses)
    ring = [(n, (n + 1) % count) for n in range(count)]
    servers = [start(wan, n, "serve") for n in range(count)]
    try:
        for server in servers:
            if server.stdout is None or not server.stdout.readline():
                raise WanError("a probe did not start")
        how = "all pairs at once" if together else "one pair after another"
        print(f"{wan.scenario.name}: {wan.scenario.about}")
        print(f"rates divided by {wan.scenario.scale:g}; TCP connections per pair: {streams}; {how}")
        print(HEAD)
        trips = {(a, b): round_trip(wan, a, b) for a, b in ring}
        if together:
            running = [(a, b, start_stream(wan, a, b, seconds, streams)) for a, b in ring]
            rates = [(a, b, float(result(process))) for a, b, process in running]
            for a, b, rate in rates:
                print(line(wan, a, b, trips[a, b], rate).text())
            print(f"sum {sum(rate for _, _, rate in rates) / 1e6:,.0f} Mbit/s")
        else:
            for a, b in ring:
                rate = float(result(start_stream(wan, a, b, seconds, streams)))
                print(line(wan, a, b, trips[a, b], rate).text(), flush=True)
        summary(wan)
        return 0
    finally:
        for server in servers:
            server.terminate()
            server.wait()
            if server.stdout is not None:
                server.stdout.close()


def round_trip(wan: Wan, a: int, b: int) -> float:
    """The median of some echoes over one connection, which costs least when nothing else runs."""
    trips: list[float] = json.loads(result(start(wan, a, "echo", wan.addresses[b], str(ECHOES))))
    return statistics.median(trips)


def summary(wan: Wan) -> None:
    found = wan.statistics()
    pairs = found["pairs"].values()
    total = {key: sum(pair[key] for pair in pairs) for key in next(iter(pairs))}
    dropped = total["dropped_up"] + total["dropped_link"] + total["dropped_down"]
    print(
        f"packets (bundles) {total['packets']:,}, lost {total['lost']:,}, dropped by full queues {dropped:,} "
        f"and by overrun devices {found['overruns']:,}; the emulator was late by "
        f"{found['late_mean_ms']:.3f} ms on average, {found['late_most_ms']:.1f} ms at most"
    )
