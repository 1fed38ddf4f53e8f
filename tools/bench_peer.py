"""One of our peers as tools/bench.py measures it: the real peer with a trainer that is done at once.

Started with one JSON argument (`Job`); prints one JSON line (`Found`) when its last epoch is certified. Peers
find each other through a folder that all can write to. Nothing here is made faster for the measurement: links
are encrypted, statements signed, votes and rounds fsynced, states hashed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from p2p_diloco.bridge import FunctionTrainer, Round
from p2p_diloco.config import AgreementConfig, CodecConfig, InnerConfig, PeerConfig, RunConfig
from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import Identity
from p2p_diloco.net.discovery import PeerRecord, RunEntry, count_runs, make_record, read_record
from p2p_diloco.net.driver import Watcher
from p2p_diloco.node import Parts, found_run, join_run
from p2p_diloco.numerics.layout import Schema, TensorSpec
from p2p_diloco.numerics.state import StateBuffers

LAG_EVERY_S = 0.005  # how often the event loop is asked whether it is on time


@dataclass(frozen=True)
class Job:
    """``first``: epochs that do not count (links and lanes open in them). ``peer``, ``run``: config keys."""

    folder: str
    index: int
    peers: int
    values: int
    epochs: int
    host: str = "127.0.0.1"
    first: int = 2
    peer: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """Per counted epoch, in seconds: the ring (from the view to the last chunk in the copy) and the whole
    epoch (from certificate to certificate). The rest is over all counted epochs."""

    ring_s: list[float] = field(default_factory=list)
    epoch_s: list[float] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    quantisation_error: float = 0.0
    cpu_s: float = 0.0
    lag_s: float = 0.0
    peak_bytes: int = 0
    root: str = ""


class FolderDiscovery:
    """`Discovery` over files in one folder."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._folder, self._identity, self._sequence = folder, identity, 0

    async def start(self) -> None:
        """Nothing to do."""

    async def announce(self, run_id: bytes, name: str, addresses: tuple[str, ...], reachability: str) -> None:
        self._sequence += 1
        data = make_record(self._identity, run_id, name, addresses, self._sequence, reachability)
        path = self._folder / f"{self._identity.peer_id.hex()}.record"
        path.with_suffix(".tmp").write_bytes(data)
        os.replace(path.with_suffix(".tmp"), path)

    def _records(self) -> list[PeerRecord]:
        found = []
        for path in sorted(self._folder.glob("*.record")):
            with contextlib.suppress(OSError, ProtocolViolation):
                record = read_record(path.read_bytes())
                if record.peer_id != self._identity.peer_id:
                    found.append(record)
        return found

    async def find(self, run_id: bytes) -> list[PeerRecord]:
        return [record for record in self._records() if record.run_id == run_id]

    async def runs(self) -> list[RunEntry]:
        return count_runs(self._records())

    def visible_maddrs(self) -> list[str]:
        return [str(self._folder)]

    def status(self) -> str:
        return f"looking into {self._folder}"

    async def stop(self) -> None:
        """The folder goes with the measurement."""


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Meter:
    """Takes the figures of certified epochs as the peer reports them."""

    def __init__(self, job: Job) -> None:
        self.found, self._job = Found(), job
        self._at_s = self._cpu_s = 0.0

    def on_metric(self, kind: str, values: dict[str, Any]) -> None:
        if kind != "epoch":
            return
        epoch, now_s = int(values["epoch"]), time.monotonic()
        if epoch == self._job.first:
            self._cpu_s, self.found.lag_s = cpu_s(), 0.0
        if epoch > self._job.first:
            self.found.ring_s.append(values["ring_ns"] / 1e9)
            self.found.epoch_s.append(now_s - self._at_s)
            self.found.attempts.append(values["attempt"])
            self.found.sent_bytes.append(values["bytes_sent"])
            self.found.quantisation_error = values["quantisation_error"]
            self.found.root = values["state_root"]
            self.found.cpu_s = cpu_s() - self._cpu_s
        self._at_s = now_s

    async def watch_loop(self) -> None:
        """How late the event loop ever was."""
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(LAG_EVERY_S)
            self.found.lag_s = max(self.found.lag_s, time.monotonic() - before_s - LAG_EVERY_S)


def make_trainer(job: Job) -> FunctionTrainer:
    """The delta is written once, in the first round, and stays: writing it is not what is measured."""
    random = np.random.default_rng(job.index)
    schema = Schema((TensorSpec("weights", (job.values,), "float32"),))
    written = False

    def train(command: Round, anchor: np.ndarray, delta: np.ndarray) -> tuple[int, float]:
        nonlocal written
        if not written:
            delta[:] = random.standard_normal(job.values, np.float32) * np.float32(1e-3)
            written = True
        return 1, 1.0

    return FunctionTrainer(schema, np.zeros(job.values, np.float32), train)


async def measure(job: Job) -> Found:
    folder = Path(job.folder)
    identity, meter = Identity.generate(), Meter(job)
    last = job.first + job.epochs
    run = RunConfig(
        inner=InnerConfig(steps=1),
        codec=CodecConfig(**job.run.get("codec", {})),
        agreement=AgreementConfig(min_peers=job.peers, epochs=last),
        **{key: value for key, value in job.run.items() if key != "codec"},
    )
    own = {"run_dir": folder / f"peer{job.index}", "host": job.host, "checkpoint_every_epochs": 0}
    peer = PeerConfig(**own, initial_peers=("folder",) if job.index else (), **job.peer)
    parts = Parts(
        identity=identity,
        run=None if job.index else run,
        peer=peer,
        make_trainer=lambda run, config: make_trainer(job),
        discovery=FolderDiscovery(folder, identity),
        watcher=Watcher(metric=meter.on_metric),
        allocate=StateBuffers.allocate,
    )
    driver = await (join_run(parts) if job.index else found_run(parts))
    watching = asyncio.get_running_loop().create_task(meter.watch_loop())
    await driver.run()
    watching.cancel()
    meter.found.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return meter.found


def main() -> int:
    logging.basicConfig(level=logging.ERROR, format="%(message)s")
    job = Job(**json.loads(sys.argv[1]))
    import uvloop

    found = uvloop.run(measure(job))
    print(json.dumps(asdict(found)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
