"""A local swarm on real text, with a crash and a late joiner, and a verdict at the end.

Founds a run with three peers (separate processes, loopback), lets one of them die by SIGKILL in the middle
of a ring, starts a fourth, goes on to a fixed number of epochs, trains one peer alone for comparison, and
prints a table. The exit status is 0 only if every claim in the table held.

    python tools/demo.py [--epochs N] [--steps H] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from p2p_diloco.numerics.layout import Schema
from p2p_diloco.observe.metrics import read_metrics
from p2p_diloco.observe.status import show_bytes
from p2p_diloco.wire.messages import Genesis, unpack_object

ROOT = Path(__file__).resolve().parent.parent
KILL_EPOCH = 5  # the third peer dies in its first ring from this epoch on
START_S, QUIET_S, END_S = 180.0, 120.0, 60.0  # patience with a start, between two epochs, with the end

CONFIG = """# Written by tools/demo.py; a run config for `python -m p2p_diloco.peer --config`.
[run]
name = "demo"
seed = 7

[run.inner]
steps = {steps}
batch_sequences = 4
micro_batch_sequences = 4
seq_len = 128

[run.schedule]
warmup_steps = 20

[run.data]
eval_sequences = 16

[run.agreement]
min_peers = 3
epochs = {epochs}
"""


@dataclass
class Peer:
    """One peer process and what its metrics have said so far."""

    name: str
    folder: Path
    process: subprocess.Popen[bytes]
    epochs: dict[int, dict[str, Any]] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    state: str = "starting"

    def refresh(self) -> None:
        """Read what is new. The whole file: it is small, and this is a demo."""
        path = self.folder / "metrics.jsonl"
        for record in read_metrics(path) if path.exists() else ():
            match record["kind"]:
                case "epoch":
                    self.epochs[record["epoch"]] = record
                case "evaluation":
                    self.evaluations[record["epoch"]] = record["eval_loss"]
                case "step":
                    self.step = record
                case "notice":
                    self.state = record["text"]
        status = self.process.poll()
        if status is not None:
            self.state = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"

    @property
    def log(self) -> str:
        return (self.folder / "peer.log").read_text(errors="replace")


class Demo:
    """Runs the story; `failures` collects the claims that did not hold."""

    def __init__(self, folder: Path, epochs: int, steps: int) -> None:
        self.folder, self.epochs, self.steps = folder, epochs, steps
        self.console = Console()
        self.peers: list[Peer] = []
        self.failures: list[str] = []
        self.killed_in = KILL_EPOCH
        self._shown: set[int] = set()
        self._live: Live | None = None

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    def start(self, name: str, flags: list[str], kill: str = "") -> Peer:
        """Start a peer process in its own folder, with its output in peer.log."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if kill:
            environment["P2P_DILOCO_KILL"] = kill
        command = [sys.executable, "-m", "p2p_diloco.peer", "--run-dir", str(folder), "--host", "127.0.0.1"]
        command += ["--plain", "--trainer-threads", "1", "--timeouts.straggler-s", "3", *flags]
        with open(folder / "peer.log", "wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
        peer = Peer(name, folder, process)
        self.peers.append(peer)
        return peer

    def join_flags(self, peer: Peer) -> list[str]:
        """Wait for the line with which others join through this peer."""
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            found = re.search(r"others join with: .*?(--initial-peers .*)", peer.log)
            if found:
                return found.group(1).split()
            if peer.process.poll() is not None:
                break
            time.sleep(0.2)
        raise SystemExit(f"{peer.name} did not start; its log:\n{peer.log}")

    def run(self) -> int:
        config = self.folder / "run.toml"
        config.write_text(CONFIG.format(steps=self.steps, epochs=self.epochs))
        self.say(f"founding a run of {self.epochs} epochs x {self.steps} inner steps in {self.folder}")
        founder = self.start("peer1", ["--config", str(config)])
        flags = self.join_flags(founder)
        self.say("others join with: python -m p2p_diloco.peer " + " ".join(flags))
        self.start("peer2", flags)
        victim = self.start("peer3", flags, kill=f"reduce@{KILL_EPOCH}+")
        self.say("peer2 and peer3 are starting; they know nothing but that line")
        if self.console.is_terminal:
            with Live(self.picture(), console=self.console, auto_refresh=False) as self._live:
                self.follow(victim)
        else:
            self.follow(victim)
        self.end()
        return self.verdict(victim, self.baseline(config))

    def follow(self, victim: Peer) -> None:
        """Watch the swarm to its last epoch; start the fourth peer when the third is dead."""
        last_s, fourth = time.monotonic(), False
        patience_s = START_S
        while len(self._shown) < self.epochs:
            time.sleep(0.3)
            for peer in self.peers:
                peer.refresh()
            if self.show_epochs():
                last_s, patience_s = time.monotonic(), QUIET_S
            if not fourth and victim.process.poll() is not None:
                fourth = True
                code = victim.process.returncode
                victim.refresh()
                self.killed_in = max(victim.epochs, default=0) + 1
                self.say(f"peer3 died by signal {-code} while it was summing epoch {self.killed_in}")
                self.start("peer4", self.join_flags(self.peers[1]))
                self.say("peer4 is starting: it joins through peer2, not through the founder")
            if self._live is not None:
                self._live.update(self.picture(), refresh=True)
            if time.monotonic() - last_s > patience_s:
                self.failures.append(f"no epoch was certified for {patience_s:.0f} s")
                return
            if all(peer.process.poll() is not None for peer in self.peers):
                return

    def show_epochs(self) -> bool:
        """One line for each newly certified epoch."""
        new = False
        for epoch in range(1, self.epochs + 1):
            reports = [peer.epochs[epoch] for peer in self.peers if epoch in peer.epochs]
            if epoch in self._shown or not reports:
                continue
            self._shown.add(epoch)
            new = True
            first = reports[0]
            losses = [r["mean_loss"] for r in reports if r.get("mean_loss") is not None]
            loss = f"loss {sum(losses) / len(losses):.3f}" if losses else ""
            again = f", attempt {first['attempt']}" if first["attempt"] else ""
            names = " ".join(first["contributors"])
            self.say(f"epoch {epoch:3d} certified{again}: {names}, {loss}, state {first['state_root'][:12]}")
        return new

    def picture(self) -> Table:
        table = Table(title="p2p_diloco demo", expand=True)
        for column in ("peer", "epoch", "step", "loss", "tokens/s", "last word"):
            table.add_column(column, no_wrap=True)
        for peer in self.peers:
            step = peer.step
            table.add_row(
                peer.name,
                str(max(peer.epochs, default=0)),
                f"{step.get('step', 0)}/{self.steps}",
                f"{step.get('loss', float('nan')):.3f}",
                f"{step.get('tokens_per_s', 0):,.0f}",
                peer.state,
            )
        return table

    def end(self) -> None:
        """Give the peers time to leave by themselves, then end what is left."""
        end = time.monotonic() + END_S
        for peer in self.peers:
            try:
                peer.process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.failures.append(f"{peer.name} did not end by itself")
                peer.process.send_signal(signal.SIGINT)
                try:
                    peer.process.wait(10)
                except subprocess.TimeoutExpired:
                    peer.process.kill()
            peer.refresh()

    def baseline(self, config: Path) -> dict[str, Any]:
        """One worker alone, no outer step, as many inner steps as one peer of the swarm took."""
        steps = (self.epochs - 1) * self.steps
        self.say(f"for comparison: one worker alone, {steps} inner steps on the same model and text")
        out = self.folder / "baseline.json"
        command = [sys.executable, "-m", "p2p_diloco.train.baseline", "--config", str(config)]
        command += ["--steps", str(steps), "--json", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            self.failures.append(f"the baseline failed: {done.stderr[-500:]}")
            return {}
        result: dict[str, Any] = json.loads(out.read_text())
        return result

    def claim(self, holds: bool, text: str) -> str:
        if not holds:
            self.failures.append(text)
        return "yes" if holds else "NO"

    def verdict(self, victim: Peer, alone: dict[str, Any]) -> int:
        """Print the table and the paths; 0 if every claim held."""
        founder = self.peers[0]
        table = Table(title="what happened", show_header=False)
        evaluations: dict[int, float] = {}
        for peer in self.peers:
            evaluations.update(peer.evaluations)
        first, last = evaluations.get(0), evaluations.get(self.epochs - 1)
        better = first is not None and last is not None and last < first - 0.5
        start = "?" if first is None else f"{first:.3f}"
        end = "?" if last is None else f"{last:.3f}"
        table.add_row("held-out loss, swarm", f"{start} -> {end} after {self.epochs - 1} epochs")
        self.claim(better, "the held-out loss fell by more than 0.5")
        if alone:
            text = f"{alone['eval_loss_start']:.3f} -> {alone['eval_loss_end']:.3f} after as many steps"
            table.add_row("held-out loss, one worker alone", text)
        certified = len(self._shown)
        table.add_row("epochs certified", f"{certified} of {self.epochs}")
        self.claim(certified == self.epochs, f"all {self.epochs} epochs were certified")
        table.add_row("all digests equal", self.claim(self.digests_equal(), "all peers' digests are equal"))
        self.add_crash(table, victim)
        self.add_bytes(table, founder)
        checkpoints = sorted((founder.folder / "checkpoints").glob("epoch-*"))
        self.claim(bool(checkpoints), "the founder wrote a checkpoint")
        for peer in self.peers:
            if peer is not victim:
                self.claim(peer.process.returncode == 0, f"{peer.name} ended with status 0")
        self.console.print(table)
        self.say(f"metrics and logs: {self.folder}/peer*/metrics.jsonl, peer.log, trainer.log")
        self.say(f"newest checkpoint: {checkpoints[-1] if checkpoints else 'none'}")
        for failure in self.failures:
            self.say(f"did not hold: {failure}")
        self.say("every claim held" if not self.failures else f"{len(self.failures)} claims did not hold")
        return 1 if self.failures else 0

    def digests_equal(self) -> bool:
        """True if for each epoch all peers that saw it certified name one state root, and two did."""
        for epoch in range(1, self.epochs + 1):
            roots = [peer.epochs[epoch]["state_root"] for peer in self.peers if epoch in peer.epochs]
            if len(set(roots)) != 1 or len(roots) < 2:
                return False
        return True

    def add_crash(self, table: Table, victim: Peer) -> None:
        killed = victim.process.returncode == -signal.SIGKILL
        report = self.peers[0].epochs.get(self.killed_in, {})
        without = len(report.get("contributors", ())) == 2
        text = self.claim(killed and without, f"epoch {self.killed_in} was certified by the two survivors")
        table.add_row(f"peer3 killed (SIGKILL) in ring {self.killed_in}, others certified it", text)
        late = self.peers[-1]
        took_part = [e for e, r in late.epochs.items() if len(r["contributors"]) == 3 and e > self.killed_in]
        joined = late.name == "peer4" and bool(took_part)
        text = self.claim(joined, "the fourth peer joined and contributed")
        where = f", first in epoch {min(took_part)}" if took_part else ""
        table.add_row("peer4 joined late and contributed", text + where)

    def add_bytes(self, table: Table, founder: Peer) -> None:
        genesis = unpack_object(Genesis, (founder.folder / "genesis.bin").read_bytes())
        values = Schema.from_bytes(genesis.schema).total_values
        sent = [r["bytes_sent"] for e, r in founder.epochs.items() if 1 < e < KILL_EPOCH]
        per_epoch = sum(sent) / len(sent) if sent else 0.0
        plain = 2 * (3 - 1) / 3 * 4 * values * self.steps
        table.add_row("bytes sent per epoch and peer (3 peers)", show_bytes(per_epoch))
        table.add_row(
            "fp32 all-reduce every step would send",
            f"{show_bytes(plain)} ({plain / per_epoch:,.0f} times as much)" if per_epoch else "?",
        )
        self.claim(0 < per_epoch < plain / 10, "the swarm sent less than a tenth of fp32 all-reduce's bytes")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=24, help="epochs to certify (default: 24)")
    parser.add_argument("--steps", type=int, default=20, help="inner steps per epoch (default: 20)")
    parser.add_argument("--folder", type=Path, help="where to put everything (default: runs/demo-TIME)")
    chosen = parser.parse_args()
    if chosen.epochs < KILL_EPOCH + 3:
        parser.error(f"--epochs must be at least {KILL_EPOCH + 3}: a peer dies in epoch {KILL_EPOCH}")
    folder = chosen.folder or ROOT / "runs" / time.strftime("demo-%Y%m%d-%H%M%S")
    folder = folder.resolve()
    folder.mkdir(parents=True)
    demo = Demo(folder, chosen.epochs, chosen.steps)
    try:
        return demo.run()
    finally:
        for peer in demo.peers:
            if peer.process.poll() is None:
                peer.process.kill()
                peer.process.wait()


if __name__ == "__main__":
    sys.exit(main())
