"""The short version of tools/chaos.py: two peers die at failpoints, one is stopped for 5 s, all come back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import chaos
from chaosscenarios import Options

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def test_a_swarm_outlives_two_kills_at_failpoints_and_a_stopped_peer(tmp_path: Path) -> None:
    options = Options(out=tmp_path, peers=3, sequences=4, spacing=12)
    console = Console(width=110)
    report = chaos.run_scenario("quick", options, console)
    assert chaos.conclude([report], options, console) == 0
    assert report.status == "passed"
    assert report.faults == 3
    assert report.recovery_p99_s is not None
    written = json.loads((tmp_path / "chaos.json").read_text())
    assert written["scenarios"][0]["epochs"] == report.epochs > 20
