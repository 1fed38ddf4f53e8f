"""Ends a child daemon when we are gone, even after SIGKILL: a shell that waits for our pipe to close."""

from __future__ import annotations

import asyncio
import contextlib


class Watchdog:
    """Holds the writing end of the shell's standard input; when this process ends, the kernel closes it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def over(cls, pid: int) -> Watchdog:
        """Watch over a child of ours; OSError if no shell can be started."""
        script = f"trap '' INT TERM HUP; read line; [ \"$line\" = stop ] || kill -9 {pid}"
        process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            script,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C at the terminal is for us, not for it
        )
        return cls(process)

    async def stop(self) -> None:
        """Let the shell end without doing anything."""
        stdin = self._process.stdin
        if stdin is not None and self._process.returncode is None:
            with contextlib.suppress(OSError):
                stdin.write(b"stop\n")
                await stdin.drain()
            stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), 1.0)
        except TimeoutError:
            self._process.kill()
