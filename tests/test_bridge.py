import asyncio
import dataclasses
import os
import socket
import sys
from collections.abc import Iterator

import msgpack
import numpy as np
import pytest

from p2p_diloco.bridge import FunctionTrainer, Progress, Round, RoundDone, SharedState, Trainer, TrainerDied
from p2p_diloco.bridge.api import TrainerEvent
from p2p_diloco.bridge.client import TrainerClient, peer_from_environment, run_from_environment
from p2p_diloco.bridge.host import TrainerHost
from p2p_diloco.bridge.messages import (
    CONTROL_LIMIT_BYTES,
    Attach,
    Control,
    Failed,
    FrameReader,
    Hello,
    InitialWritten,
    Shutdown,
    StopEarly,
    WriteInitial,
    decode,
    encode,
)
from p2p_diloco.bridge.shared import Flat
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ConfigError, InternalError, ProtocolViolation
from p2p_diloco.numerics.layout import Schema, TensorSpec

SCHEMA = Schema((TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (4,), "float32")))
ROUND = Round(epoch=3, slot=1, steps=20, global_step=60, shares_key=b"k" * 32, evaluate=True)
MESSAGES: list[Control] = [
    Attach(10, (0, 4096, 8192, 12288, 16384)),
    WriteInitial(),
    ROUND,
    StopEarly(3),
    Shutdown(),
    Hello(0, 2, 1234, b"schema", "cpu"),
    InitialWritten(),
    Progress(3, 1, 61, 5.5, 128, 99.5),
    RoundDone(3, 20, 2560, 5.0, None, 0.7),
    RoundDone(3, 20, 2560, 5.0, 4.5, 0.7),
    Failed("it broke"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_frame_even_byte_by_byte(message: Control) -> None:
    reader = FrameReader(CONTROL_LIMIT_BYTES)
    frame = encode(message)
    found = [item for byte in frame * 2 for item in reader.feed(bytes([byte]))]
    assert found == [message, message]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\x92\xa8Shutdown",
        msgpack.packb("Shutdown"),
        msgpack.packb([]),
        msgpack.packb([7]),
        msgpack.packb({"kind": "Shutdown"}),
        msgpack.packb(["Nothing"]),
        msgpack.packb(["Shutdown", 1]),
        msgpack.packb(["StopEarly"]),
        msgpack.packb(["StopEarly", -1]),
        msgpack.packb(["StopEarly", True]),
        msgpack.packb(["StopEarly", 1.0]),
        msgpack.packb(["StopEarly", 1 << 63]),
        msgpack.packb(["Failed", "x" * 8193]),
        msgpack.packb(["Failed", b"bytes"]),
        msgpack.packb(["Attach", 1, 2]),
        msgpack.packb(["Attach", 1, [0, "x"]]),
        msgpack.packb(["RoundDone", 1, 1, 1, 1.0, "none", 1.0]),
        msgpack.packb(["Failed", msgpack.ExtType(1, b"")]),
        msgpack.packb(["Failed", "x"]) + b"\x00",
        b"\x91" * 5000,
    ],
)
def test_malformed_messages_are_protocol_violations(body: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(body)


def test_a_frame_above_the_limit_is_refused_before_it_arrives() -> None:
    reader = FrameReader(CONTROL_LIMIT_BYTES)
    with pytest.raises(ProtocolViolation, match="exceeds"):
        list(reader.feed((CONTROL_LIMIT_BYTES + 1).to_bytes(4, "big")))
    with pytest.raises(InternalError, match="exceeds"):
        encode(dataclasses.replace(ROUND, shares_key=b"x" * CONTROL_LIMIT_BYTES))


def test_shared_state_is_zero_aligned_and_the_same_memory_for_both_sides() -> None:
    ours = SharedState.create(5000)
    assert all(offset % 4096 == 0 for offset in ours.offsets)
    theirs = SharedState.adopt(os.dup(ours.fd), ours.attach_message())
    for index, (mine, other) in enumerate(
        [
            (ours.anchor(0), theirs.anchor0),
            (ours.anchor(1), theirs.anchor1),
            (ours.momentum(0), theirs.momentum0),
            (ours.momentum(1), theirs.momentum1),
            (ours.delta, theirs.delta),
        ]
    ):
        assert mine.dtype == np.float32
        assert mine.shape == (5000,)
        assert not mine.any()
        mine[:] = index + 1
        assert np.array_equal(other, mine)
    assert [area[0] for area in (ours.anchor0, ours.anchor1, ours.momentum0, ours.momentum1)] == [1, 2, 3, 4]
    theirs.close()
    ours.close()
    with pytest.raises(InternalError, match="slot 2"):
        SharedState.create(1).anchor(2)


def test_shared_state_has_no_name_and_its_views_outlive_close() -> None:
    state = SharedState.create(0)
    state.close()
    state = SharedState.create(7)
    if sys.platform == "linux":
        assert "(deleted)" in os.readlink(f"/proc/self/fd/{state.fd}")
        with pytest.raises(PermissionError):
            os.ftruncate(state.fd, 4096)  # sealed: nobody can make the others die of SIGBUS
    view = state.delta
    state.close()
    state.close()
    view[:] = 3
    assert view.sum() == 21


@pytest.mark.parametrize("offsets", [(0,) * 4, (0, 0, 0, 0, 4), (0, 0, 0, 0, 1 << 40), (0, 0, 0, 0, 20480)])
def test_an_attach_that_does_not_fit_the_memory_is_refused(offsets: tuple[int, ...]) -> None:
    state = SharedState.create(10)
    with pytest.raises(ProtocolViolation):
        SharedState.adopt(os.dup(state.fd), Attach(10, offsets))
    state.close()


def half(command: Round, anchor: Flat, delta: Flat) -> tuple[int, float]:
    delta[:] = anchor / 2
    return 100, 1.5


def started(**options: object) -> tuple[FunctionTrainer, SharedState, list[TrainerEvent]]:
    trainer = FunctionTrainer(SCHEMA, np.arange(10, dtype=np.float32), half, **options)  # type: ignore[arg-type]
    events: list[TrainerEvent] = []
    trainer.on_event = events.append
    state = SharedState.create(SCHEMA.total_values)
    return trainer, state, events


async def next_turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_function_trainer_goes_through_a_round() -> None:
    trainer, state, events = started(evaluate=lambda anchor: float(anchor.sum()))
    typed: Trainer = trainer
    assert await typed.start() == SCHEMA
    typed.attach(state)
    await typed.write_initial()
    assert np.array_equal(state.anchor0, np.arange(10))
    typed.start_round(dataclasses.replace(ROUND, slot=0))
    assert events == []  # never from within start_round
    await next_turns()
    assert events == [RoundDone(3, 20, 100, 1.5, 45.0, 0.0)]
    assert np.array_equal(state.delta, np.arange(10) / 2)
    await typed.stop(1)
    with pytest.raises(InternalError, match="not running"):
        typed.start_round(ROUND)


async def test_a_held_round_ends_by_release_or_stop_early() -> None:
    trainer, state, events = started(auto=False)
    await trainer.start()
    trainer.attach(state)
    trainer.start_round(ROUND)
    with pytest.raises(InternalError, match="still under way"):
        trainer.start_round(ROUND)
    trainer.progress(2, 4.0)
    trainer.stop_early(99)  # another epoch: of no effect
    await next_turns()
    assert events == [Progress(3, 2, 62, 4.0, 0, 0.0)]
    trainer.stop_early(3)
    trainer.stop_early(3)
    await next_turns()
    assert [event.steps for event in events[1:] if isinstance(event, RoundDone)] == [1]
    trainer.start_round(ROUND)
    trainer.release()
    await next_turns()
    assert isinstance(events[-1], RoundDone)
    assert events[-1].steps == 20
    assert len(events) == 3


async def test_a_dead_or_stopped_function_trainer_delivers_nothing_more() -> None:
    trainer, state, events = started()
    await trainer.start()
    trainer.attach(state)
    trainer.start_round(ROUND)
    trainer.die("boom")
    await next_turns()
    assert events == [TrainerDied("boom")]
    await trainer.start()
    trainer.start_round(ROUND)
    await trainer.stop(1)
    await next_turns()
    assert len(events) == 1
    assert trainer.starts == 2


async def test_the_function_cannot_write_the_anchor() -> None:
    def wrong(command: Round, anchor: Flat, delta: Flat) -> tuple[int, float]:
        with pytest.raises(ValueError, match="read-only"):
            anchor[0] = 1
        return 1, 0.0

    trainer = FunctionTrainer(SCHEMA, np.zeros(10, dtype=np.float32), wrong)
    done = asyncio.Event()
    trainer.on_event = lambda event: done.set()
    await trainer.start()
    trainer.attach(SharedState.create(10))
    trainer.start_round(ROUND)
    await asyncio.wait_for(done.wait(), 5)


@pytest.fixture
def wired() -> Iterator[tuple[TrainerClient, socket.socket, FrameReader]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.settimeout(10)
    theirs.settimeout(10)
    client = TrainerClient(theirs, 0, 1)
    yield client, ours, FrameReader(1 << 22)
    client.close()
    ours.close()


def receive(connection: socket.socket, reader: FrameReader) -> Control:
    while True:
        for message in reader.feed(connection.recv(1)):
            return message


def test_a_client_follows_commands_and_writes_into_the_hosts_memory(
    wired: tuple[TrainerClient, socket.socket, FrameReader],
) -> None:
    client, host, reader = wired
    client.hello(SCHEMA, "cpu")
    hello = receive(host, reader)
    assert isinstance(hello, Hello)
    assert Schema.from_bytes(hello.schema) == SCHEMA
    assert hello.pid == os.getpid()
    state = SharedState.create(10)
    state.anchor1[:] = 5
    socket.send_fds(host, [encode(state.attach_message()) + encode(ROUND)], [state.fd])
    assert client.wait_command(10) == ROUND
    assert np.array_equal(client.anchor_view(1), np.full(10, 5))
    client.write_delta("b", np.array([[1, 2], [3, 4]], dtype=np.float32))
    client.write_delta("a", np.array([9], dtype=np.float32), start=5)
    assert state.delta.tolist() == [0, 0, 0, 0, 0, 9, 1, 2, 3, 4]
    for name, start in (("b", 1), ("a", -1), ("nothing", 0)):
        with pytest.raises(InternalError):
            client.write_delta(name, np.zeros(4, dtype=np.float32), start=start)
    done = RoundDone(3, 20, 1, 0.5, None, 0.0)
    client.round_done(done)
    assert receive(host, reader) == done
    state.close()


def test_an_early_stop_holds_for_its_round_only(
    wired: tuple[TrainerClient, socket.socket, FrameReader],
) -> None:
    client, host, _ = wired
    assert client.wait_command(0.01) is None
    host.sendall(encode(ROUND) + encode(StopEarly(2)) + encode(WriteInitial()))
    assert client.wait_command(10) == ROUND
    assert client.wait_command(10) == WriteInitial()  # so StopEarly was read before it
    assert not client.should_stop()
    host.sendall(encode(StopEarly(3)) + encode(WriteInitial()))
    client.wait_command(10)
    assert client.should_stop()
    host.sendall(encode(ROUND) + encode(WriteInitial()))  # the same epoch again
    client.wait_command(10)
    client.wait_command(10)
    assert not client.should_stop()
    host.sendall(encode(Shutdown()))
    assert client.wait_command(10) == Shutdown()
    assert client.should_stop()


def test_a_program_not_started_by_a_peer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("P2P_DILOCO_BRIDGE", "P2P_DILOCO_RUN", "P2P_DILOCO_PEER"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="started by a peer"):
        TrainerClient.connect()
    with pytest.raises(ConfigError, match="started by a peer"):
        run_from_environment()
    monkeypatch.setenv("P2P_DILOCO_PEER", PeerConfig(ranks=2).model_dump_json())
    assert peer_from_environment() == PeerConfig(ranks=2)


async def test_a_host_refuses_memory_before_the_schema_is_known(tmp_path: object) -> None:
    host = TrainerHost(RunConfig(), PeerConfig(), tmp_path / "log")  # type: ignore[operator]
    state = SharedState.create(10)
    with pytest.raises(InternalError, match="does not fit"):
        host.attach(state)
    state.close()
    with pytest.raises(InternalError, match="open SharedState"):
        host.attach(state)
    await host.stop(1)  # nothing runs: of no effect
