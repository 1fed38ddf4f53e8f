"""tools/chaos.py without processes: its judgements can fail, and what cannot be made is skipped by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import chaos
import chaosnet
import chaosreport
import chaosswarm
import chaosvotes
from chaosreport import Fault, Report
from chaosscenarios import SCENARIOS, Options

from p2p_diloco.identity import Identity, show
from p2p_diloco.wire.messages import Certificate, Signed, Vote, VoteRecord, pack_object

Records = dict[str, list[dict[str, Any]]]
ALL = ("ann", "bob", "cid")


def epoch(
    number: int, t_ms: int, root: str = "", who: tuple[str, ...] = ALL, attempt: int = 0
) -> dict[str, Any]:
    return {
        "kind": "epoch",
        "t_ms": t_ms,
        "epoch": number,
        "state_root": root or f"root of {number}",
        "contributors": list(who),
        "attempt": attempt,
    }


def healthy() -> Records:
    """Three peers, a certificate each second; cid was away for epochs 3 and 4 and learned of them later."""
    without = ("ann", "bob")
    steady = [
        epoch(n, 1000 * n, who=without if n in (3, 4) else ALL, attempt=int(n == 3)) for n in range(1, 7)
    ]
    late = [{**record, "t_ms": 4900} if record["epoch"] in (3, 4) else record for record in steady]
    notice = {"kind": "notice", "t_ms": 1, "text": "hello"}
    return {"ann": [notice, *steady], "bob": [dict(r, t_ms=r["t_ms"] + 7) for r in steady], "cid": late}


# --- digests ---


def test_equal_digests_do_not_diverge() -> None:
    assert chaosreport.divergences(healthy()) == []


def test_another_state_root_diverges() -> None:
    metrics = healthy()
    metrics["bob"][4] = {**metrics["bob"][4], "state_root": "another"}
    (line,) = chaosreport.divergences(metrics)
    assert line.startswith("epoch 5: ")
    assert "ann+cid" in line
    assert "another" in line


def test_other_contributors_diverge_and_their_order_does_not() -> None:
    metrics = healthy()
    metrics["bob"][5] = {**metrics["bob"][5], "contributors": ["cid", "bob", "ann"]}
    assert chaosreport.divergences(metrics) == []
    metrics["bob"][5] = {**metrics["bob"][5], "contributors": ["bob", "ann"]}
    assert len(chaosreport.divergences(metrics)) == 1


def test_a_peer_that_contradicts_its_earlier_life_diverges() -> None:
    metrics = healthy()
    metrics["cid"].append(epoch(6, 9000, root="decided again"))
    assert len(chaosreport.divergences(metrics)) == 1


# --- times ---


def test_a_certificate_is_of_the_time_when_the_first_peer_saw_it() -> None:
    seen = chaosreport.certificates(healthy())
    assert [(entry.epoch, entry.seen_ms) for entry in seen] == [(n, 1000 * n) for n in range(1, 7)]
    assert [entry.seen_ms for entry in chaosreport.certificates(healthy(), ["cid"])][2] == 4900


def test_recovery_runs_to_the_next_certificate_of_a_peer_that_was_not_struck() -> None:
    assert chaosreport.recovery_s(Fault(2500, ("cid",), "kill"), healthy()) == 0.5
    # what ann sees does not count if ann was struck: bob sees each epoch 7 ms later
    assert chaosreport.recovery_s(Fault(2500, ("ann", "cid"), "kill"), healthy()) == pytest.approx(0.507)


def test_old_epochs_that_are_learned_late_are_no_recovery() -> None:
    metrics = {name: [r for r in records if r["t_ms"] < 3000] for name, records in healthy().items()}
    metrics["bob"].append(epoch(1, 9000))
    assert chaosreport.recovery_s(Fault(3000, ("cid",), "kill"), metrics) is None


def test_gaps_between_certificates() -> None:
    seen = chaosreport.certificates(healthy())
    assert chaosreport.longest_gap_s(seen) == 1.0
    assert chaosreport.longest_gap_s([entry for entry in seen if entry.epoch not in (3, 4)]) == 3.0
    assert chaosreport.longest_gap_s(seen, 5200, 9000) == 3.0, "the wait that goes on counts"
    assert chaosreport.longest_gap_s(seen[:1]) is None


def test_being_left_out_counts_only_while_others_certify() -> None:
    seen = chaosreport.certificates(healthy())
    assert chaosreport.left_out_s(seen, "cid", 500, 6500) == 3.0  # from epoch 2 to epoch 5
    assert chaosreport.left_out_s(seen, "cid", 500, 4500) == 2.5, "it is still out at the end"
    assert chaosreport.left_out_s(seen, "ann", 500, 90_000) == 0.0, "nobody certified: nobody was left out"


def test_rows_of_certificates_and_epochs_within_a_time() -> None:
    seen = chaosreport.certificates(healthy())
    assert chaosreport.in_a_row(seen, "ann", 0) == 6
    assert chaosreport.in_a_row(seen, "cid", 0) == 2
    assert chaosreport.in_a_row(seen, "cid", 5500) == 1
    assert chaosreport.seen_between(healthy(), ["cid"], 2000, 4900) == [3, 4]
    assert chaosreport.seen_between(healthy(), ["ann"], 1000, 1000) == []


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert chaosreport.percentile([], 0.5) is None
    assert chaosreport.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert chaosreport.percentile([float(n) for n in range(1, 101)], 0.99) == 99.0
    assert chaosreport.percentile([4.0], 0.99) == 4.0


# --- verdict ---


def test_a_good_run_is_summed_up_and_ends_with_status_0(tmp_path: Path) -> None:
    report = Report("good")
    chaosreport.summarise(report, [(healthy(), [Fault(2500, ("cid",), "kill")])])
    assert (report.status, report.epochs, report.faults, report.highest_attempt) == ("passed", 6, 1, 1)
    assert (report.recovery_p50_s, report.recovery_p99_s, report.longest_gap_s) == (0.5, 0.5, 1.0)
    skipped = Report("skipped", status="skipped", reason="no root here")
    console = Console(record=True, width=120, quiet=True)
    assert chaos.conclude([report, skipped], Options(out=tmp_path), console) == 0
    written = json.loads((tmp_path / "chaos.json").read_text())
    assert [entry["status"] for entry in written["scenarios"]] == ["passed", "skipped"]
    assert written["scenarios"][1]["reason"] == "no root here"


def test_the_table_goes_between_the_marks_of_a_page_and_shows_what_failed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- chaos -->\nan old table\n<!-- /chaos -->\nafter\n")
    kills, pauses = Report("kill_loop"), Report("pauses", failures=["peer1 did not find back"])
    chaosreport.summarise(kills, [(healthy(), [Fault(2500, ("cid",), "kill")])])
    chaosreport.summarise(pauses, [(healthy(), [])])
    console = Console(quiet=True)
    assert chaos.conclude([kills, pauses], Options(out=tmp_path), console, page) == 1
    text = page.read_text()
    assert text.startswith("before\n<!-- chaos -->\n")
    assert text.endswith("\n<!-- /chaos -->\nafter\n")
    assert "an old table" not in text
    assert "| kill_loop | passed | 6 | 0 | 1 | 0.5 | 0.5 | 1.0 | 1 |" in text
    assert "peer1 did not find back" in text


def test_a_page_without_marks_is_refused_before_anything_is_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks here\n")
    with pytest.raises(SystemExit) as end:
        chaos.main(["quick", "--out", str(tmp_path / "out"), "--table", str(page)])
    assert end.value.code == 2
    assert not (tmp_path / "out").exists()


def test_a_diverged_digest_or_a_failed_expectation_or_no_recovery_is_status_1(tmp_path: Path) -> None:
    torn = healthy()
    torn["bob"].append(epoch(6, 9000, root="another"))
    diverged, failed, stuck = Report("diverged"), Report("failed", failures=["no"]), Report("stuck")
    chaosreport.summarise(diverged, [(torn, [])])
    chaosreport.summarise(failed, [(healthy(), [])])
    chaosreport.summarise(stuck, [(healthy(), [Fault(7000, ("ann",), "SIGKILL")])])
    assert stuck.failures == ["no certificate followed SIGKILL of ann"]
    for report in (diverged, failed, stuck):
        assert report.status == "failed"
        console = Console(quiet=True)
        assert chaos.conclude([Report("good"), report], Options(out=tmp_path), console) == 1


def test_a_scenario_that_cannot_be_made_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*words: str) -> str:
        raise chaosnet.CannotBeMadeError(f"{' '.join(words)}: Operation not permitted")

    monkeypatch.setattr(chaosnet, "command", refuse)
    for name in ("halves", "full_disk"):
        report = chaos.run_scenario(name, Options(out=tmp_path), Console(width=200))
        assert report.status == "skipped"
        assert report.reason.endswith("Operation not permitted")
        assert f"skipped: {report.reason}" in capsys.readouterr().out


def test_the_command_lists_its_scenarios_and_refuses_unknown_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SCENARIOS)
    (tmp_path / "something").touch()
    for wrong in (["earthquake"], ["--peers", "2"], ["--out", str(tmp_path)]):
        with pytest.raises(SystemExit) as end:
            chaos.main(wrong)
        assert end.value.code == 2


# --- votes ---

ANN, BOB = Identity.generate(bytes(32)), Identity.generate(b"\1" * 32)


def vote(author: Identity, number: int, root: bytes = bytes(32), attempt: int = 0) -> Signed:
    body = pack_object(Vote(number, bytes(32), attempt, bytes(32), bytes(32), root))
    return Signed(author.public_key, "vote", body, author.sign("vote", body))


def append(path: Path, kind: int, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    with open(path, "ab") as file:
        file.write(chaosvotes._HEAD.pack(len(data), zlib.crc32(data), kind) + data)


def write_down(folder: Path, signed: Signed) -> None:
    append(folder / "votes.log", chaosvotes._VOTE, pack_object(VoteRecord(signed, signed)))


def certify(folder: Path, number: int, *votes: Signed) -> None:
    certificate = Certificate(number, bytes(32), (votes[0],), bytes(32), bytes(32), votes, ())
    append(folder / "chain.log", chaosvotes._CERTIFICATE, pack_object(certificate))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Run folders of ann and bob, who both voted in epochs 1 and 2."""
    found = {show(author.peer_id): tmp_path / name for author, name in ((ANN, "ann"), (BOB, "bob"))}
    for author, folder in zip((ANN, BOB), found.values(), strict=True):
        for number in (1, 2):
            write_down(folder, vote(author, number))
            certify(folder, number, vote(ANN, number), vote(BOB, number))
    return found


