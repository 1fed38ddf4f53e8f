"""Config: what is refused and in which words, and the hash that all peers must share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.config import PeerConfig, RunConfig, build_config, first_difference, read_toml
from p2p_diloco.errors import ConfigError

# Another valid value for a key of the run config, where adding one to a number or flipping a choice is not.
OTHER: dict[str, Any] = {
    "name": "other",
    "model.vocab_size": 512,
    "model.hidden_size": 256,
    "model.heads": 8,
    "model.kv_heads": 4,
    "model.rope_theta": 10_000.0,
    "model.dtype": "bfloat16",
    "model.tie_embeddings": True,
    "inner.compute_dtype": "bfloat16",
    "codec.kind": "fp32",
    "agreement.quorum": "two_thirds",
    "data.sources": [{"name": "books", "kind": "folder", "weight": 2.0}],
}
ONLY_VALUE = {"data.tokenizer"}  # its type allows one value only, so nothing can differ


def leaf_paths(data: dict[str, Any], where: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, dict):
            found += leaf_paths(value, f"{where}{key}.")
        else:
            found.append((f"{where}{key}", value))
    return found


RUN_LEAVES = leaf_paths(RunConfig().model_dump(mode="json"))


def with_value(path: str, value: Any) -> RunConfig:
    data = RunConfig().model_dump(mode="json")
    *parents, last = path.split(".")
    table = data
    for name in parents:
        table = table[name]
    table[last] = value
    return RunConfig.model_validate(data)


def changed(path: str, value: Any) -> RunConfig:
    if path in OTHER:
        return with_value(path, OTHER[path])
    return with_value(path, value + 1 if isinstance(value, int) else (value or 0.5) * 0.5)


CHANGEABLE = [(path, value) for path, value in RUN_LEAVES if path not in ONLY_VALUE]


@pytest.mark.parametrize(("path", "value"), CHANGEABLE)
def test_any_changed_value_changes_the_hash_and_is_named(path: str, value: Any) -> None:
    ours, theirs = RunConfig(), changed(path, value)
    assert ours != theirs
    assert ours.hash() != theirs.hash()
    assert first_difference(ours, theirs).startswith(f"run.{path} is ")


def test_equal_configs_have_one_hash_and_no_difference() -> None:
    assert RunConfig().hash() == RunConfig.model_validate(RunConfig().model_dump()).hash()
    assert first_difference(RunConfig(), RunConfig()) == ""


def test_canonical_bytes_do_not_depend_on_the_order_of_the_keys() -> None:
    data = RunConfig().model_dump(mode="json")
    shuffled = {
        key: dict(reversed(value.items())) if isinstance(value, dict) else value
        for key, value in reversed(data.items())
    }
    assert list(shuffled) != list(data)
    assert RunConfig.model_validate(shuffled).canonical_bytes() == RunConfig().canonical_bytes()


def test_canonical_bytes_are_sorted_json_and_read_back_to_the_same_config() -> None:
    text = RunConfig().canonical_bytes()
    data = json.loads(text)
    assert list(data) == sorted(data)
    assert b" " not in text.replace(RunConfig().name.encode(), b"")
    assert RunConfig.model_validate(data) == RunConfig()


def test_whole_numbers_and_floats_of_one_value_are_one_config() -> None:
    assert with_value("outer.lr", 1).canonical_bytes() == with_value("outer.lr", 1.0).canonical_bytes()


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"inner": {"stepz": 5}}, "run.inner.stepz"),
        ({"colour": 1}, "run.colour"),
        ({"data": {"sources": [{"nam": "x"}]}}, "run.data.sources.0.nam"),
    ],
)
def test_an_unknown_key_is_refused_by_name(data: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^unknown key {key}$"):
        build_config(RunConfig, data, "run")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"inner": {"steps": 0}}, ["run.inner.steps", "got 0"]),
        ({"inner": {"steps": "many"}}, ["run.inner.steps", "'many'"]),
        ({"inner": {"lr": float("nan")}}, ["run.inner.lr"]),
        ({"outer": {"lr": float("inf")}}, ["run.outer.lr"]),
        ({"codec": {"kind": "int4"}}, ["run.codec.kind", "int4"]),
        ({"seed": -1}, ["run.seed"]),
        ({"data": {"sources": []}}, ["run.data.sources"]),
        ({"model": {"heads": 3}}, ["run.model", "hidden_size must be a multiple of heads"]),
        ({"model": {"heads": 4, "kv_heads": 3}}, ["run.model", "multiple of kv_heads"]),
        ({"model": {"vocab_size": 100}}, ["model.vocab_size", "256"]),
        ({"inner": {"seq_len": 4096}}, ["inner.seq_len", "model.max_seq_len"]),
        ({"schedule": {"total_steps": 10}}, ["run.schedule", "total_steps"]),
    ],
)
def test_an_impossible_run_value_is_refused_in_one_line_that_names_it(
    data: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(RunConfig, data, "run")
    line = str(caught.value)
    assert "\n" not in line
    assert [word for word in words if word not in line] == []


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"port": 70_000}, "peer.port"),
        ({"timeouts": {"stall_s": 0}}, "peer.timeouts.stall_s"),
        ({"gossip": {"fanout": 0}}, "peer.gossip.fanout"),
        ({"device": "abacus"}, "peer.device"),
        ({"initial_peers": ["x"] * 65}, "peer.initial_peers"),
    ],
)
def test_an_impossible_peer_value_is_refused_by_name(data: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: "):
        build_config(PeerConfig, data, "peer")


def test_a_config_cannot_be_changed_after_it_was_checked() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[runn]\n", ["unknown key runn", "[run]"]),
        ("run = 3\n", ["run", "table"]),
        ("[run\n", ["TOML"]),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_toml(file)
    assert [word for word in [*words, "run"] if word not in str(caught.value)] == []


def test_a_file_that_is_not_text_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    for name in ("binary.toml", "missing.toml"):
        with pytest.raises(ConfigError, match=name):
            read_toml(tmp_path / name)
