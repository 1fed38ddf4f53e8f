"""Peer processes for chaos runs: started, killed, stopped, watched through their files, and always ended.

Only processes that were started here are signalled, by pid: a peer's own, and those found below it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaosreport import Certified, Fault, certificates, in_a_row

from p2p_diloco.identity import Identity, PeerId, show

ROOT = Path(__file__).resolve().parent.parent
START_S = 180.0  # patience with starts: torch alone takes some seconds, and all peers share few cores
BACK_S = 150.0  # patience with a restarted peer: start, links, state, two rounds

_START = 19  # index of the start time in what `stat_fields` returns

CONFIG = """
[run]
name = "chaos"
[run.model]
hidden_size = 32
intermediate_size = 64
layers = 1
heads = 2
kv_heads = 1
[run.inner]
steps = 4
batch_sequences = {sequences}
micro_batch_sequences = {sequences}
seq_len = 128
[run.data]
eval_sequences = 2
[run.agreement]
min_peers = {peers}
"""


class NeverCameError(AssertionError):
    """A scenario waited for something until its deadline."""


@dataclass(frozen=True)
class Place:
    """Where a peer runs: its address and ports, and what its command line begins with."""

    host: str
    port: int
    dht_port: int
    prefix: tuple[str, ...] = ()


def loopback_places(count: int) -> list[Place]:
    """Places on 127.0.0.1 with free ports, below the ephemeral ones so that they stay free."""
    places: list[Place] = []
    chosen: set[int] = set()
    while len(places) < count:
        pair = random.SystemRandom().randrange(15_000, 32_000, 2)
        if pair not in chosen and all(_is_free(port) for port in (pair, pair + 1)):
            chosen.add(pair)
            places.append(Place("127.0.0.1", pair, pair + 1))
    return places


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def now_ms() -> int:
    """The clock that peers stamp their metrics with."""
    return time.time_ns() // 1_000_000


def stat_fields(pid: int) -> list[str]:
    """State, parent and the rest of a process's stat line; OSError if it is gone."""
    return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()


