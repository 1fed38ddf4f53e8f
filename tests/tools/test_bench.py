"""The benchmarks, small: that what is compared runs, ends in one state, and that the figures are its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import bench
import bench_numbers as numbers
import bench_runs as runs


def test_two_of_our_peers_and_two_of_gloo_are_measured_and_put_into_the_page(tmp_path: Path) -> None:
    page, figures = tmp_path / "page.md", tmp_path / "figures.json"
    page.write_text("<!-- loopback -->\n<!-- /loopback -->\n")
    arguments = ["loopback", "--peers", "2", "--values", "50000", "--epochs", "2", "--rounds", "1"]
    assert bench.main([*arguments, "--page", str(page), "--json", str(figures)]) == 0
    ours, gloo = json.loads(figures.read_text())["found"]
    assert (ours["name"], gloo["name"]) == ("p2p_diloco", "gloo fp32")
    assert len(ours["rounds_s"]) == len(ours["epochs_s"]) == len(gloo["rounds_s"]) == 2
    assert min(*ours["rounds_s"], *ours["epochs_s"], *gloo["rounds_s"]) > 0
    assert ours["sent_bytes"] > 50_000, "2(N-1)/N of a byte a value, receipts and gossip"
    assert ours["cpu_s"] > 0
    assert gloo["cpu_s"] > 0
    assert "| gloo fp32 |" in page.read_text()


def test_a_process_that_ends_without_figures_is_an_error_in_one_line(tmp_path: Path) -> None:
    silent = tmp_path / "python"
    silent.write_text("#!/bin/sh\nexit 3\n")
    silent.chmod(0o755)
    with pytest.raises(runs.BenchError, match="status 3: no output"):
        runs.hivemind(runs.Place(1), str(silent), 10, 1, "none")


def test_six_sigma_clips_tails_and_blocks_do_not() -> None:
    for kind in numbers.KINDS:
        ring, direct, sigma = numbers.mean_errors(4, kind, values=64 * 256, seeds=1)
        assert 0 < direct <= ring * 1.001 < sigma, kind
    spike = np.full(1000, 1e-3, np.float32)
    spike[0] = 100.0
    assert numbers.six_sigma(spike).max() < 50
    assert numbers.by_ring([spike, spike]).max() == pytest.approx(100, rel=0.01)


def test_one_peer_loses_only_its_encoding() -> None:
    delta = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    assert numbers.relative_error(delta, [delta]) == 0
    assert numbers.relative_error(numbers.by_direct([delta]), [delta]) < 0.01


def test_kernels_are_measured_for_both_sets_of_loops() -> None:
    for torch_loops in (False, True):
        rates = numbers.in_own_thread(torch_loops, lambda: numbers.kernel_rates(20_000, 4096))
        assert set(rates) >= {"memory copy", "encode", "hop (decode, add, encode)", "outer step (and hash)"}
        assert all(rate > 0 for rate in rates.values())


def test_an_unknown_scenario_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if bench.unavailable():
        assert bench.main(["wan", "lan"]) == 2
    else:
        assert bench.main(["wan", "nowhere"]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("bench: ")
    assert complaint.count("\n") == 1
