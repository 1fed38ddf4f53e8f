"""Starts the processes that tools/bench.py compares, on loopback or on an emulated wide-area network."""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench_peer import Found, Job
from wan import Wan

HERE = Path(__file__).resolve().parent
LIMIT_S = 900.0  # for one swarm of one size


class BenchError(Exception):
    """A compared thing did not run; the text is one line."""


@dataclass
class Place:
    """Where processes run. Without a WAN: all on loopback."""

    peers: int
    wan: Wan | None = None

    def command(self, peer: int, argv: Sequence[str]) -> list[str]:
        return list(argv) if self.wan is None else self.wan.command(peer, argv)

    def address(self, peer: int) -> str:
        return "127.0.0.1" if self.wan is None else self.wan.addresses[peer]


@dataclass
class Result:
    """One kind of reduction at one place. Seconds per round: the slowest peer's each time."""

    name: str
    rounds_s: list[float] = field(default_factory=list)
    epochs_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0  # per round, all peers together
    peak_bytes: int = 0  # of one peer
    lag_s: float = 0.0  # longest that an event loop was late
    sent_bytes: int = 0  # by one peer in one round
    attempts: int = 0
    error: float = 0.0

    @property
    def round_s(self) -> float:
        return statistics.median(self.rounds_s)

    def take(self, other: Result) -> None:
        """Add a later run of the same thing."""
        count = len(self.rounds_s) + len(other.rounds_s)
        self.cpu_s = (self.cpu_s * len(self.rounds_s) + other.cpu_s * len(other.rounds_s)) / count
        self.rounds_s += other.rounds_s
        self.epochs_s += other.epochs_s
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.lag_s, self.error = max(self.lag_s, other.lag_s), other.error
        self.sent_bytes, self.attempts = other.sent_bytes, max(self.attempts, other.attempts)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_all(place: Place, commands: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Run one command per peer; the JSON that each printed last. Raises BenchError with a failure's words."""
    paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    processes = [
        subprocess.Popen(
            place.command(peer, command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for peer, command in enumerate(commands)
    ]
    found: list[dict[str, Any]] = []
    try:
        for peer, process in enumerate(processes):
            out, complaint = process.communicate(timeout=LIMIT_S)
            lines = out.splitlines()
            if process.returncode or not lines:
                last = (complaint.strip().splitlines() or ["no output"])[-1]
                raise BenchError(f"peer {peer} ended with status {process.returncode}: {last[:300]}")
            found.append(json.loads(lines[-1]))
    except subprocess.TimeoutExpired:
        raise BenchError(f"not done in {LIMIT_S:.0f} s") from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
    return found


def ours(place: Place, values: int, epochs: int, name: str = "p2p_diloco", **config: Any) -> Result:
    """Our peers; ``config``: peer and run keys for `Job`."""
    with scratch_folder() as folder:
        jobs = [
            Job(str(folder), peer, place.peers, values, epochs, host=place.address(peer), **config)
            for peer in range(place.peers)
        ]
        script = str(HERE / "bench_peer.py")
        answers = run_all(place, [[sys.executable, script, json.dumps(asdict(job))] for job in jobs])
    found = [Found(**answer) for answer in answers]
    if len({each.root for each in found}) != 1:
        raise BenchError("the peers ended with different states")
    return Result(
        name,
        [max(times) for times in zip(*(each.ring_s for each in found), strict=False)],
        [max(times) for times in zip(*(each.epoch_s for each in found), strict=False)],
        sum(each.cpu_s for each in found) / epochs,
        max(each.peak_bytes for each in found),
        max(each.lag_s for each in found),
        max(max(each.sent_bytes) for each in found),
        max(max(each.attempts) for each in found),
        max(each.quantisation_error for each in found),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def gloo(place: Place, values: int, epochs: int) -> Result:
    """torch.distributed's gloo all-reduce in fp32."""
    address = f"{place.address(0)}:{free_port()}"
    interface = "" if place.wan is None else "wan0"
    jobs = [
        {
            "rank": rank,
            "peers": place.peers,
            "values": values,
            "epochs": epochs,
            "first": 1,
            "address": address,
            "interface": interface,
        }
        for rank in range(place.peers)
    ]
    return _foreign(place, "gloo fp32", sys.executable, "bench_gloo.py", jobs, epochs, 4 * values)


def hivemind(place: Place, python: str, values: int, epochs: int, compression: str) -> Result:
    """hivemind's DecentralizedAverager, run by the interpreter of an environment that has it."""
    with scratch_folder() as folder:
        jobs = [
            {
                "index": peer,
                "peers": place.peers,
                "values": values,
                "epochs": epochs,
                "folder": str(folder),
                "compression": compression,
                "host": place.address(peer),
            }
            for peer in range(place.peers)
        ]
        return _foreign(place, f"hivemind {compression}", python, "bench_hivemind.py", jobs, epochs, 0)


def _foreign(
    place: Place, name: str, python: str, script: str, jobs: list[dict[str, Any]], epochs: int, payload: int
) -> Result:
    answers = run_all(place, [[python, str(HERE / script), json.dumps(job)] for job in jobs])
    return Result(
        name,
        [max(times) for times in zip(*(answer["ring_s"] for answer in answers), strict=False)],
        cpu_s=sum(answer["cpu_s"] for answer in answers) / epochs,
        peak_bytes=max(answer["peak_bytes"] for answer in answers),
        sent_bytes=round(2 * (place.peers - 1) / place.peers * payload),  # what a ring sends at least
    )
