"""Real peer processes for scenario tests: started, watched through their metrics, ended by pid."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2p_diloco.observe.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]

CONFIG = """
[run]
name = "test"
[run.model]
hidden_size = 32
intermediate_size = 64
layers = 1
heads = 2
kv_heads = 1
[run.inner]
steps = 4
batch_sequences = 2
micro_batch_sequences = 2
seq_len = 32
[run.data]
eval_sequences = 2
[run.agreement]
min_peers = {min_peers}
"""


def descendants(pid: int) -> list[int]:
    """All processes below ``pid`` now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def running(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class PeerProcess:
    """One peer and where it writes."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    children: list[int] = field(default_factory=list)

    @property
    def log(self) -> str:
        return (self.folder / "peer.log").read_text(errors="replace")

    def records(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [r for r in read_metrics(path) if r["kind"] == kind] if path.exists() else []

    def epochs(self) -> dict[int, dict[str, Any]]:
        return {r["epoch"]: r for r in self.records("epoch")}

    def epoch(self) -> int:
        return max(self.epochs(), default=0)

    def notices(self) -> str:
        return "\n".join(r["text"] for r in self.records("notice"))

    def remember_children(self) -> None:
        """Note the processes below this one, to see later whether they are gone."""
        self.children = sorted({*self.children, *descendants(self.process.pid)})


class Processes:
    """Starts peers in ``folder`` and ends every one of them, and what they started, in `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers: list[PeerProcess] = []

    def config(self, min_peers: int, more: str = "") -> list[str]:
        path = self.folder / "run.toml"
        path.write_text(CONFIG.format(min_peers=min_peers) + more)
        return ["--config", str(path)]

    def start(self, name: str, flags: list[str], **environment: str) -> PeerProcess:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "p2p_diloco.peer", "--run-dir", str(folder), "--host", "127.0.0.1"]
        command += ["--plain", "--trainer-threads", "1", "--timeouts.straggler-s", "2", *flags]
        with open(folder / "peer.log", "ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
                start_new_session=True,
            )
        peer = PeerProcess(name, folder, process)
        self.peers.append(peer)
        return peer

    def until(self, what: str, check: Callable[[], bool], limit_s: float = 90.0) -> None:
        """Look again until the check holds; a failure shows every peer's last lines."""
        end = time.monotonic() + limit_s
        while not check():
            for peer in self.peers:
                if peer.process.poll() is None:
                    peer.remember_children()
            if time.monotonic() > end:
                logs = "\n".join(f"--- {p.name} ({p.process.poll()})\n{p.log[-2500:]}" for p in self.peers)
                raise AssertionError(f"never came: {what}\n{logs}")
            time.sleep(0.2)

    def join_flags(self, peer: PeerProcess) -> list[str]:
        """What the peer tells others to join with."""
        pattern = re.compile(r"others join with: .*?(--initial-peers .*)")
        self.until(f"the join line of {peer.name}", lambda: pattern.search(peer.log) is not None)
        found = pattern.search(peer.log)
        assert found is not None
        return found.group(1).split()

    def until_died(self, peer: PeerProcess, number: int) -> None:
        self.until(f"the end of {peer.name}", lambda: peer.process.poll() is not None)
        assert peer.process.returncode == -number, peer.log[-2000:]

    def until_gone(self, pids: list[int], limit_s: float = 20.0) -> None:
        self.until(f"the end of {pids}", lambda: not any(running(pid) for pid in pids), limit_s)

    def stop(self) -> None:
        for peer in self.peers:
            if peer.process.poll() is None:
                peer.remember_children()
                peer.process.send_signal(signal.SIGTERM)
        for peer in self.peers:
            try:
                peer.process.wait(10)
            except subprocess.TimeoutExpired:
                peer.process.kill()
                peer.process.wait()
            for child in peer.children:
                if running(child):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)


@contextlib.contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    made = Processes(folder)
    try:
        yield made
    finally:
        made.stop()
