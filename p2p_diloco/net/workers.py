"""Numerics in threads: numpy, torch and BLAKE3 release the interpreter lock, so the loop keeps its rhythm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.numerics.kernels import use_torch


class Table(Protocol):
    """What the workers run (`numerics.work.WorkTable`)."""

    def run(self, op: str, arguments: tuple[Any, ...]) -> Any: ...


Answer = Callable[[Any, str], None]  # result, error
Crash = Callable[[BaseException], None]


class Workers:
    """A thread pool round one work table. `submit` never blocks; answers come on the loop in which the
    pool was made. What waits in it is bounded by the ring's window and the catch-up's slots."""

    def __init__(self, table: Table, threads: int, on_crash: Crash) -> None:
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="numerics", initializer=use_torch)
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self._table = table
        self._on_crash = on_crash
        self._closed = False

    def submit(self, op: str, arguments: tuple[Any, ...], answer: Answer) -> None:
        """Run one operation; ``answer(result, error)`` follows. A defect of ours goes to ``on_crash``."""
        self._watch(self._pool.submit(self._table.run, op, arguments), answer, ProtocolViolation)

    def write(self, function: Callable[[], None], answer: Answer) -> None:
        """Run a disk write; writes keep their order. An OSError is answered as an error."""
        self._watch(self._disk.submit(function), answer, OSError)

    def _watch(self, future: Future[Any], answer: Answer, expected: type[Exception]) -> None:
        def done(finished: Future[Any]) -> None:
            if not self._closed:
                self._loop.call_soon_threadsafe(self._deliver, finished, answer, expected)

        future.add_done_callback(done)

    def _deliver(self, finished: Future[Any], answer: Answer, expected: type[Exception]) -> None:
        if self._closed or finished.cancelled():
            return
        error = finished.exception()
        if error is None:
            answer(finished.result(), "")
        elif isinstance(error, expected):
            answer(None, str(error) or type(error).__name__)
        else:
            self._on_crash(error)

    async def close(self) -> None:
        """Drop what has not begun, finish what has, end the threads. Disk writes are all finished."""
        self._closed = True
        await self._loop.run_in_executor(None, self._shut)

    def _shut(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._disk.shutdown(wait=True)