def descendants(pid: int) -> list[int]:
    """All processes below ``pid`` now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parents[int(entry.name)] = int(stat_fields(int(entry.name))[1])
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


@dataclass(frozen=True)
class Below:
    """A process below a peer; the start time tells it from a later one that got the same number."""

    pid: int
    start: str

    def running(self) -> bool:
        try:
            fields = stat_fields(self.pid)
            return fields[0] != "Z" and fields[_START] == self.start
        except (OSError, IndexError):
            return False

    def send(self, number: signal.Signals) -> None:
        if self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def identify(pid: int) -> Below | None:
    try:
        return Below(pid, stat_fields(pid)[_START])
    except (OSError, IndexError):
        return None


@dataclass
class Peer:
    """One peer over all its lives. ``orphans``: processes below its past lives."""

    name: str
    folder: Path
    log: Path
    place: Place
    process: subprocess.Popen[bytes] | None = None
    started_ms: int = 0
    log_start: int = 0
    died_ms: int = 0
    below: set[Below] = field(default_factory=set)
    orphans: set[Below] = field(default_factory=set)
    read_to: int = 0
    told: list[dict[str, Any]] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def status(self) -> int | None:
        return None if self.process is None else self.process.poll()

    def life(self) -> str:
        """What it said since its last start."""
        if not self.log.exists():
            return ""
        with open(self.log, "rb") as file:
            file.seek(self.log_start)
            return file.read().decode(errors="replace")

    def records(self) -> list[dict[str, Any]]:
        """Its metrics so far, inner steps left out. Reads only what is new, and only whole lines."""
        path = self.folder / "metrics.jsonl"
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self.read_to)
                whole, newline, _ = file.read().rpartition(b"\n")
            self.read_to += len(whole) + len(newline)
            for line in whole.splitlines():
                with contextlib.suppress(ValueError):  # a line torn by a kill
                    record = json.loads(line)
                    if record["kind"] != "step":
                        self.told.append(record)
        return self.told

    def notices(self, since_ms: int = 0) -> list[str]:
        return [str(r["text"]) for r in self.records() if r["kind"] == "notice" and r["t_ms"] >= since_ms]

    def peer_id(self) -> PeerId:
        seed = bytes.fromhex((self.folder / "identity.key").read_text().split()[-1])
        return Identity(seed).peer_id

    def short_id(self) -> str:
        """Its id as metrics and logs show it."""
        return show(self.peer_id())

    def watch(self) -> None:
        """Note the processes below this one, to see later whether they are gone, and when it died."""
        if self.process is None:
            return
        if self.process.poll() is None:
            found = map(identify, descendants(self.process.pid))
            self.below.update(process for process in found if process is not None)
        elif not self.died_ms:
            self.died_ms = now_ms()
            self.orphans |= self.below
            self.below = set()


class Swarm:
    """Peers of one run in ``folder``. The first founds it, the others join through all that are known."""

    def __init__(
        self, folder: Path, places: Sequence[Place], sequences: int = 8, flags: Sequence[str] = ()
    ) -> None:
        self.folder, self.flags = folder, list(flags)
        self.faults: list[Fault] = []
        self.addresses: dict[str, str] = {}  # the DHT address of each peer, once it has told
        self.run_id = ""
        folder.mkdir(parents=True)
        self.peers = [
            Peer(f"peer{number}", folder / f"peer{number}", folder / f"peer{number}.log", place)
            for number, place in enumerate(places, 1)
        ]
        self.config = folder / "run.toml"
        self.config.write_text(CONFIG.format(sequences=sequences, peers=len(places)))

    # --- starting ---

    def found(self, **kills: str) -> None:
        """Start all peers; ``kills`` gives some, by name, a failpoint. Returns once epoch 2 is certified."""
        founder = self.peers[0]
        self.start(founder, ["--config", str(self.config)], kills.get(founder.name, ""))
        self.learn_address(founder)
        for peer in self.peers[1:]:
            self.start(peer, self.join_flags(peer), kills.get(peer.name, ""))
        self.until("epoch 2", lambda: self.height() >= 2, START_S)
        for peer in self.peers[1:]:
            self.learn_address(peer)

    def join_flags(self, peer: Peer) -> list[str]:
        others = [address for name, address in self.addresses.items() if name != peer.name]
        return ["--initial-peers", *others, "--run-id", self.run_id]

    def start(self, peer: Peer, flags: Sequence[str], kill: str = "") -> None:
        """Start a new life of a peer in its own session; its output goes on in its log."""
        assert not peer.alive, f"{peer.name} is running"
        peer.folder.mkdir(exist_ok=True)
        place = peer.place
        command = [*place.prefix, sys.executable, "-m", "p2p_diloco.peer", "--run-dir", str(peer.folder)]
        command += ["--host", place.host, "--port", str(place.port), "--dht-port", str(place.dht_port)]
        command += ["--plain", "--trainer-threads", "1", "--timeouts.straggler-s", "2", *self.flags, *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        environment.pop("P2P_DILOCO_KILL", None)
        if kill:
            environment["P2P_DILOCO_KILL"] = kill
        peer.log_start = peer.log.stat().st_size if peer.log.exists() else 0
        peer.watch()
        peer.started_ms, peer.died_ms = now_ms(), 0
        with open(peer.log, "ab") as log:
            peer.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )

    def restart(self, peer: Peer, kill: str = "") -> None:
        """Start a dead peer again in its folder; it joins through the others."""
        self.start(peer, self.join_flags(peer), kill)

    def learn_address(self, peer: Peer) -> None:
        """Wait for the line with which others join through this peer."""
        pattern = re.compile(r"--initial-peers (\S+).*--run-id (\S+)")
        self.until(f"the join line of {peer.name}", lambda: pattern.search(peer.life()) is not None, START_S)
        found = pattern.search(peer.life())
        assert found is not None
        self.addresses[peer.name], self.run_id = found.group(1), found.group(2)

    # --- looking ---

    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        return {peer.name: peer.records() for peer in self.peers}

    def certificates(self) -> list[Certified]:
        return certificates(self.metrics())

    def height(self, *peers: Peer) -> int:
        """The newest epoch that any of these peers (none: all) saw certified."""
        names = [peer.name for peer in peers] or None
        return max((entry.epoch for entry in certificates(self.metrics(), names)), default=0)

    def until(self, what: str, check: Callable[[], bool], limit_s: float) -> float:
        """Look again until the check holds; returns the seconds that took. NeverCameError after the limit."""
        began = time.monotonic()
        while not check():
            self.watch()
            if time.monotonic() - began > limit_s:
                raise NeverCameError(f"{what} did not come within {limit_s:.0f} s\n{self.last_words()}")
            time.sleep(0.2)
        return time.monotonic() - began

    def watch(self) -> None:
        for peer in self.peers:
            peer.watch()

    def pass_time(self, seconds: float) -> None:
        """Let the swarm run for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.watch()
            time.sleep(min(0.2, max(0.0, end - time.monotonic())))

    def last_words(self, lines: int = 8) -> str:
        parts: list[str] = []
        for peer in self.peers:
            parts.append(f"--- {peer.name} ({'running' if peer.alive else f'ended: {peer.status}'})")
            parts += peer.life().splitlines()[-lines:]
        return "\n".join(parts)

    def row_since(self, peer: Peer, since_ms: int) -> int:
        """The longest row of certificates since then that this peer contributed to."""
        return in_a_row(self.certificates(), peer.short_id(), since_ms)

    def until_back(self, *peers: Peer, since_ms: int = 0, limit_s: float = BACK_S) -> float:
        """Wait until each peer has contributed to two epochs in a row since its start (then it votes)."""

        def all_back() -> bool:
            for peer in peers:
                if not peer.alive:
                    raise NeverCameError(f"{peer.name} ended with {peer.status}\n{self.last_words()}")
            return all(self.row_since(peer, max(since_ms, peer.started_ms)) >= 2 for peer in peers)

        names = " ".join(peer.name for peer in peers)
        return self.until(f"two epochs in a row with {names}", all_back, limit_s)

    def until_epochs(self, count: int, limit_s: float, *peers: Peer) -> float:
        """Wait for so many more certificates, as these peers (none: all) see them."""
        target = self.height(*peers) + count
        return self.until(f"epoch {target}", lambda: self.height(*peers) >= target, limit_s)

    # --- harm ---

    def note(self, what: str, *peers: Peer, at_ms: int = 0) -> Fault:
        """Remember that harm was done, for the report's recovery times."""
        fault = Fault(at_ms or now_ms(), tuple(peer.name for peer in peers), what)
        self.faults.append(fault)
        return fault

    def kill(self, *peers: Peer, what: str = "SIGKILL") -> Fault:
        """Kill peer processes with SIGKILL, all at once; what runs below them must end by itself."""
        self.watch()
        for peer in peers:
            if peer.process is not None:
                peer.process.kill()
        fault = self.note(what, *peers)
        for peer in peers:
            if peer.process is not None:
                peer.process.wait(10)
        self.watch()
        return fault

    def until_died(self, peer: Peer, what: str, limit_s: float) -> Fault:
        """Wait for a failpoint to kill this peer."""
        self.until(f"the end of {peer.name} ({what})", lambda: not peer.alive, limit_s)
        if peer.status != -signal.SIGKILL:
            raise NeverCameError(f"{peer.name} ended with {peer.status}, not by SIGKILL\n{self.last_words()}")
        self.watch()
        return self.note(what, peer, at_ms=peer.died_ms)

    @contextlib.contextmanager
    def paused(self, peer: Peer) -> Iterator[Fault]:
        """SIGSTOP a peer with everything below it; SIGCONT at the end of the block, whatever happens."""
        assert peer.process is not None
        stopped: list[Below] = []
        try:
            while True:  # what it starts before it stops is found in the next turn
                found = map(identify, (peer.process.pid, *descendants(peer.process.pid)))
                more = [process for process in found if process is not None and process not in stopped]
                if not more:
                    break
                for process in more:
                    stopped.append(process)
                    process.send(signal.SIGSTOP)
            yield self.note("SIGSTOP", peer)
        finally:
            for process in reversed(stopped):
                process.send(signal.SIGCONT)

    # --- ending ---

    def outlived(self, limit_s: float = 20.0) -> list[str]:
        """Names of peers whose processes of a life that ended are still there after a while."""
        end = time.monotonic() + limit_s
        self.watch()
        while True:
            left = [p.name for p in self.peers if any(process.running() for process in p.orphans)]
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.2)

    def stop(self) -> None:
        """End every peer and all that was ever below one: politely first, then by force."""
        self.watch()
        for peer in self.peers:
            if peer.process is not None and peer.alive:
                peer.process.send_signal(signal.SIGTERM)
        for peer in self.peers:
            if peer.process is None:
                continue
            try:
                peer.process.wait(10)
            except subprocess.TimeoutExpired:
                peer.process.kill()
                peer.process.wait()
            for process in peer.below | peer.orphans:
                process.send(signal.SIGKILL)
