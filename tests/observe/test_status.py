"""The status view: a panel on terminals, lines elsewhere, and never a crash."""

from __future__ import annotations

import asyncio
import io
import logging
import re
from collections.abc import Iterator

import pytest

from p2p_diloco.observe.metrics import EpochMetrics
from p2p_diloco.observe.status import (
    PROGRESS_LINE_S,
    PeerRow,
    Status,
    StatusView,
    clean,
    setup_logging,
    show_bytes,
)

EPOCH = EpochMetrics(
    3, 1, 4, ("a", "b", "c"), 76_800, 1234.0, 12_300_000, 456, 0.0123, 2.5, 2.75, "abcd" * 16
)


class Terminal(io.StringIO):
    """Says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class Broken(Terminal):
    """A terminal that goes away after some writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.left = writes

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise BrokenPipeError(32, "gone")
        return super().write(text)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("p2p_diloco")
    before = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def filled() -> Status:
    status = Status(run_name="books", run_id="ABCD", peer="p1", state="training", epoch=3, step=5, steps=50)
    status.peers = [PeerRow("p2", "alive", 3, 4, 2.5, 31.0), PeerRow("p3", "suspect")]
    status.loss, status.tokens_per_s, status.discovery = 2.3456, 1234.5, "2 peers known"
    return status


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_pipe_gets_one_plain_line_on_each_change_of_state() -> None:
    stream, status = io.StringIO(), filled()
    view = StatusView(status, stream)
    assert view.plain
    view.refresh()
    view.refresh()
    status.step = 6  # progress alone is not yet worth a line
    view.refresh()
    status.state = "ring"
    view.refresh()
    assert lines_of(stream) == [
        "training: epoch 3, step 5/50, loss 2.3456, 1,234 tokens/s, 2 other peers",
        "ring: epoch 3, step 6/50, loss 2.3456, 1,234 tokens/s, 2 other peers",
    ]


def test_progress_gets_a_line_after_a_while_and_only_if_there_was_any() -> None:
    stream, status, clock = io.StringIO(), filled(), Clock()
    view = StatusView(status, stream, clock_s=clock)
    view.refresh()
    clock.now_s += PROGRESS_LINE_S
    view.refresh()
    assert len(lines_of(stream)) == 1
    status.step = 20
    view.refresh()
    status.step = 21
    view.refresh()
    assert len(lines_of(stream)) == 2
    assert "step 20/50" in lines_of(stream)[1]


def test_each_certified_epoch_leaves_one_line_and_updates_the_figures() -> None:
    stream, status = io.StringIO(), filled()
    view = StatusView(status, stream)
    view.refresh()
    status.note_epoch(EPOCH)
    status.note_epoch(EPOCH)
    view.refresh()
    line = (
        "epoch 3 agreed: 3 of 4 peers, attempt 1, 76,800 tokens, loss 2.5000, held-out 2.7500, ring 1.23 s, "
        "sent 12.3 MB, received 456 B, codec error 1.23%, state abcdabcdabcd"
    )
    assert lines_of(stream)[1:] == [line, line]
    assert (status.bytes_sent, status.eval_loss, status.step) == (24_600_000, 2.75, 0)


def test_a_terminal_gets_a_panel_with_everything_in_it() -> None:
    stream, status = Terminal(), filled()
    status.notice("warning", "peer p9 is slow")
    view = StatusView(status, stream)
    assert not view.plain

    async def show() -> None:
        await view.start()
        status.note_epoch(EPOCH)
        await view.stop()
        await view.stop()

    asyncio.run(show())
    text = stream.getvalue()
    wanted = ["books ABCD", "peer p1", "p2", "31 ms", "suspect", "5/50", "2 peers known", "peer p9 is slow"]
    assert [word for word in [*wanted, "12.3 MB", "epoch 3 agreed"] if word not in text] == []
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is given back


def test_many_peers_do_not_make_the_panel_endless() -> None:
    stream, status = Terminal(), filled()
    status.peers = [PeerRow(f"peer{number}", "alive") for number in range(500)]

    async def show() -> None:
        view = StatusView(status, stream)
        await view.start()
        await view.stop()

    asyncio.run(show())
    assert "and 484 more" in stream.getvalue()
    assert "peer16 " not in stream.getvalue()


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")
    streams = Terminal(), Terminal()
    StatusView(Status(), streams[0]).print_line("text", "red")
    monkeypatch.setenv("NO_COLOR", "1")
    StatusView(Status(), streams[1]).print_line("text", "red")
    assert [bool(colour.search(stream.getvalue())) for stream in streams] == [True, False]


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    assert StatusView(Status(), Terminal()).plain


