"""One rank of torch.distributed's gloo all-reduce, as tools/bench.py measures it.

Argument: JSON with rank, peers, values, epochs, first, address (HOST:PORT of rank 0), interface (or empty).
Prints JSON: seconds of each all-reduce of fp32 in place and its division by the number of ranks, CPU seconds.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time

import torch
import torch.distributed as dist


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> int:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if job.get("interface"):
        os.environ["GLOO_SOCKET_IFNAME"] = job["interface"]
    dist.init_process_group("gloo", f"tcp://{job['address']}", rank=job["rank"], world_size=job["peers"])
    values = torch.randn(job["values"]) * 1e-3
    times, began_cpu_s = [], 0.0
    for turn in range(job["first"] + job["epochs"]):
        dist.barrier()
        if turn == job["first"]:
            began_cpu_s = cpu_s()
        began_s = time.monotonic()
        dist.all_reduce(values)
        values /= job["peers"]
        times.append(time.monotonic() - began_s)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"ring_s": times[job["first"] :], "cpu_s": cpu_s() - began_cpu_s, "peak_bytes": peak}))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
