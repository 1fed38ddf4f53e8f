"""Command-line flags: one for each config value, in the config's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from p2p_diloco.config import PeerConfig, RunConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.flags import build_parser, parse


def expected_flags(data: dict[str, Any], prefix: str) -> set[str]:
    """From the dumped values, so that this does not repeat the walk that it checks."""
    flags: set[str] = set()
    for key, value in data.items():
        name = prefix + key.replace("_", "-")
        if isinstance(value, dict) and value:
            flags |= expected_flags(value, f"{name}.")
        else:
            flags.add(name)
    return flags


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    file = tmp_path / "peer.toml"
    file.write_text(
        "[run]\nname = 'from the file'\n[run.inner]\nsteps = 7\n"
        "[peer]\nport = 4000\n[peer.timeouts]\nstall_s = 9\n"
    )
    return file


def test_every_config_value_has_a_flag_and_every_flag_a_help() -> None:
    wanted = expected_flags(RunConfig().model_dump(mode="json"), "--run.")
    wanted |= expected_flags(PeerConfig().model_dump(mode="json"), "--")
    actions = build_parser()._actions
    flags = {flag for action in actions for flag in action.option_strings}
    assert wanted - flags == set()
    assert flags - wanted == {"-h", "--help", "--config", "--log-level", "--plain"}
    assert [action.option_strings for action in actions if not action.help] == []


def test_help_explains_each_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--run.inner.steps INT" in text
    assert "INTELLECT-1 (arXiv:2412.01152). (default: 100)" in text
    assert "about 20% (arXiv:2405.18392). (default: 20000)" in text
    assert "run config: what all peers share" in text
    assert "peer.timeouts: Deadlines, in seconds." in text


def test_no_arguments_found_a_run_with_the_defaults() -> None:
    parsed = parse([])
    assert parsed.run is None
    assert parsed.peer == PeerConfig()
    assert parsed.founds
    assert (parsed.config_path, parsed.log_level, parsed.plain) == (None, "info", False)


@pytest.mark.parametrize("argv", [["--initial-peers", "/ip4/127.0.0.1/tcp/1"], ["--run-id", "abc"]])
def test_a_peer_that_knows_of_others_joins(argv: list[str]) -> None:
    assert not parse(argv).founds


def test_flags_override_the_file_and_the_file_overrides_the_defaults(toml: Path) -> None:
    parsed = parse(["--config", str(toml), "--run.inner.steps", "11", "--timeouts.view-s", "2.5"])
    assert parsed.run is not None
    assert (parsed.run.name, parsed.run.inner.steps, parsed.run.inner.lr) == ("from the file", 11, 1e-3)
    assert (parsed.peer.port, parsed.peer.timeouts.stall_s, parsed.peer.timeouts.view_s) == (4000, 9.0, 2.5)


def test_a_file_without_a_run_table_gives_no_run_config(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text("[peer]\nport = 1\n")
    assert parse(["--config", str(file)]).run is None
    assert parse(["--config", str(file), "--run.seed", "1"]).run == RunConfig(seed=1)


def test_an_empty_run_table_asks_for_the_default_run(tmp_path: Path) -> None:
    file = tmp_path / "peer.toml"
    file.write_text("[run]\n")
    assert parse(["--config", str(file)]).run == RunConfig()


def test_lists_mappings_switches_and_records_can_be_given() -> None:
    lists = ["--initial-peers", "a", "b", "--announce", "host:1", "--data-paths", "books=/data/b=c", "code=x"]
    records = ["--run.data.sources", "books:folder:0.5", '{"name": "stdlib"}']
    parsed = parse([*lists, "--run.model.tie-embeddings", *records])
    assert parsed.peer.initial_peers == ("a", "b")
    assert parsed.peer.announce == ("host:1",)
    assert parsed.peer.data_paths == {"books": Path("/data/b=c"), "code": Path("x")}
    assert parsed.run is not None
    assert parsed.run.model.tie_embeddings
    first, second = parsed.run.data.sources
    assert (first.name, first.kind, first.weight) == ("books", "folder", 0.5)
    assert (second.name, second.kind, second.weight) == ("stdlib", "stdlib", 1.0)
    assert parse(["--run.model.tie-embeddings", "false"]).run == RunConfig()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--bogus"], "--bogus"),
        (["--run.inner.step", "3"], "--run.inner.step"),
        (["stray"], "stray"),
        (["--port"], "--port"),
        (["--port", "many"], "peer.port"),
        (["--port", "70000"], "peer.port"),
        (["--timeouts.stall-s", "-1"], "peer.timeouts.stall_s"),
        (["--run.inner.steps", "0"], "run.inner.steps"),
        (["--run.inner.lr", "nan"], "run.inner.lr"),
        (["--run.model.tie-embeddings", "perhaps"], "run.model.tie_embeddings"),
        (["--run.data.sources", "a:folder:1:x"], "--run.data.sources"),
        (["--run.data.sources", "{not json"], "--run.data.sources"),
        (["--run.data.sources", "a:attic"], "run.data.sources.0.kind"),
        (["--data-paths", "books"], "--data-paths"),
        (["--data-paths", "a=x", "a=y"], "--data-paths"),
        (["--log-level", "loud"], "--log-level"),
        (["--config", "/nonexistent/file.toml"], "/nonexistent/file.toml"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_the_flag(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "argv", "words"),
    [
        ("[run.inner]\nstepz = 1\n", [], "unknown key run.inner.stepz"),
        ("[peer]\nports = 1\n", [], "unknown key peer.ports"),
        ("[peers]\n", [], "unknown key peers"),
        ("[run]\ninner = 3\n", ["--run.inner.steps", "3"], "run.inner must be a table"),
    ],
)
def test_a_wrong_file_is_refused_by_key(tmp_path: Path, text: str, argv: list[str], words: str) -> None:
    file = tmp_path / "peer.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse(["--config", str(file), *argv])


@pytest.mark.parametrize("model", [RunConfig, PeerConfig])
def test_the_printed_default_can_be_typed_back(model: type[BaseModel]) -> None:
    prefix = "--run." if model is RunConfig else "--"
    argv: list[str] = []
    for action in build_parser()._actions:
        flag = next(iter(action.option_strings), "")
        table = str(action.dest).partition(".")[0]
        default = (action.help or "").replace("%%", "%").rpartition("(default: ")[2].removesuffix(")")
        if "." in str(action.dest) and (table == "run") == (prefix == "--run."):
            if default == "none":
                continue
            argv += [flag, *("" if default == "empty" else default).split(" ")]
    parsed = parse(argv)
    assert (parsed.run if model is RunConfig else parsed.peer) == model()
