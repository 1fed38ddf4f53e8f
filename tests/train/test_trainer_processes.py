"""Real trainer processes under torch's launcher. Each launch takes seconds, so each test proves much."""

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from p2p_diloco.bridge import Progress, Round, RoundDone, SharedState, TrainerDied, TrainerHost
from p2p_diloco.bridge.api import TrainerEvent
from p2p_diloco.config import DataConfig, InnerConfig, ModelConfig, PeerConfig, RunConfig, ScheduleConfig
from p2p_diloco.errors import TrainerError
from p2p_diloco.train.data import DataMix
from p2p_diloco.train.devices import alone
from p2p_diloco.train.loop import InnerLoop

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "own_training_loop.py"
RUN = RunConfig(
    seed=11,
    model=ModelConfig(
        vocab_size=257, hidden_size=16, intermediate_size=33, layers=2, heads=2, kv_heads=1, max_seq_len=64
    ),
    inner=InnerConfig(lr=1e-3, batch_sequences=5, micro_batch_sequences=2, seq_len=32),
    schedule=ScheduleConfig(warmup_steps=2),
    data=DataConfig(eval_sequences=5),
)
WAIT_S = 60


class Events:
    """Collects a host's events and waits for the next that is no progress."""

    def __init__(self, host: TrainerHost) -> None:
        self.progress: list[Progress] = []
        self._others: asyncio.Queue[TrainerEvent] = asyncio.Queue()
        host.on_event = self._take

    def _take(self, event: TrainerEvent) -> None:
        if isinstance(event, Progress):
            self.progress.append(event)
        else:
            self._others.put_nowait(event)

    async def next(self) -> TrainerEvent:
        return await asyncio.wait_for(self._others.get(), WAIT_S)

    async def done(self) -> RoundDone:
        event = await self.next()
        assert isinstance(event, RoundDone), event
        return event

    def nothing_more(self) -> bool:
        return self._others.empty()


def peer(ranks: int = 1) -> PeerConfig:
    return PeerConfig(ranks=ranks, device="cpu", trainer_threads=1)


def round_of(epoch: int, steps: int, slot: int = 0, evaluate: bool = False) -> Round:
    return Round(epoch, slot, steps, epoch * 10, b"share", evaluate)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    if sys.platform == "linux":  # a zombie waits for its parent only: it has ended
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return True


def shared_memory_names() -> set[str]:
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


async def test_one_rank_trains_stops_early_spoils_a_delta_and_crashes_as_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2P_DILOCO_FAULT", "nan_delta:2,crash:3")
    before = shared_memory_names()
    host = TrainerHost(RUN, peer(), tmp_path / "trainer.log")
    events = Events(host)
    schema = await host.start()
    state = SharedState.create(schema.total_values)
    host.attach(state)
    await host.write_initial()
    state.anchor1[:] = state.anchor0
    state.delta[:] = np.nan

    host.start_round(round_of(0, 5, slot=1, evaluate=True))
    first = await events.done()
    assert (first.epoch, first.steps, first.tokens) == (0, 5, 5 * 5 * 32)
    assert first.eval_loss == pytest.approx(np.log(257), abs=0.2)
    assert np.isfinite(state.delta).all()
    assert np.count_nonzero(state.delta) > 0.9 * schema.total_values
    assert np.array_equal(state.anchor1, state.anchor0)
    assert events.progress[-1].step == 5
    assert events.progress[-1].global_step == 5

    host.start_round(round_of(1, 100_000))
    host.stop_early(1)
    stopped = await events.done()
    assert 1 <= stopped.steps < 100_000
    assert stopped.eval_loss is None

    host.start_round(round_of(2, 2))
    await events.done()
    assert np.isnan(state.delta).sum() == 1

    pids = host.pids
    host.start_round(round_of(3, 4))
    died = await events.next()
    assert isinstance(died, TrainerDied)
    assert died.text.startswith("trainer rank 0 ended without a word")
    assert "fault: crash in epoch 3" in died.text
    assert "exitcode: 17" in died.text
    assert str(tmp_path / "trainer.log") in died.text
    assert len(pids) == 2
    assert not [pid for pid in pids if alive(pid)]
    assert host.pids == []
    await host.stop(5)
    assert events.nothing_more()
    state.close()
    assert shared_memory_names() <= before


