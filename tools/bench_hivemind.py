"""One peer of hivemind's averager, as tools/bench.py measures it; runs in an environment that has hivemind.

Argument: JSON with index, peers, values, epochs, folder, compression, host. Matchmaking comes first and does
not count: the time is from the moment when all may start until each has its result.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import hivemind
import torch
from hivemind import compression
from hivemind.averaging import DecentralizedAverager

FIRST = 1
COMPRESSIONS = {
    "none": compression.NoCompression,
    "fp16": compression.Float16Compression,
    "uniform8": compression.Uniform8BitQuantization,
}
TICKS = os.sysconf("SC_CLK_TCK")


def family_cpu_s() -> float:
    """CPU seconds of this process and all its descendants (hivemind works in forked processes)."""
    parents, spent = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        pid = int(path.parent.name)
        parents[pid], spent[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
    total, me = 0.0, os.getpid()
    for pid in spent:
        at = pid
        while at in parents and at != me:
            at = parents[at]
        total += spent[pid] if at == me else 0.0
    return total


def meet(folder: Path, name: str, index: int, peers: int, limit_s: float = 120.0) -> None:
    """Wait until every peer came here."""
    (folder / f"{name}-{index}").touch()
    end_s = time.monotonic() + limit_s
    while len(list(folder.glob(f"{name}-*"))) < peers:
        if time.monotonic() > end_s:
            raise TimeoutError(f"not all peers came to {name}")
        time.sleep(0.002)


def main() -> int:
    job = json.loads(sys.argv[1])
    folder, index, peers = Path(job["folder"]), job["index"], job["peers"]
    torch.set_num_threads(1)
    entry = folder / "maddrs.json"
    known: list[str] = []
    if index:
        while not entry.exists():
            time.sleep(0.05)
        known = json.loads(entry.read_text())
    dht = hivemind.DHT(initial_peers=known, host_maddrs=[f"/ip4/{job['host']}/tcp/0"], start=True)
    if not index:
        (folder / "maddrs.tmp").write_text(json.dumps([str(each) for each in dht.get_visible_maddrs()]))
        os.replace(folder / "maddrs.tmp", entry)
    averager = DecentralizedAverager(
        [torch.randn(job["values"]) * 1e-3],
        dht,
        prefix="bench",
        target_group_size=peers,
        min_group_size=peers,
        min_matchmaking_time=5.0,
        compression=COMPRESSIONS[job["compression"]](),
        start=True,
    )
    times, began_cpu_s = [], 0.0
    for turn in range(FIRST + job["epochs"]):
        meet(folder, f"begin-{turn}", index, peers)
        control = averager.step(wait=False, require_trigger=True, timeout=120.0)
        while control.stage.name in ("IDLE", "LOOKING_FOR_GROUP") and not control.done():
            time.sleep(0.002)
        meet(folder, f"group-{turn}", index, peers)
        if turn == FIRST:
            began_cpu_s = family_cpu_s()
        began_s = time.monotonic()
        control.allow_allreduce()
        if control.result(timeout=300.0) is None:
            raise RuntimeError("hivemind found no group")
        times.append(time.monotonic() - began_s)
    spent_s = family_cpu_s() - began_cpu_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ring_s": times[FIRST:], "cpu_s": spent_s, "peak_bytes": peak}), flush=True)
    meet(folder, "end", index, peers)
    averager.shutdown()
    dht.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