def test_plain_can_be_asked_for_on_a_terminal() -> None:
    stream = Terminal()
    view = StatusView(filled(), stream, plain=True)
    view.refresh()
    assert "\x1b[" not in stream.getvalue()


@pytest.mark.parametrize("writes", range(6))
async def test_a_terminal_that_breaks_at_any_write_ends_nothing(writes: int) -> None:
    status = filled()
    view = StatusView(status, Broken(writes))
    await view.start()
    for state in ("ring", "voting", "training"):
        status.state = state
        status.note_epoch(EPOCH)
        view.refresh()
    await view.stop()
    assert view.plain


async def test_a_terminal_that_breaks_while_it_also_carries_the_log_ends_nothing(
    restored_logging: None,
) -> None:
    status = filled()
    view = StatusView(status, Broken(2))
    setup_logging("debug", view)
    await view.start()
    status.notice("error", "the trainer died")
    await view.stop()


def test_a_closed_stdout_ends_nothing() -> None:
    stream = io.StringIO()
    stream.close()
    view = StatusView(filled(), stream)
    view.refresh()
    view.print_line("x")
    assert view.plain


def test_characters_that_an_ascii_terminal_lacks_are_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    StatusView(Status(), stream).print_line("naïve ✓")
    stream.flush()
    assert raw.getvalue() == b"na?ve ?\n"


def test_words_of_other_peers_cannot_steer_the_terminal() -> None:
    stream, status = Terminal(), filled()
    evil = "x\x1b]0;owned\x07\x1b[2J\r\n[red]y[/red]\u202e"
    status.peers[0].peer, status.run_name = evil, evil
    status.notice("info", evil)
    view = StatusView(status, stream)

    async def show() -> None:
        await view.start()
        view.print_line(evil)
        await view.stop()

    asyncio.run(show())
    assert [bad for bad in ("\x1b]0", "\x07", "\x1b[2J", "\u202e") if bad in stream.getvalue()] == []
    assert "[red]y[/red]" in stream.getvalue()
    assert len(clean("z" * 10_000)) <= 2000


def test_notices_are_kept_short_in_number_and_also_logged(caplog: pytest.LogCaptureFixture) -> None:
    status = Status()
    with caplog.at_level(logging.INFO, logger="p2p_diloco"):
        for number in range(20):
            status.notice("info", f"notice {number}")
        status.notice("error", "bad")
    assert [notice.text for notice in status.notices] == [*(f"notice {n}" for n in range(13, 20)), "bad"]
    assert [record.levelname for record in caplog.records][-2:] == ["INFO", "ERROR"]


def test_log_records_become_short_lines_of_the_view(restored_logging: None) -> None:
    stream = io.StringIO()
    setup_logging("info", StatusView(Status(), stream))
    ours, theirs = logging.getLogger("p2p_diloco.some.module"), logging.getLogger("some.library")
    ours.debug("too fine")
    ours.info("peer %s joined", "p2")
    theirs.info("chatter")
    theirs.warning("trouble")
    try:
        raise ValueError("why")
    except ValueError:
        ours.exception("failed")
    lines = lines_of(stream)
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO +peer p2 joined", lines[0])
    assert lines[1].endswith("trouble")
    assert lines[2].endswith("failed")
    assert lines[-1] == "ValueError: why"


def test_setting_up_logging_again_does_not_double_the_lines(restored_logging: None) -> None:
    first, second = io.StringIO(), io.StringIO()
    setup_logging("info", StatusView(Status(), first))
    setup_logging("warning", StatusView(Status(), second))
    logging.getLogger("p2p_diloco").warning("once")
    logging.getLogger("p2p_diloco").info("not now")
    assert (first.getvalue(), len(lines_of(second))) == ("", 1)


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (12.3e6, "12.3 MB"), (5e15, "5000.0 TB")],
)
def test_byte_counts_are_shown_in_decimal_units(count: float, shown: str) -> None:
    assert show_bytes(count) == shown