async def test_two_ranks_leave_the_same_delta_as_one(tmp_path: Path) -> None:
    host = TrainerHost(RUN, peer(ranks=2), tmp_path / "trainer.log")
    events = Events(host)
    schema = await host.start()
    state = SharedState.create(schema.total_values)
    for area in (state.anchor0, state.anchor1, state.delta):
        area[:] = np.nan  # what no rank writes stays visible
    host.attach(state)
    await host.write_initial()
    host.start_round(round_of(0, 3, evaluate=True))
    done = await events.done()
    delta = state.delta.copy()
    assert events.progress[-1].loss == pytest.approx(done.loss, rel=0.2)  # rank 0's sequences only

    # A second anchor that differs from the present weights: the ranks must load all of it.
    state.anchor1[:] = state.anchor0 * np.float32(0.5)
    host.start_round(round_of(1, 1, slot=1, evaluate=True))
    moved = await events.done()
    pids = host.pids
    await host.stop(20)
    assert len(pids) == 3
    assert not [pid for pid in pids if alive(pid)]
    assert events.nothing_more()  # a stop that was asked for is no death

    mesh = alone("cpu")
    try:
        loop = InnerLoop(RUN, mesh, RUN.seed, DataMix(RUN.data, {}, RUN.inner.seq_len))
        assert loop.schema == schema
        anchor, expected = np.zeros_like(delta), np.zeros_like(delta)
        loop.store(anchor)
        assert np.array_equal(anchor, state.anchor0)
        assert done.eval_loss == pytest.approx(loop.evaluate(), rel=1e-5)
        report = loop.train(3, 0, b"share", lambda: False, lambda report: None)
        loop.store_delta(anchor, expected)
        assert np.abs(delta - expected).max() < 1e-3 * np.abs(expected).max()
        assert done.loss == pytest.approx(report.loss, rel=1e-5)
        assert done.grad_norm == pytest.approx(report.grad_norm, rel=1e-4)
        loop.load(state.anchor1)
        assert moved.eval_loss == pytest.approx(loop.evaluate(), rel=1e-5)
    finally:
        dist.destroy_process_group()
    state.close()


async def test_a_users_own_loop_trains_and_a_script_that_ends_at_once_is_an_error(tmp_path: Path) -> None:
    run = RUN.model_copy(update={"inner": RUN.inner.model_copy(update={"lr": 1e-2})})
    host = TrainerHost(run, peer(), tmp_path / "own.log", command=(str(EXAMPLE),))
    events = Events(host)
    schema = await host.start()
    state = SharedState.create(schema.total_values)
    host.attach(state)
    await host.write_initial()
    losses = []
    for epoch in range(5):
        host.start_round(round_of(epoch, 50))
        losses.append((await events.done()).loss)
        state.anchor0[:] -= state.delta  # an outer step of rate 1
    assert losses[4] < 0.5 * losses[0]
    await host.stop(10)
    state.close()

    (tmp_path / "broken.py").write_text("raise SystemExit('no such thing as a model')")
    broken = TrainerHost(run, peer(), tmp_path / "broken.log", command=(str(tmp_path / "broken.py"),))
    with pytest.raises(TrainerError, match="no such thing as a model"):
        await broken.start()
    assert broken.pids == []


STUBBORN = """
import signal, time
from p2p_diloco.bridge import TrainerClient
from p2p_diloco.numerics.layout import Schema, TensorSpec

signal.signal(signal.SIGTERM, signal.SIG_IGN)
client = TrainerClient.connect()
client.hello(Schema((TensorSpec("w", (3,), "float32"),)), "cpu")
time.sleep(600)
"""


async def test_stop_ends_a_trainer_that_ignores_every_request_and_one_that_is_starting(
    tmp_path: Path,
) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    host = TrainerHost(RUN, peer(), tmp_path / "log", command=(str(tmp_path / "stubborn.py"),))
    events = Events(host)
    await host.start()
    pids = host.pids
    assert len(pids) == 2
    await host.stop(2)
    assert not [pid for pid in pids if alive(pid)]
    assert events.nothing_more()

    starting = asyncio.create_task(host.start())
    while not host.pids:  # noqa: ASYNC110 - no event tells that the launcher has been started
        await asyncio.sleep(0.01)
    pids = host.pids
    await host.stop(1)
    with pytest.raises(TrainerError, match="stopped"):
        await asyncio.wait_for(starting, WAIT_S)
    assert not [pid for pid in pids if alive(pid)]

    host = TrainerHost(RUN, peer(), tmp_path / "log", start_timeout_s=0.25)
    with pytest.raises(TrainerError, match=r"not ready within 0\.25 s"):
        await host.start()
    assert host.pids == []


HOLDER = """
import asyncio, sys
from pathlib import Path
from p2p_diloco.bridge import Round, SharedState, TrainerHost
from p2p_diloco.config import PeerConfig, RunConfig

async def main():
    peer = PeerConfig(ranks=2, device="cpu", trainer_threads=1)
    host = TrainerHost(RunConfig(), peer, Path(sys.argv[1]), command=(sys.argv[2],))
    schema = await host.start()
    state = SharedState.create(schema.total_values)
    host.attach(state)
    host.start_round(Round(0, 0, 100_000, 0, b"share", False))
    print(*host.pids, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="watches foreign processes by pidfd")
def test_no_rank_outlives_a_peer_process_that_is_killed(tmp_path: Path) -> None:
    before = shared_memory_names()
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "log"), str(EXAMPLE)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "TMPDIR": str(tmp_path)},
        text=True,
    )
    try:
        assert holder.stdout is not None
        pids = [int(word) for word in holder.stdout.readline().split()]
        assert len(pids) == 3
        watched = [os.pidfd_open(pid) for pid in pids]
        holder.send_signal(signal.SIGKILL)
        for fd in watched:
            ended, _, _ = select.select([fd], [], [], WAIT_S)
            assert ended
            os.close(fd)
    finally:
        holder.kill()
        holder.communicate(timeout=10)
    assert shared_memory_names() <= before
    assert [entry.name for entry in tmp_path.iterdir() if "p2p" in entry.name] == []
