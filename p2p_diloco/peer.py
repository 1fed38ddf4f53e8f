"""``python -m p2p_diloco.peer``: one peer. Without --initial-peers it founds a run, else it joins one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from typing import Any

from p2p_diloco.bridge import Progress, RoundDone, TrainerHost
from p2p_diloco.checkpoint import Checkpoints
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import P2PDilocoError, UserError
from p2p_diloco.flags import Parsed, parse
from p2p_diloco.identity import Identity, show
from p2p_diloco.net.dht import DHTDiscovery
from p2p_diloco.net.driver import Driver, Watcher
from p2p_diloco.node import Parts, found_run, join_run
from p2p_diloco.observe.metrics import EpochMetrics, MetricsWriter, NoticeMetrics, StepMetrics
from p2p_diloco.observe.status import PeerRow, Status, StatusView, setup_logging
from p2p_diloco.wire.runid import show_run_id

logger = logging.getLogger(__name__)

_REFRESH_S = 0.25  # between two looks at the machine for the status (guess: as fast as the panel draws)


class Reporter:
    """Turns what the driver tells into status, metrics and checkpoints."""

    def __init__(self, status: Status, metrics: MetricsWriter) -> None:
        self.status, self.metrics = status, metrics
        self.driver: Driver | None = None
        self._eval_loss: dict[int, float] = {}
        self._loss: float | None = None

    def watcher(self) -> Watcher:
        return Watcher(self.notice, self.metric, self.step, self.round_done)

    def notice(self, level: str, text: str) -> None:
        self.status.notice(level, text)
        self.metrics.write(NoticeMetrics(level, text))

    def step(self, progress: Progress) -> None:
        self.status.note_step(progress.step, progress.loss, progress.tokens_per_s)
        self.metrics.write(
            StepMetrics(
                progress.epoch, progress.step, progress.global_step, progress.loss, progress.tokens_per_s
            )
        )

    def round_done(self, done: RoundDone) -> None:
        """``eval_loss`` is that of the anchor the round started from: the epoch before."""
        self._loss = done.loss
        if done.eval_loss is not None:
            self.status.eval_loss = done.eval_loss
            values = {"epoch": done.epoch - 1, "eval_loss": done.eval_loss}
            self.metrics.write_values("evaluation", values)

    def metric(self, kind: str, values: dict[str, Any]) -> None:
        if kind != "epoch" or self.driver is None:
            self.metrics.write_values(kind, values)
            return
        metrics = EpochMetrics(
            epoch=values["epoch"],
            attempt=values["attempt"],
            peers=1 + len(self.driver.machine.members.linked_peers()),
            contributors=tuple(values["contributors"]),
            tokens=values["tokens"],
            ring_ms=values["ring_ns"] / 1e6,
            bytes_sent=values["bytes_sent"],
            bytes_received=values["bytes_received"],
            quantisation_error=values["quantisation_error"],
            mean_loss=self._loss,
            eval_loss=None,
            state_root=values["state_root"],
            rates_kbit_per_s=values["rates_kbit_per_s"],
        )
        self.status.note_epoch(metrics)
        self.metrics.write(metrics)

    async def follow(self, driver: Driver, discovery: DHTDiscovery) -> None:
        """Keep the status fresh until cancelled."""
        machine = driver.machine
        self.status.run_name = machine.setup.run.name
        self.status.run_id = show_run_id(machine.setup.genesis.run_id())[:12]
        self.status.steps = machine.setup.run.inner.steps
        while True:
            self.status.state = machine.epoch.phase
            self.status.epoch, self.status.attempt = machine.chain.epoch, machine.epoch.attempt
            self.status.discovery = discovery.status()
            self.status.peers = [self._row(driver, peer) for peer in machine.members.linked_peers()]
            await asyncio.sleep(_REFRESH_S)

    def _row(self, driver: Driver, peer: Any) -> PeerRow:
        member = driver.machine.members.get(peer)
        progress = None if member is None else member.progress
        rtt_s = driver.links.rtt_s(peer)
        rtt_ms = None if rtt_s is None else rtt_s * 1000
        if progress is None:
            return PeerRow(show(peer), "linked", rtt_ms=rtt_ms)
        loss = progress.loss if progress.loss == progress.loss else None
        return PeerRow(show(peer), progress.phase, progress.epoch, progress.step, loss, rtt_ms)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one peer; returns the exit status: 0 left as asked, 2 the user's to fix, 1 a defect of ours."""
    try:
        parsed = parse(argv)
    except UserError as error:
        print(f"p2p-diloco: {error}", file=sys.stderr)
        return 2
    try:
        if sys.platform != "win32":
            import uvloop

            return uvloop.run(_run(parsed))
        return asyncio.run(_run(parsed))
    except P2PDilocoError as error:
        print(f"p2p-diloco: {error}; {error.next_step}", file=sys.stderr)
        return 2 if error.blame == "user" else 1


