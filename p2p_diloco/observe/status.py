"""What the person at the terminal sees: a live panel on a terminal, single lines anywhere else.

The peer keeps a `Status` up to date with plain assignments; `StatusView` looks at it some times a second.
Nothing here may end training: whatever the terminal does to us, the view falls back to plain lines, and to
silence if even those cannot be written.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from p2p_diloco.observe.metrics import EpochMetrics

REFRESH_S: Final = 0.25  # between looks at the status; four a second is what an eye needs (guess)
PROGRESS_LINE_S: Final = 10.0  # at least this long between progress lines in plain mode (guess)
_SHOWN_PEERS: Final = 16
_TEXT_LIMIT: Final = 2000  # characters of one line; longer ones come from a defect or a rude peer

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_STYLES: Final = {
    "debug": "dim",
    "info": "",
    "warning": "yellow",
    "error": "bold red",
    "critical": "bold red",
}

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PeerRow:
    """Another peer as the panel shows it. ``rtt_ms`` is None until measured, ``loss`` until told."""

    peer: str
    state: str
    epoch: int = 0
    step: int = 0
    loss: float | None = None
    rtt_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Notice:
    """A line of the panel's foot: local time of day, level, text."""

    clock: str
    level: str
    text: str


@dataclass
class Status:
    """What is shown. The peer assigns; the view reads. Losses in nats per token, byte counts since start."""

    run_name: str = ""
    run_id: str = ""
    peer: str = ""
    state: str = "starting"
    epoch: int = 0
    attempt: int = 0
    peers: list[PeerRow] = field(default_factory=list)
    step: int = 0
    steps: int = 0
    loss: float | None = None
    eval_loss: float | None = None
    tokens_per_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    ring_ms: float = 0.0
    quantisation_error: float = 0.0
    discovery: str = ""
    notices: deque[Notice] = field(default_factory=lambda: deque(maxlen=8))
    epoch_lines: deque[str] = field(default_factory=lambda: deque(maxlen=64))

    def notice(self, level: str, text: str) -> None:
        """Show ``text`` at the panel's foot and log it. level: info, warning or error."""
        self.notices.append(Notice(time.strftime("%H:%M:%S"), level, clean(text)))
        logger.log(_LEVELS.get(level, logging.ERROR), "%s", text)

    def note_step(self, step: int, loss: float, tokens_per_s: float) -> None:
        """An inner step of ours is done; ``step`` counts from 1 within the epoch."""
        self.step, self.loss, self.tokens_per_s = step, loss, tokens_per_s

    def note_epoch(self, metrics: EpochMetrics) -> None:
        """An epoch is certified: one line for the user, and the panel's figures of it.

        ``metrics.bytes_*`` are those of the epoch and are added to the totals.
        """
        self.epoch, self.attempt, self.step = metrics.epoch, metrics.attempt, 0
        self.ring_ms, self.quantisation_error = metrics.ring_ms, metrics.quantisation_error
        self.bytes_sent += metrics.bytes_sent
        self.bytes_received += metrics.bytes_received
        if metrics.eval_loss is not None:
            self.eval_loss = metrics.eval_loss
        self.epoch_lines.append(epoch_line(metrics))


def clean(text: str) -> str:
    """``text`` as one line without control characters: some of it was written by other peers, and an
    escape sequence in it must not reach the terminal."""
    line = " ".join(text.split())
    return "".join(char if char.isprintable() else "?" for char in line[:_TEXT_LIMIT])