def test_votes_that_were_written_pass_the_audit(folders: dict[str, Path]) -> None:
    assert chaosvotes.audit(folders) == []


def test_a_vote_that_was_not_written_is_found(folders: dict[str, Path]) -> None:
    certify(folders[show(BOB.peer_id)], 3, vote(ANN, 3))
    name = show(ANN.peer_id)
    assert chaosvotes.audit(folders) == [
        f"{name} voted in epoch 3 attempt 0, but its vote log lacks that vote"
    ]


def test_votes_behind_damaged_bytes_count_as_not_written(folders: dict[str, Path]) -> None:
    log = folders[show(ANN.peer_id)] / "votes.log"
    log.write_bytes(log.read_bytes() + b"half a record that a full disk left behind")
    write_down(log.parent, vote(ANN, 3))
    certify(folders[show(BOB.peer_id)], 3, vote(ANN, 3))
    assert len(chaosvotes.audit(folders)) == 1


def test_votes_that_were_cut_off_as_old_are_not_missed(folders: dict[str, Path]) -> None:
    folder = folders[show(ANN.peer_id)]
    (folder / "votes.log").unlink()
    write_down(folder, vote(ANN, 2))
    assert chaosvotes.audit(folders) == []


def test_two_votes_in_one_attempt_are_found_and_in_two_attempts_allowed(folders: dict[str, Path]) -> None:
    folder = folders[show(BOB.peer_id)]
    write_down(folder, vote(BOB, 2, root=b"\2" * 32, attempt=1))
    assert chaosvotes.audit(folders) == []
    write_down(folder, vote(BOB, 2, root=b"\3" * 32))
    assert chaosvotes.audit(folders) == [f"{show(BOB.peer_id)} voted twice in epoch 2 attempt 0"]