async def _run(parsed: Parsed) -> int:
    status = Status()
    view = StatusView(status, plain=True if parsed.plain else None)
    setup_logging(parsed.log_level, view)
    identity = Identity.load_or_create(parsed.peer.run_dir / "identity.key")
    metrics = MetricsWriter(parsed.peer.run_dir / "metrics.jsonl")
    status.peer = show(identity.peer_id)
    await view.start()
    try:
        await _live(parsed, identity, Reporter(status, metrics))
    finally:
        await view.stop()
        metrics.close()
        identity.close()
    return 0


def _make_trainer(run: RunConfig, peer: PeerConfig) -> TrainerHost:
    return TrainerHost(run, peer, peer.run_dir / "trainer.log")


async def _live(parsed: Parsed, identity: Identity, reporter: Reporter) -> None:
    """Start, run until asked to leave or until the run's last epoch, say why it ended."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    discovery = DHTDiscovery(
        identity, parsed.peer.host, parsed.peer.dht_port, parsed.peer.initial_peers, parsed.peer.run_dir
    )
    parts = Parts(
        identity=identity,
        run=parsed.run,
        peer=parsed.peer,
        make_trainer=_make_trainer,
        discovery=discovery,
        watcher=reporter.watcher(),
    )
    starting = loop.create_task(found_run(parts) if parsed.founds else join_run(parts))
    stopping = loop.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return
    driver = await starting
    reporter.driver = driver
    _welcome(driver, discovery, reporter)
    checkpoints = Checkpoints(parsed.peer, driver.table.state, driver.machine.chain, driver.schema)
    helpers = [
        loop.create_task(reporter.follow(driver, discovery)),
        loop.create_task(checkpoints.follow()),
        loop.create_task(_leave_when(stop, driver)),
    ]
    try:
        reason = await driver.run()
    finally:
        for task in [*helpers, stopping]:
            task.cancel()
        await asyncio.gather(*helpers, stopping, return_exceptions=True)
        if parsed.peer.checkpoint_every_epochs:
            await asyncio.to_thread(checkpoints.write)
    reporter.notice("info", f"left the run: {reason}")


async def _leave_when(stop: asyncio.Event, driver: Driver) -> None:
    await stop.wait()
    driver.leave("asked to stop")


def _welcome(driver: Driver, discovery: DHTDiscovery, reporter: Reporter) -> None:
    """Say which run this is and how others join it."""
    setup = driver.machine.setup
    run_id = show_run_id(setup.genesis.run_id())
    word = "joining" if setup.held_epoch < 0 else "founded" if setup.held_epoch == 0 else "resuming"
    reporter.notice(
        "info", f"{word} run {setup.run.name} ({run_id}), listening on {', '.join(setup.addresses)}"
    )
    maddrs = discovery.visible_maddrs()
    if maddrs:
        seeds = " ".join(maddrs[:2])
        line = f"python -m p2p_diloco.peer --initial-peers {seeds} --run-id {run_id}"
        reporter.notice("info", f"others join with: {line}")


if __name__ == "__main__":
    sys.exit(main())