def show_bytes(count: float) -> str:
    """Decimal units, three digits or so: 999 B, 12.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def epoch_line(metrics: EpochMetrics) -> str:
    """The one line that a certified epoch leaves on the screen."""
    parts = [
        f"epoch {metrics.epoch} agreed: {len(metrics.contributors)} of {metrics.peers} peers",
        f"attempt {metrics.attempt}",
        f"{metrics.tokens:,} tokens",
    ]
    if metrics.mean_loss is not None:
        parts.append(f"loss {metrics.mean_loss:.4f}")
    if metrics.eval_loss is not None:
        parts.append(f"held-out {metrics.eval_loss:.4f}")
    parts.append(f"ring {metrics.ring_ms / 1000:.2f} s")
    parts.append(f"sent {show_bytes(metrics.bytes_sent)}, received {show_bytes(metrics.bytes_received)}")
    if metrics.quantisation_error:
        parts.append(f"codec error {100 * metrics.quantisation_error:.2f}%")
    parts.append(f"state {metrics.state_root[:12]}")
    return ", ".join(parts)


def progress_line(status: Status) -> str:
    """Where the peer is, in one line."""
    loss = "" if status.loss is None else f", loss {status.loss:.4f}"
    speed = f", {status.tokens_per_s:,.0f} tokens/s" if status.tokens_per_s else ""
    steps = f", step {status.step}/{status.steps}" if status.steps else ""
    return f"{status.state}: epoch {status.epoch}{steps}{loss}{speed}, {len(status.peers)} other peers"


class StatusView:
    """Draws a `Status`. ``await start()`` begins, ``await stop()`` leaves the last picture standing.

    ``plain=None`` means: lines unless ``stream`` (stdout) is a terminal that can move its cursor.
    No method raises because of the terminal.
    """

    def __init__(
        self,
        status: Status,
        stream: TextIO | None = None,
        plain: bool | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.status = status
        stream = sys.stdout if stream is None else stream
        self._console = _console(stream)
        self.plain = not _can_draw(stream, self._console) if plain is None else plain
        self._clock_s = clock_s
        self._live: Live | None = None
        self._task: asyncio.Task[None] | None = None
        self._silent = False
        self._last_state = ""
        self._last_line_s = clock_s()
        self._last_progress = ""

    async def start(self) -> None:
        """Show the first picture and keep it fresh in a task of the running loop."""
        if self._task is None:
            if not self.plain:
                self._guard(self._open_panel)
            self.refresh()
            self._task = asyncio.get_running_loop().create_task(self._refresh_forever(), name="status view")

    async def stop(self) -> None:
        """Draw once more and end. May be called twice."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.refresh()
        self._close_panel()

    def refresh(self) -> None:
        """Show what has changed since the last look."""
        while self.status.epoch_lines:
            self.print_line(self.status.epoch_lines.popleft(), "bold")
        if self.plain:
            self._guard(self._print_changes)
        else:
            self._guard(self._draw)

    def print_line(self, text: str, style: str = "") -> None:
        """One line, above the panel if there is one. Safe to call from any thread."""
        line = Text(clean(text), style=style)
        self._guard(lambda: self._console.print(line, soft_wrap=True, highlight=False))

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            self.refresh()

    def _guard(self, draw: Callable[[], None]) -> None:
        """Draw; on any failure go one step down: panel, then lines, then silence."""
        if self._silent:
            return
        try:
            draw()
        except Exception as error:  # noqa: BLE001 - no terminal, however odd, may end training
            was_plain, self.plain = self.plain, True
            self._silent = was_plain
            if not was_plain:
                self._close_panel()
            step = "no more output" if was_plain else "plain lines from now on"
            logger.warning(
                "the terminal cannot show the status (%s: %s): %s", type(error).__name__, error, step
            )

    def _open_panel(self) -> None:
        # auto_refresh would draw from a thread of rich's; a task of ours draws, so nothing races the peer
        live = Live(
            self._picture(),
            console=self._console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live = live
        live.start()

    def _close_panel(self) -> None:
        live, self._live = self._live, None
        if live is None:
            return
        try:
            live.stop()
        except Exception as error:  # noqa: BLE001 - as in _guard
            self._silent = True
            logger.warning("the terminal could not be put back in order: %s", error)

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)

    def _print_changes(self) -> None:
        status, now_s = self.status, self._clock_s()
        line = progress_line(status)
        due = now_s - self._last_line_s >= PROGRESS_LINE_S and line != self._last_progress
        if status.state == self._last_state and not due:
            return
        self._last_state, self._last_progress, self._last_line_s = status.state, line, now_s
        self.print_line(line)

    def _picture(self) -> Panel:
        status = self.status
        figures = Table.grid(padding=(0, 2))
        for _ in range(6):
            figures.add_column(no_wrap=True)
        for row in _figures(status):
            figures.add_row(
                *(Text(clean(cell), style="dim" if i % 2 == 0 else "") for i, cell in enumerate(row))
            )
        parts: list[Table | Text] = [figures, _peer_table(status)]
        if len(status.peers) > _SHOWN_PEERS:
            parts.append(Text(f"and {len(status.peers) - _SHOWN_PEERS} more", style="dim"))
        if status.discovery:
            parts.append(Text(clean(f"discovery: {status.discovery}"), style="dim"))
        for notice in status.notices:
            line = Text(f"{notice.clock} {notice.text}", style=_STYLES.get(notice.level, ""))
            line.truncate(max(self._console.width - 4, 20), overflow="ellipsis")
            parts.append(line)
        title = Text(clean(f"{status.run_name or 'no run yet'} {status.run_id}"))
        return Panel(
            Group(*parts), title=title, subtitle=Text(clean(f"peer {status.peer}")), title_align="left"
        )


