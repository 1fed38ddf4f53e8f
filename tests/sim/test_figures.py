"""The tables of docs/RELIABILITY.md, small: they count what they say, and a defect shows in them."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from p2p_diloco.sim import __main__ as command
from p2p_diloco.sim import figures, recoveries
from p2p_diloco.sim.bugs import BUGS
from p2p_diloco.sim.checks import BrokenRuleError
from p2p_diloco.sim.tables import SETTLED, Swarm, Table, guarded, put_between, span


def number(text: str) -> float:
    return float(text.split("/")[0].replace(",", ""))


def test_drawn_faults_are_counted_and_none_is_a_violation() -> None:
    said: list[str] = []
    table = figures.seeds(6, 1, said.append)
    (row,) = table.rows
    assert (row[0], row[4], table.violations, said) == ("6", "0", [], [])
    assert number(row[1]) > 6, "swarms that certify next to nothing prove nothing"
    assert "kill" in row[3]


def test_a_planted_bug_is_a_violation_in_the_table_with_its_seed() -> None:
    with BUGS["vote_without_persisting"][0]():
        table = figures.seeds(3, 1, lambda text: None)
    assert table.rows[0][4] == str(len(table.violations)) != "0"
    assert table.violations[0].startswith("seed ")
    assert f"Violations: {len(table.violations)}." in table.markdown()


def test_a_crash_at_any_message_of_an_epoch_is_survived_and_timed_from_the_crash() -> None:
    total = figures.count_messages(3)
    assert total > 3 * 3 * 2, "three peers, three chunks, two trips"
    table = figures.single_crashes((3,), 1, step=total // 3)
    ((peers, messages, tried, _),) = table.rows
    assert (peers, messages, table.violations) == ("3", str(total), [])
    assert int(tried) == len(range(0, total, total // 3))
    took_s, broken = figures.crash_at((3, 0))
    assert not broken
    assert took_s > 5.0, "whoever died starts again after 5 s"


def test_rings_hold_all_peers_at_their_first_attempt() -> None:
    table = figures.ring_sizes((1, 2, 5), 1)
    assert [row[:3] for row in table.rows] == [("1", "1", "0"), ("2", "2", "0"), ("5", "5", "0")]
    assert not table.violations


def test_agreement_is_counted_without_the_reduction() -> None:
    table = figures.agreement((4,), 1)
    ((peers, seconds, spent, most, _, votes),) = table.rows
    assert (peers, table.violations) == ("4", [])
    assert int(votes) >= 2, "more than half, or half with the lowest voter"
    assert 0 < number(seconds) < 1, "two trips of 30 ms at most and some writes"
    assert 0 < number(spent) <= number(most)


def test_a_death_in_a_ring_reuses_what_was_finished() -> None:
    table = recoveries.deaths_in_a_ring(1, 1, n=3)
    assert [row[0] for row in table.rows] == ["10%", "50%", "90%"]
    assert not table.violations
    late = table.rows[2]
    assert number(late[3]) > 0
    assert late[4] == "100 %"


def test_losing_a_third_at_once_rolls_nobody_back() -> None:
    table = recoveries.many_at_once(1, 1, n=6, lost=2)
    assert table.rows[0][:2] == ("1", "0")
    assert not table.violations


def test_churn_goes_on_without_those_who_died() -> None:
    table = recoveries.churn(1, 1, epochs=3, n=5)
    still, churned = table.rows
    assert number(still[4]) == 5.0
    assert 3.0 <= number(churned[4]) < 5.0
    assert not table.violations


def test_the_smaller_side_of_a_partition_certifies_nothing() -> None:
    table = recoveries.partitions(1, 1, sides=((2, 2), (3, 2)))
    assert [row[0] for row in table.rows] == ["2 / 2", "3 / 2"]
    assert [row[3] for row in table.rows] == ["0", "0"]
    assert all(number(row[2]) > 0 for row in table.rows)
    assert not table.violations


def test_a_swarm_notes_when_each_certificate_was_first_and_last_taken_over() -> None:
    swarm = Swarm.of(3)
    swarm.settle(SETTLED)
    assert swarm.height >= SETTLED
    assert all(swarm.first_ns[e] <= swarm.last_ns[e] for e in range(1, SETTLED + 1))
    assert all(took > 0 for took in swarm.epoch_s(2, SETTLED))


def test_what_breaks_in_a_run_is_its_result() -> None:
    def broken() -> int:
        raise BrokenRuleError("one_history", "two certificates\nand more")

    def crashed() -> int:
        raise KeyError("gone")

    assert guarded("fine", lambda: 7) == (7, "")
    result, text = guarded("seed 5", broken)
    assert result is None
    assert text.startswith("seed 5: ")
    assert "\n" not in text
    assert guarded("seed 6", crashed) == (None, "seed 6: crash: KeyError: 'gone'")
    with pytest.raises(KeyboardInterrupt):
        guarded("stopped", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))  # type: ignore[arg-type]


def test_a_table_is_markdown_with_its_violations() -> None:
    table = Table("Title", ("a", "b"), [("1", "2")], ["seed 1: broke"], note="Why.")
    assert table.markdown().splitlines() == [
        "### Title", "", "Why.", "", "| a | b |", "| --- | --- |", "| 1 | 2 |", "", "Violations: 1.",
        "- seed 1: broke",
    ]  # fmt: skip
    assert (span([]), span([1.0, 3.0, 2.0])) == ("-", "2.00 / 3.00")


def test_a_section_is_put_between_its_marks_and_nothing_else_changes() -> None:
    page = "before\n<!-- t -->\nold\n<!-- /t -->\nafter\n"
    assert put_between(page, "t", " new\n") == "before\n<!-- t -->\nnew\n<!-- /t -->\nafter\n"
    for lacking in ("no marks", "<!-- t --> open", "<!-- /t --> shut"):
        with pytest.raises(ValueError, match="has no <!-- t -->"):
            put_between(lacking, "t", "new")


def test_the_page_is_written_after_each_table_and_violations_are_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("top\n<!-- figures -->\n<!-- /figures -->\nend\n")
    seen: list[str] = []

    def tables(options: argparse.Namespace):  # type: ignore[no-untyped-def]
        yield Table("One", ("a",))
        seen.append(page.read_text())
        yield Table("Two", ("a",), violations=["seed 3: broke"])

    monkeypatch.setattr(command, "tables", tables)
    assert command.main(["figures", "--out", str(page)]) == 1
    assert "### One" in seen[0]
    assert "### Two" not in seen[0]
    assert page.read_text().startswith("top\n")
    assert page.read_text().endswith("end\n")
    assert "### Two" in page.read_text()
