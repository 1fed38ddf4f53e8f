"""The trainer's end of the bridge: used by our own trainer ranks and by a user's training script.

The peer process may vanish at any moment, by SIGKILL too. A watcher thread reads the socket, and when the
other end is gone it ends this process at once, since the main thread may hang in a collective then.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import sys
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.bridge.messages import (
    CONTROL_LIMIT_BYTES,
    TEXT_LIMIT,
    Attach,
    Command,
    Control,
    Failed,
    FrameReader,
    Hello,
    InitialWritten,
    Progress,
    Report,
    Round,
    RoundDone,
    Shutdown,
    StopEarly,
    WriteInitial,
    encode,
)
from p2p_diloco.bridge.shared import Flat, SharedState
from p2p_diloco.config import PeerConfig, RunConfig, build_config
from p2p_diloco.errors import ConfigError, InternalError, ProtocolViolation, SchemaMismatchError
from p2p_diloco.numerics.layout import Schema

logger = logging.getLogger(__name__)

ENV_ADDRESS = "P2P_DILOCO_BRIDGE"
ENV_RUN = "P2P_DILOCO_RUN"
ENV_PEER = "P2P_DILOCO_PEER"
ENV_SEED = "P2P_DILOCO_SEED"
ENV_STARTS = "P2P_DILOCO_STARTS"

EXIT_PEER_GONE = 3
_SOCKET_TIMEOUT_S = 60.0
_QUEUED_COMMANDS = 64


class TrainerClient:
    """One rank's connection to the peer process. All methods belong to the main thread.

    Life: `connect`, `hello`, then `wait_command` in a loop, which answers `Attach` by itself and returns
    `WriteInitial`, `Round` or `Shutdown`.
    """

    def __init__(self, connection: socket.socket, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self._socket = connection
        self._send_lock = threading.Lock()
        self._commands: queue.Queue[Command] = queue.Queue(_QUEUED_COMMANDS)
        self._shared: SharedState | None = None
        self._schema: Schema | None = None
        self._offsets: dict[str, tuple[int, int]] = {}
        self._epoch = -1
        self._stop_epoch = -1
        self._shutdown = threading.Event()
        self._closed = False
        self._watcher = threading.Thread(target=self._watch, name="bridge-watcher", daemon=True)
        self._watcher.start()

    @classmethod
    def connect(cls, address: str | None = None) -> TrainerClient:
        """Connect to the peer process that started this one.

        ``address`` defaults to the environment's; rank and ranks are those of torch's elastic launcher.
        Raises ConfigError without an address, OSError if nobody listens.
        """
        target = address if address is not None else os.environ.get(ENV_ADDRESS, "")
        if not target:
            raise ConfigError(f"{ENV_ADDRESS} is not set: this program is started by a peer process")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_SOCKET_TIMEOUT_S)
        try:
            connection.connect(bridge_address(target))
        except OSError:
            connection.close()
            raise
        return cls(connection, int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    def hello(self, schema: Schema, device: str) -> None:
        """Tell the peer what this rank trains; ``schema`` names all tensors in flat order."""
        self._schema = schema
        self._offsets = {
            spec.name: (offset, offset + spec.values)
            for spec, offset in zip(schema.tensors, schema.offsets, strict=True)
        }
        data = schema.to_bytes() if self.rank == 0 else b""
        self._send(Hello(self.rank, self.ranks, os.getpid(), data, device))

    def wait_command(self, timeout_s: float | None = None) -> WriteInitial | Round | Shutdown | None:
        """The next command; None after ``timeout_s`` (None waits as long as the peer process lives).

        Raises SchemaMismatchError if the shared memory does not have the schema's size.
        """
        while True:
            try:
                command = self._commands.get(timeout=timeout_s)
            except queue.Empty:
                return None
            if isinstance(command, Round):
                self._epoch = command.epoch
            if isinstance(command, WriteInitial | Round | Shutdown):
                return command

    def should_stop(self) -> bool:
        """True once the running round is to end early; never blocks. Ranks may see it at different
        steps: agree before acting on it."""
        return self._shutdown.is_set() or self._stop_epoch == self._epoch

    def anchor_view(self, slot: int) -> Flat:
        """The anchor of ``slot``, fp32 [total_values], in shared memory; only write it to answer
        `WriteInitial`."""
        return self._need_shared().anchor(slot)

    def delta_view(self) -> Flat:
        """The delta, fp32 [total_values], in shared memory; it is final with `round_done`."""
        return self._need_shared().delta

    def write_delta(self, name: str, values: NDArray[np.float32], start: int = 0) -> None:
        """Write flat ``values`` of tensor ``name``, from its flat index ``start`` on, into the delta.

        Raises InternalError for an unknown name or a range outside the tensor.
        """
        if name not in self._offsets:
            raise InternalError(f"tensor {name} is not in the schema")
        begin, end = self._offsets[name]
        flat = values.reshape(-1)
        if start < 0 or begin + start + flat.size > end:
            raise InternalError(f"{start}..{start + flat.size} is outside tensor {name}")
        self.delta_view()[begin + start : begin + start + flat.size] = flat

    def initial_written(self) -> None:
        """Answer `WriteInitial` once this rank's part of anchor slot 0 is written."""
        self._send(InitialWritten())

    def progress(self, message: Progress) -> None:
        """Report progress (rank 0 only; a few times a second at most)."""
        self._send(message)

    def round_done(self, message: RoundDone) -> None:
        """Report that this rank's part of the delta is final (every rank)."""
        self._send(message)

    def failed(self, text: str) -> None:
        """Tell the peer in one line why this rank is about to end."""
        self._send(Failed(text[:TEXT_LIMIT]))

    def close(self) -> None:
        """End the connection on purpose: the peer learns it, this process goes on."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("bridge was already closed: %s", error)
        self._watcher.join(timeout=5)
        self._socket.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _send(self, message: Report) -> None:
        with self._send_lock:
            self._socket.sendall(encode(message))

    def _need_shared(self) -> SharedState:
        if self._shared is None:
            raise InternalError("the peer has not attached shared memory yet")
        return self._shared

    def _watch(self) -> None:
        reader = FrameReader(CONTROL_LIMIT_BYTES)
        fds: list[int] = []
        reason = "the peer process is gone"
        try:
            while True:
                try:
                    data, received, _, _ = socket.recv_fds(self._socket, 65536, 4)
                except TimeoutError:
                    continue  # an idle peer is a living peer: only an end of file counts
                fds += received
                if not data:
                    break
                for message in reader.feed(data):
                    self._take(message, fds)
        except (OSError, ProtocolViolation, SchemaMismatchError, queue.Full) as error:
            reason = f"the bridge to the peer process failed: {error or type(error).__name__}"
        if not self._closed:
            end_process(reason)

    def _take(self, message: Control, fds: list[int]) -> None:
        if isinstance(message, Attach):
            if not fds:
                raise ProtocolViolation("Attach came without a descriptor")
            if self._schema is not None and message.total_values != self._schema.total_values:
                raise SchemaMismatchError(
                    f"shared memory has {message.total_values} values, the model {self._schema.total_values}"
                )
            previous, self._shared = self._shared, SharedState.adopt(fds.pop(0), message)
            if previous is not None:
                previous.close()
        elif isinstance(message, StopEarly):
            self._stop_epoch = message.epoch
        elif isinstance(message, WriteInitial | Round | Shutdown):
            if isinstance(message, Shutdown):
                self._shutdown.set()
            if isinstance(message, Round):
                self._stop_epoch = -1  # an epoch may be trained again; an old request must not end it
            self._commands.put_nowait(message)
        else:
            raise ProtocolViolation(f"the peer sent a {type(message).__name__}")


def end_process(reason: str) -> None:
    """End this process at once, whatever its other threads wait for."""
    sys.stderr.write(f"trainer ends: {reason}\n")
    sys.stderr.flush()
    os._exit(EXIT_PEER_GONE)


def bridge_address(text: str) -> str:
    """The socket address for its form in the environment, where ``@`` stands for the NUL byte that starts
    Linux's abstract socket names."""
    return "\0" + text[1:] if text.startswith("@") else text


def run_from_environment() -> RunConfig:
    """The run config that the peer process passed on; ConfigError if there is none."""
    return build_config(RunConfig, _json_from_environment(ENV_RUN), "run")


def peer_from_environment() -> PeerConfig:
    """The peer config that the peer process passed on; ConfigError if there is none."""
    return build_config(PeerConfig, _json_from_environment(ENV_PEER), "peer")


def _json_from_environment(name: str) -> dict[str, Any]:
    try:
        data = json.loads(os.environ.get(name, ""))
    except json.JSONDecodeError:
        raise ConfigError(f"{name} is not set: this program is started by a peer process") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{name} must hold a JSON object")
    return data