# --- processes and the machine ---


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_a_process_is_only_signalled_if_it_is_the_one_that_was_seen(sleeper: subprocess.Popen[bytes]) -> None:
    seen = chaosswarm.identify(sleeper.pid)
    assert seen is not None
    assert sleeper.pid in chaosswarm.descendants(os.getpid())
    other = chaosswarm.Below(seen.pid, "1")  # another process that had the number earlier
    other.send(signal.SIGKILL)
    time.sleep(0.2)
    assert seen.running()
    assert not other.running()
    seen.send(signal.SIGKILL)
    assert sleeper.wait(5) == -signal.SIGKILL
    assert not seen.running()


def test_metrics_are_read_as_they_grow_without_torn_lines_and_inner_steps(tmp_path: Path) -> None:
    peer = chaosswarm.Peer("ann", tmp_path, tmp_path / "log", chaosswarm.Place("127.0.0.1", 1, 2))
    assert peer.records() == []
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        json.dumps({"kind": "step", "t_ms": 1}) + "\n" + json.dumps(epoch(1, 5)) + "\n" + '{"kind"'
    )
    assert [record["epoch"] for record in peer.records()] == [1]
    with open(path, "a") as file:
        file.write("\n" + json.dumps(epoch(2, 6)) + "\n")
    assert [record["epoch"] for record in peer.records()] == [1, 2]


def test_packets_are_dropped_one_way_and_nothing_is_left_behind() -> None:
    try:
        with chaosnet.network(3) as net:
            net.drop([0], [1])
            assert not net.delivers(0, 1)
            assert net.delivers(1, 0)
            assert net.delivers(0, 2)
            net.heal()
            assert net.delivers(0, 1)
    except chaosnet.CannotBeMadeError as reason:
        pytest.skip(str(reason))
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"chaos{os.getpid()}-")]


def test_a_small_disk_fills_up_and_is_taken_down(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    try:
        with chaosnet.small_disk(folder, "64k"):
            assert 0 < chaosnet.fill(folder / "filler") <= 64 << 10
            with pytest.raises(OSError, match="No space left"):
                (folder / "more").write_bytes(bytes(5000))
    except chaosnet.CannotBeMadeError as reason:
        pytest.skip(str(reason))
    assert not os.path.ismount(folder)
    assert list(folder.iterdir()) == []
