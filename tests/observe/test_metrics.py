"""The metrics file: whole lines, bounded size, and no way to end a run."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from p2p_diloco.observe.metrics import (
    EpochMetrics,
    MetricsWriter,
    NoticeMetrics,
    StepMetrics,
    read_metrics,
)

EPOCH = EpochMetrics(3, 1, 4, ("a", "b"), 76_800, 1200.0, 10, 20, 0.01, 2.5, None, "ab" * 32, {"b": 9})


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    with MetricsWriter(path, wall_ms=lambda: 1234) as writer:
        writer.write(StepMetrics(3, 1, 301, 2.25, 900.0))
        writer.write(EPOCH)
        writer.write(NoticeMetrics("warning", "a line\nof two"))
    step, epoch, notice = read_metrics(path)
    assert step == {
        "t_ms": 1234,
        "kind": "step",
        "epoch": 3,
        "step": 1,
        "global_step": 301,
        "loss": 2.25,
        "tokens_per_s": 900.0,
    }
    assert (epoch["kind"], epoch["contributors"], epoch["eval_loss"]) == ("epoch", ["a", "b"], None)
    assert epoch["rates_kbit_per_s"] == {"b": 9}
    assert notice["text"] == "a line\nof two"


def test_values_that_json_lacks_are_written_as_it_can_hold_them(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        values = {
            "a": float("nan"),
            "b": b"\x01\xff",
            "c": np.float32(0.5),
            "d": np.int64(7),
            "e": {"z", "y"},
        }
        writer.write_values("odd", values)
    (record,) = read_metrics(path)
    assert [record[key] for key in "abcde"] == [None, "01ff", 0.5, 7, ["y", "z"]]


def test_records_are_on_disk_before_close(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    writer.write(EPOCH)
    assert len(list(read_metrics(path))) == 1
    writer.close()
    writer.close()
    writer.write(EPOCH)  # dropped, not an error: the peer is going
    assert len(list(read_metrics(path))) == 1


def test_a_torn_last_line_is_skipped_and_the_next_start_begins_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(NoticeMetrics("info", "whole"))
    with open(path, "ab") as file:
        file.write(b'{"t_ms": 1, "kind": "not')
    assert [record["text"] for record in read_metrics(path)] == ["whole"]
    with MetricsWriter(path) as writer:
        writer.write(NoticeMetrics("info", "after"))
    assert [record["text"] for record in read_metrics(path)] == ["whole", "after"]


def test_foreign_lines_and_missing_files_are_no_records(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'\xff\xfe\n[1]\n{"kind": "no time"}\n\n{"t_ms": 1, "kind": "good"}\n')
    assert [record["kind"] for record in read_metrics(path)] == ["good"]
    assert list(read_metrics(tmp_path / "missing.jsonl")) == []


def test_the_file_is_turned_over_before_it_grows_past_its_bound(tmp_path: Path) -> None:
    path, bound = tmp_path / "m.jsonl", 1000
    with MetricsWriter(path, rotate_bytes=bound) as writer:
        for number in range(100):
            writer.write(StepMetrics(1, number, number, 1.0, 1.0))
    old = path.with_name("m.jsonl.1")
    assert sorted(tmp_path.iterdir()) == [path, old]
    assert max(path.stat().st_size, old.stat().st_size) <= bound
    steps = [record["step"] for file in (old, path) for record in read_metrics(file)]
    assert steps == list(range(steps[0], 100))
    assert path.read_bytes().endswith(b"\n")


def test_a_line_that_does_not_fit_on_the_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.jsonl"
    writer = MetricsWriter(path)
    writer.write(NoticeMetrics("info", "before"))
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
        writer.write(NoticeMetrics("info", "lost"))
        writer.write(NoticeMetrics("info", "lost too"))
    writer.write(NoticeMetrics("info", "after"))
    writer.close()
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["before", "after"]
    assert len([record for record in caplog.records if "not written" in record.message]) == 1


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsWriter(path, rotate_bytes=1 << 20) as writer:

        def work(name: int) -> None:
            for number in range(200):
                writer.write(StepMetrics(name, number, 0, 1.0, 1.0))

        threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    records = list(read_metrics(path))
    assert len(path.read_bytes().splitlines()) == len(records) == 800
    for name in range(4):
        assert [record["step"] for record in records if record["epoch"] == name] == list(range(200))
