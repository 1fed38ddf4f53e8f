"""Files that are readable after a crash at any instant."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.statements import Cast

from p2p_diloco.disk import RecordLog, RunFolder, write_atomically
from p2p_diloco.errors import ConfigError, UserError
from p2p_diloco.failpoints import Failpoints
from p2p_diloco.wire.messages import pack_object


def test_records_come_back_in_order(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "log")
    entries = [("vote", b"one"), ("promise", b""), ("abstain", bytes(1000))]
    for kind, data in entries:
        log.append(kind, data)
    log.close()
    assert RecordLog(tmp_path / "log").records == entries


def test_a_log_cut_or_damaged_anywhere_keeps_every_whole_record_before_that_place(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RecordLog(path)
    for number in range(3):
        log.append("vote", bytes([number]) * 10)
    log.close()
    data = path.read_bytes()
    each = len(data) // 3
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        again = RecordLog(path)
        assert len(again.records) == cut // each
        again.append("promise", b"new")
        again.close()
        assert RecordLog(path).records[-1] == ("promise", b"new")
        flipped = bytearray(data)
        flipped[cut] ^= 1
        path.write_bytes(bytes(flipped))
        assert len(RecordLog(path).records) <= cut // each + (0 if cut % each >= 0 else 1)


def test_a_log_can_be_cut_to_its_newest_records(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "log")
    for number in range(10):
        log.append("vote", bytes([number]))
    log.keep_newest(3)
    log.append("vote", b"x")
    log.close()
    assert [data for _, data in RecordLog(tmp_path / "log").records] == [b"\x07", b"\x08", b"\x09", b"x"]


def test_an_atomic_write_leaves_no_second_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a", b"1")
    write_atomically(tmp_path / "a", b"2")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"2"


def test_a_run_folder_remembers_its_run_counts_its_starts_and_refuses_another_run(tmp_path: Path) -> None:
    cast = Cast(2)
    first = RunFolder(tmp_path / "run")
    assert first.genesis() is None
    assert first.open_run(cast.genesis) == 0
    certificate = cast.certificate([0, 1], [0])
    first.append("certificate", pack_object(certificate))
    first.append("promise", b"p")
    first.close()
    second = RunFolder(tmp_path / "run")
    assert second.newest_epoch() == 1
    assert second.open_run(cast.genesis) > 0
    assert second.certificates() == (certificate,)
    assert second.log() == (("promise", b"p"),)
    second.close()
    other = Cast(1)
    object.__setattr__(other.genesis, "config", b"{ }")
    with pytest.raises(UserError, match="another run"):
        RunFolder(tmp_path / "run").open_run(other.genesis)


def test_a_folder_that_cannot_be_made_or_a_damaged_genesis_is_the_users_to_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="run folder"):
        RunFolder(tmp_path / "file" / "run")
    folder = RunFolder(tmp_path / "run")
    (folder.path / "genesis.bin").write_bytes(b"junk")
    with pytest.raises(UserError, match="damaged"):
        folder.genesis()


def test_a_failpoint_must_name_a_point_and_an_epoch() -> None:
    Failpoints("").hit("reduce", 1)
    Failpoints("reduce@5").hit("reduce", 4)
    for wrong in ("reduce", "nowhere@1", "reduce@x", "reduce@+", "reduce@5++"):
        with pytest.raises(ConfigError, match="POINT@EPOCH"):
            Failpoints(wrong)


@pytest.mark.parametrize(("setting", "deadly"), [("reduce@5", [5]), ("reduce@5+", [5, 6, 100])])
def test_a_failpoint_strikes_in_its_epoch_and_with_a_plus_in_any_later_one(
    setting: str, deadly: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(number))
    for epoch in (1, 4, 5, 6, 100):
        killed.clear()
        Failpoints(setting).hit("gather", epoch)
        assert killed == []
        Failpoints(setting).hit("reduce", epoch)
        assert killed == ([signal.SIGKILL] if epoch in deadly else [])


# --- rounds ---


def test_a_round_comes_back_whole_and_a_damaged_file_is_left_out(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    payloads = (b"one", b"", bytes(1000))
    folder.keep_round(5, bytes([5]) * 32, payloads)
    assert folder.rounds(5) == [(bytes([5]) * 32, payloads)]
    assert folder.rounds(4) == []
    (file,) = (folder.path / "rounds").iterdir()
    data = file.read_bytes()
    for cut in range(len(data)):
        file.write_bytes(data[:cut])
        assert folder.rounds(5) == [], f"cut at {cut}"
    file.write_bytes(data + b"x")
    assert folder.rounds(5) == []


def test_two_results_of_one_epoch_are_both_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for first in (1, 2):
        folder.keep_round(7, bytes([first]) * 32, (bytes([first]),))
    assert [payloads for _, payloads in folder.rounds(7)] == [(b"\x01",), (b"\x02",)]


def test_rounds_go_when_a_checkpoint_holds_them_and_others_no_longer_ask_for_them(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", keep_rounds=8)

    def kept() -> list[int]:
        return [epoch for epoch in range(40) if folder.rounds(epoch)]

    for epoch in range(1, 8):
        folder.keep_round(epoch, bytes(32), (b"x",))
    assert kept() == [1, 2, 3, 4, 5, 6, 7]
    (folder.path / "checkpoints" / "epoch-00000006").mkdir(parents=True)
    folder.keep_round(8, bytes(32), (b"x",))
    assert kept() == [6, 7, 8]
    for epoch in range(9, 20):
        folder.keep_round(epoch, bytes(32), (b"x",))
    assert kept() == list(range(12, 20)), "bounded, though no checkpoint came"


def test_a_round_that_the_disk_has_no_room_for_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError("No space left on device")

    folder = RunFolder(tmp_path / "run")
    monkeypatch.setattr("p2p_diloco.disk.os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        folder.keep_round(1, bytes(32), (b"x",))
    assert list((folder.path / "rounds").iterdir()) == []


# --- a lost vote log ---


@pytest.mark.parametrize("loss", ["none", "removed", "damaged", "cut"])
def test_a_life_knows_that_the_votes_of_an_earlier_one_are_lost(tmp_path: Path, loss: str) -> None:
    cast = Cast(1)
    folder = RunFolder(tmp_path / "run")
    folder.open_run(cast.genesis)
    assert not folder.forgot, "a first life has nothing to forget"
    for _ in range(3):
        folder.append("vote", b"a vote")
    folder.close()
    votes = tmp_path / "run" / "votes.log"
    if loss == "removed":
        votes.unlink()
    elif loss == "damaged":
        data = bytearray(votes.read_bytes())
        data[len(data) // 2] ^= 1
        votes.write_bytes(bytes(data))
    elif loss == "cut":  # the last record was being written when the machine died: it was never said
        votes.write_bytes(votes.read_bytes()[:-3])
    again = RunFolder(tmp_path / "run")
    again.open_run(cast.genesis)
    assert again.forgot == (loss in ("removed", "damaged"))
    again.close()
