"""The peer's end of the bridge: launches the trainer ranks, talks to them, and leaves none behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from p2p_diloco.bridge.api import OnEvent, TrainerDied, TrainerEvent
from p2p_diloco.bridge.client import (
    ENV_ADDRESS,
    ENV_PEER,
    ENV_RUN,
    ENV_SEED,
    ENV_STARTS,
    bridge_address,
)
from p2p_diloco.bridge.messages import (
    CONTROL_LIMIT_BYTES,
    HELLO_LIMIT_BYTES,
    Attach,
    Command,
    Control,
    Failed,
    FrameReader,
    Hello,
    InitialWritten,
    Progress,
    Round,
    RoundDone,
    Shutdown,
    StopEarly,
    WriteInitial,
    encode,
)
from p2p_diloco.bridge.shared import SharedState, StateAreas
from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import InternalError, ProtocolViolation, TrainerError
from p2p_diloco.numerics.layout import Schema

logger = logging.getLogger(__name__)

DEFAULT_COMMAND = ("-m", "p2p_diloco.train.trainer")
_QUEUED_COMMANDS = 64
_LOG_LIMIT_BYTES = 16 * 1024 * 1024
_SEARCHED_BYTES = 64 * 1024
_TAIL_CHARACTERS = 2048
_GRACE_S = 5.0


@dataclasses.dataclass
class _Rank:
    """One connected rank; ``pidfd`` names its process without the risk of a reused pid (-1: none)."""

    connection: socket.socket
    outgoing: asyncio.Queue[Command]
    rank: int = -1
    pid: int = 0
    failure: str = ""
    pidfd: int = -1
    tasks: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)


class TrainerHost:
    """Runs ``peer.ranks`` trainer processes under torch's elastic launcher (see `Trainer`).

    ``command`` is what the launcher runs, default our own trainer: ``("script.py", "arg")`` or
    ``("-m", "module")``. ``founder`` decides whether the weights are seeded by the run's seed or by the
    peer's (default: a peer without initial peers). Output of the processes goes to ``log_path``.
    """

    def __init__(
        self,
        run: RunConfig,
        peer: PeerConfig,
        log_path: Path,
        *,
        command: Sequence[str] | None = None,
        founder: bool | None = None,
        start_timeout_s: float = 300.0,
        initial_timeout_s: float = 300.0,
    ) -> None:
        self.on_event: OnEvent | None = None
        self.starts = 0
        self._run = run
        self._peer = peer
        self._log_path = log_path
        self._command = tuple(command) if command is not None else DEFAULT_COMMAND
        self._founder = founder if founder is not None else not peer.initial_peers
        self._start_timeout_s = start_timeout_s
        self._initial_timeout_s = initial_timeout_s
        self._reset()

    def _reset(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._listener: socket.socket | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._ranks: list[_Rank] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._schema: Schema | None = None
        self._schema_ready: asyncio.Future[Schema] | None = None
        self._initial_ready: asyncio.Future[None] | None = None
        self._initial_left: set[int] = set()
        self._round_left: set[int] = set()
        self._round_epoch = -1
        self._round_report: RoundDone | None = None
        self._log_start = 0
        self._closing = False
        self._ended: asyncio.Task[None] | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids: the launcher's first, then the connected ranks' in rank order."""
        launcher = [self._process.pid] if self._process is not None else []
        return launcher + [rank.pid for rank in sorted(self._ranks, key=lambda rank: rank.rank) if rank.pid]

    async def start(self) -> Schema:
        """Launch the ranks and wait for their models; returns the schema of rank 0.

        Raises TrainerError with the end of the log if they end or are not ready in time; nothing is left
        running then. No TrainerDied follows a failed start.
        """
        if self._process is not None:
            raise InternalError("the trainer is already running")
        self._reset()
        self.starts += 1
        loop = asyncio.get_running_loop()
        self._schema_ready = loop.create_future()
        address = self._listen()
        try:
            await self._launch(address)
            self._tasks.append(loop.create_task(self._accept()))
            self._tasks.append(loop.create_task(self._await_exit()))
            self._schema = await asyncio.wait_for(asyncio.shield(self._schema_ready), self._start_timeout_s)
        except TimeoutError:
            text = f"the trainer was not ready within {self._start_timeout_s:g} s"
            await self.stop(_GRACE_S)
            raise TrainerError(self._with_tail(text)) from None
        except BaseException:
            await self.stop(_GRACE_S)
            raise
        finally:
            self._close_listener()
        logger.info("trainer ready: %d rank(s), %d values", self._peer.ranks, self._schema.total_values)
        return self._schema

    def attach(self, state: StateAreas) -> None:
        """Hand the shared memory to the ranks. InternalError for another kind or size of memory."""
        if not isinstance(state, SharedState) or state.fd < 0:
            raise InternalError("trainer processes need an open SharedState")
        if self._schema is None or state.total_values != self._schema.total_values:
            raise InternalError(f"shared memory of {state.total_values} values does not fit the schema")
        body = encode(state.attach_message())
        for rank in self._ranks:
            # These few bytes are the first that this socket ever carries, so they cannot block.
            sent = socket.send_fds(rank.connection, [body], [state.fd])
            if sent != len(body):
                raise InternalError(f"rank {rank.rank} took {sent} of {len(body)} bytes of Attach")

    async def write_initial(self) -> None:
        """Have every rank write its part of the initial weights to anchor slot 0.

        Raises TrainerError if a rank dies or does not finish in time.
        """
        self._initial_left = set(range(self._peer.ranks))
        self._initial_ready = asyncio.get_running_loop().create_future()
        self._post(WriteInitial())
        try:
            await asyncio.wait_for(asyncio.shield(self._initial_ready), self._initial_timeout_s)
        except TimeoutError:
            self._initial_ready = None
            text = f"the trainer did not write its weights within {self._initial_timeout_s:g} s"
            raise TrainerError(self._with_tail(text)) from None

    def start_round(self, command: Round) -> None:
        """See `Trainer.start_round`; InternalError if a round is under way."""
        if self._round_left:
            raise InternalError(f"the round of epoch {self._round_epoch} is still under way")
        self._round_left = set(range(self._peer.ranks))
        self._round_epoch = command.epoch
        self._round_report = None
        self._post(command)

    def stop_early(self, epoch: int) -> None:
        """See `Trainer.stop_early`."""
        if self._round_left and epoch == self._round_epoch:
            self._post(StopEarly(epoch))

    async def stop(self, timeout_s: float) -> None:
        """See `Trainer.stop`: Shutdown, then SIGTERM, then SIGKILL; returns with no process left."""
        self._closing = True
        if self._ended is not None and self._ended is not asyncio.current_task():
            await self._ended
        process = self._process
        if process is None:
            await self._clean_up()
            return
        self._post(Shutdown())
        await _exit_within(process, timeout_s * 0.6)
        await self._kill(timeout_s * 0.3)
        await self._clean_up()
        self._refuse_waiting(TrainerError("the trainer was stopped"))

    def _listen(self) -> str:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        if sys.platform == "linux":
            # An abstract name lives in the kernel only: nothing on disk, nothing to remove. The caller's
            # user id is checked on accept.
            address = f"@p2p-diloco-{os.getpid()}-{secrets.token_hex(8)}"
        else:
            self._directory = tempfile.TemporaryDirectory(prefix="p2p-")  # mode 0700
            address = os.path.join(self._directory.name, "bridge")
        self._listener.bind(bridge_address(address))
        self._listener.listen(self._peer.ranks)
        return address

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _environment(self, address: str) -> dict[str, str]:
        env = dict(os.environ)
        env[ENV_ADDRESS] = address
        env[ENV_RUN] = self._run.model_dump_json()
        env[ENV_PEER] = self._peer.model_dump_json()
        env[ENV_SEED] = str(self._run.seed if self._founder else self._peer.trainer_seed)
        env[ENV_STARTS] = str(self.starts)
        # The ranks must find this very package, installed or not.
        package_root = str(Path(__file__).resolve().parents[2])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, env.get("PYTHONPATH", "")]))
        if self._peer.trainer_threads:
            env["OMP_NUM_THREADS"] = str(self._peer.trainer_threads)
        return env

    def _open_log(self) -> BinaryIO:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        if self._log_path.exists() and self._log_path.stat().st_size > _LOG_LIMIT_BYTES:
            self._log_path.replace(self._log_path.with_suffix(self._log_path.suffix + ".1"))
        log = self._log_path.open("ab")
        self._log_start = log.tell()
        return log

    async def _launch(self, address: str) -> None:
        launcher = (
            *("-m", "torch.distributed.run", "--standalone", "--max-restarts", "0"),
            *("--nproc-per-node", str(self._peer.ranks)),
        )
        with self._open_log() as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *launcher,
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(address),
                start_new_session=True,
            )

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while len(self._ranks) < self._peer.ranks:
            assert self._listener is not None
            connection, _ = await loop.sock_accept(self._listener)
            pid, uid = _credentials(connection)
            if uid != os.getuid():
                logger.warning("refused a bridge connection of user %d", uid)
                connection.close()
                continue
            connection.setblocking(False)
            rank = _Rank(connection, asyncio.Queue(_QUEUED_COMMANDS), pid=pid, pidfd=_open_pidfd(pid))
            self._ranks.append(rank)
            rank.tasks = [loop.create_task(self._read(rank)), loop.create_task(self._write(rank))]

    async def _read(self, rank: _Rank) -> None:
        loop = asyncio.get_running_loop()
        reader = FrameReader(HELLO_LIMIT_BYTES)
        text = ""
        try:
            while data := await loop.sock_recv(rank.connection, 65536):
                for message in reader.feed(data):
                    self._take(rank, message)
                    reader.limit_bytes = CONTROL_LIMIT_BYTES
        except (OSError, ProtocolViolation) as error:
            text = f"broke the bridge: {error}"
        name = f"rank {rank.rank}" if rank.rank >= 0 else f"process {rank.pid}"
        self._fail(f"trainer {name} {text or rank.failure or 'ended without a word'}")

    async def _write(self, rank: _Rank) -> None:
        loop = asyncio.get_running_loop()
        while True:
            command = await rank.outgoing.get()
            try:
                await loop.sock_sendall(rank.connection, encode(command))
            except OSError as error:
                logger.debug("trainer rank %d no longer reads: %s", rank.rank, error)
                return  # its reader sees the end of file and reports

    def _post(self, command: Command) -> None:
        assert not isinstance(command, Attach)
        for rank in self._ranks:
            try:
                rank.outgoing.put_nowait(command)
            except asyncio.QueueFull:
                self._fail(f"trainer rank {rank.rank} does not read its commands")

    def _take(self, rank: _Rank, message: Control) -> None:
        if isinstance(message, Hello):
            self._take_hello(rank, message)
        elif isinstance(message, Failed):
            rank.failure = f"failed: {message.text}"
        elif rank.rank < 0:
            raise ProtocolViolation(f"{type(message).__name__} before Hello")
        elif isinstance(message, Progress):
            if rank.rank == 0:
                self._emit(message)
        elif isinstance(message, RoundDone):
            self._take_round_done(rank, message)
        elif isinstance(message, InitialWritten):
            self._initial_left.discard(rank.rank)
            if not self._initial_left and self._initial_ready is not None and not self._initial_ready.done():
                self._initial_ready.set_result(None)
        else:
            raise ProtocolViolation(f"a rank sent a {type(message).__name__}")

    def _take_hello(self, rank: _Rank, message: Hello) -> None:
        taken = [other.rank for other in self._ranks]
        if rank.rank >= 0 or message.rank in taken or message.rank >= self._peer.ranks:
            raise ProtocolViolation(f"unexpected Hello of rank {message.rank}")
        if message.ranks != self._peer.ranks:
            raise ProtocolViolation(f"rank {message.rank} counts {message.ranks} ranks")
        rank.rank = message.rank
        rank.pid = rank.pid or message.pid
        if message.rank == 0:
            self._schema = Schema.from_bytes(message.schema)
        logger.debug("trainer rank %d is process %d on %s", message.rank, message.pid, message.device)
        ready = self._schema_ready
        complete = len(self._ranks) == self._peer.ranks and all(other.rank >= 0 for other in self._ranks)
        if complete and self._schema is not None and ready is not None and not ready.done():
            ready.set_result(self._schema)

    def _take_round_done(self, rank: _Rank, message: RoundDone) -> None:
        if rank.rank not in self._round_left or message.epoch != self._round_epoch:
            raise ProtocolViolation(f"unexpected RoundDone of epoch {message.epoch}")
        self._round_left.discard(rank.rank)
        if rank.rank == 0:
            self._round_report = message
        if not self._round_left and self._round_report is not None:
            self._emit(self._round_report)

    async def _await_exit(self) -> None:
        assert self._process is not None
        status = await self._process.wait()
        self._fail(f"the trainer's launcher ended with status {status}")

    def _fail(self, text: str) -> None:
        """Begin the end of this start, once: kill what is left, then tell."""
        if self._closing or self._ended is not None:
            return
        self._ended = asyncio.get_running_loop().create_task(self._end(text))

    async def _end(self, text: str) -> None:
        assert self._process is not None
        # Give the launcher a moment: it writes the traceback of the rank that failed first.
        await _exit_within(self._process, _GRACE_S)
        await self._kill(_GRACE_S)
        error = TrainerError(self._with_tail(text))
        await self._clean_up()
        starting = self._schema_ready is not None and not self._schema_ready.done()
        self._refuse_waiting(error)
        if not starting and not self._closing:
            self._emit(TrainerDied(str(error)))

    def _refuse_waiting(self, error: TrainerError) -> None:
        """Let a `start` or `write_initial` that still waits raise ``error``."""
        for future in (self._schema_ready, self._initial_ready):
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # marked as seen: perhaps nobody waits any more

    async def _kill(self, timeout_s: float) -> None:
        """SIGTERM, then SIGKILL, to the launcher's group and to every rank (they have own groups)."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            _signal_group(process.pid, signal.SIGTERM)
            await _exit_within(process, timeout_s)
        _signal_group(process.pid, signal.SIGKILL)
        for rank in self._ranks:
            _signal_rank(rank, signal.SIGKILL)
        await process.wait()

    async def _clean_up(self) -> None:
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for rank in self._ranks:
            tasks += rank.tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        deadline = time.monotonic() + _GRACE_S
        for rank in self._ranks:
            rank.connection.close()
            await _rank_gone(rank, deadline)
        self._ranks = []
        self._tasks = []
        self._process = None
        self._round_left = set()
        self._close_listener()

    def _with_tail(self, text: str) -> str:
        try:
            with self._log_path.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - _SEARCHED_BYTES))
                tail = _last_words(log.read().decode("utf-8", "replace"))
        except OSError as error:
            tail = f"(unreadable: {error.strerror})"
        return f"{text}; log {self._log_path} ends with:\n{tail}"

    def _emit(self, event: TrainerEvent) -> None:
        if self.on_event is not None:
            self.on_event(event)


def _last_words(log: str) -> str:
    """The end of what the ranks wrote. The launcher follows a crash with pages of its own, of which only
    the line with the exit status helps."""
    lines = log.splitlines()
    for index, line in enumerate(lines):
        if "failed (exitcode:" in line:
            lines = lines[: index + 1]
            break
    return "\n".join(lines)[-_TAIL_CHARACTERS:].strip()


async def _exit_within(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), timeout_s)


def _credentials(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process at the other end; (0, own uid) where only the directory's mode guards."""
    if sys.platform != "linux":
        return 0, os.getuid()
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return pid, uid


def _open_pidfd(pid: int) -> int:
    if sys.platform != "linux" or not pid:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        logger.debug("no pidfd for process %d: %s", pid, error)
        return -1


def _signal_group(pid: int, number: signal.Signals) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        logger.debug("process group %d is gone", pid)
    except PermissionError as error:  # macOS answers so for a group of zombies
        logger.debug("process group %d: %s", pid, error)


def _signal_rank(rank: _Rank, number: signal.Signals) -> None:
    if rank.pidfd < 0 or sys.platform != "linux":
        return  # without a pidfd the rank ends itself when its socket closes
    try:
        signal.pidfd_send_signal(rank.pidfd, number)
    except ProcessLookupError:
        logger.debug("trainer rank %d is gone", rank.rank)


async def _rank_gone(rank: _Rank, deadline: float) -> None:
    """Wait until a rank's process has ended (it was killed or its socket closed); frees the pidfd."""
    if rank.pidfd < 0:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(rank.pidfd, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        logger.error("trainer process %d outlived SIGKILL", rank.pid)
    finally:
        loop.remove_reader(rank.pidfd)
        os.close(rank.pidfd)
        rank.pidfd = -1