def _figures(status: Status) -> list[tuple[str, ...]]:
    loss = "-" if status.loss is None else f"{status.loss:.4f}"
    held_out = "-" if status.eval_loss is None else f"{status.eval_loss:.4f}"
    return [
        ("state", status.state, "epoch", str(status.epoch), "attempt", str(status.attempt)),
        ("step", f"{status.step}/{status.steps}", "loss", loss, "held-out", held_out),
        ("tokens/s", f"{status.tokens_per_s:,.0f}", "sent", show_bytes(status.bytes_sent), "received",
         show_bytes(status.bytes_received)),
        ("ring", f"{status.ring_ms / 1000:.2f} s", "codec error", f"{100 * status.quantisation_error:.2f}%",
         "peers", str(len(status.peers))),
    ]  # fmt: skip


def _peer_table(status: Status) -> Table:
    table = Table(expand=False, header_style="dim", show_edge=False)
    for name in ("peer", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("epoch", "step", "loss", "round trip"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in status.peers[:_SHOWN_PEERS]:
        loss = "-" if row.loss is None else f"{row.loss:.4f}"
        rtt = "-" if row.rtt_ms is None else f"{row.rtt_ms:.0f} ms"
        cells = (row.peer, row.state, str(row.epoch), str(row.step), loss, rtt)
        table.add_row(*(Text(clean(cell)) for cell in cells))
    return table


class _ViewHandler(logging.Handler):
    """Sends log records through the view, so that they stand above the panel and do not tear it."""

    def __init__(self, view: StatusView) -> None:
        super().__init__()
        self._view = view

    def emit(self, record: logging.LogRecord) -> None:
        try:
            style = _STYLES.get(record.levelname.lower(), "")
            for line in self.format(record).splitlines():
                self._view.print_line(line, style)
        except Exception:  # noqa: BLE001 - logging's own way: it says so on stderr
            self.handleError(record)


def setup_logging(level: str, view: StatusView | None = None) -> None:
    """Send the package's log to ``view`` (or stderr) as ``HH:MM:SS LEVEL text``; warnings of other packages
    too. Replaces what an earlier call set up. level: debug, info, warning or error."""
    handler: logging.Handler = logging.StreamHandler() if view is None else _ViewHandler(view)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    for old in list(root.handlers):
        if getattr(old, "_p2p_diloco", False):
            root.removeHandler(old)
    handler._p2p_diloco = True  # type: ignore[attr-defined]
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("p2p_diloco").setLevel(_LEVELS.get(level, logging.INFO))


class _SteadyConsole(Console):
    """rich ends the process when its pipe breaks; training must go on."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this while handling the BrokenPipeError


def _console(stream: TextIO) -> Console:
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        try:
            reconfigure(errors="replace")  # an ASCII terminal shows ? where it lacks a character
        except (OSError, ValueError) as error:
            logger.debug("stdout keeps its error handling: %s", error)
    return _SteadyConsole(
        file=stream,
        no_color=True if os.environ.get("NO_COLOR") else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _can_draw(stream: TextIO, console: Console) -> bool:
    """Whether ``stream`` is a terminal whose cursor can be moved."""
    try:
        return stream.isatty() and console.is_terminal and not console.is_dumb_terminal
    except (OSError, ValueError, AttributeError) as error:
        logger.debug("stdout is no terminal: %s", error)
        return False
