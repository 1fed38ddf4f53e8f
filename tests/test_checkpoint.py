"""Checkpoints: complete or not there, loadable by others, and checked when they are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.statements import Cast

from p2p_diloco.checkpoint import Checkpoints, complete, restore
from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import UserError
from p2p_diloco.numerics.int8 import Codec
from p2p_diloco.numerics.layout import Layout, Schema, TensorSpec
from p2p_diloco.numerics.state import FlatState, StateBuffers

SCHEMA = Schema((TensorSpec("a", (30, 100), "float32"), TensorSpec("b", (7,), "bfloat16")))


def make_state(seed: int) -> FlatState:
    total = SCHEMA.total_values
    state = FlatState(Layout(total, 1000), Codec(), 0.7, 0.9, StateBuffers.allocate(total))
    generator = np.random.default_rng(seed)
    state.buffers.anchor0[:] = generator.standard_normal(total)
    state.buffers.momentum0[:] = generator.standard_normal(total)
    state.initialise(1)
    return state


def written(folder: Path, seed: int = 1) -> tuple[FlatState, Path]:
    state, cast = make_state(seed), Cast(1)
    cast.chain.append(cast.certificate([0], [0], root=state.root))
    checkpoints = Checkpoints(PeerConfig(run_dir=folder), state, cast.chain, SCHEMA)
    path = checkpoints.write()
    assert path is not None
    return state, path


def test_weights_are_written_as_named_tensors_with_a_manifest(tmp_path: Path) -> None:
    state, path = written(tmp_path)
    tensors = load_file(path / "weights.safetensors")
    assert tensors["a"].shape == (30, 100)
    assert np.array_equal(tensors["b"], state.anchor[3000:])
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["epoch"] == 1
    assert manifest["state_root"] == state.root.hex()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["epoch-00000001"]


def test_a_checkpoint_restores_the_same_root(tmp_path: Path) -> None:
    state, _ = written(tmp_path)
    fresh = make_state(2)
    assert restore(tmp_path / "checkpoints", fresh, SCHEMA) == 1
    assert fresh.root == state.root
    assert np.array_equal(fresh.momentum, state.momentum)


def test_no_checkpoint_is_minus_one_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    assert restore(tmp_path / "checkpoints", make_state(2), SCHEMA) == -1
    _, path = written(tmp_path)
    file = path / "weights.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(UserError, match="not the certified one"):
        restore(tmp_path / "checkpoints", make_state(2), SCHEMA)
    file.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read"):
        restore(tmp_path / "checkpoints", make_state(2), SCHEMA)


def test_a_state_that_no_certificate_names_is_not_written(tmp_path: Path) -> None:
    cast = Cast(1)
    cast.chain.append(cast.certificate([0], [0]))
    assert Checkpoints(PeerConfig(run_dir=tmp_path), make_state(1), cast.chain, SCHEMA).write() is None
    assert complete(tmp_path / "checkpoints") == []


def test_a_full_disk_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("p2p_diloco.checkpoint.write_atomically", fail)
    state, cast = make_state(1), Cast(1)
    cast.chain.append(cast.certificate([0], [0], root=state.root))
    assert Checkpoints(PeerConfig(run_dir=tmp_path), state, cast.chain, SCHEMA).write() is None
    assert list((tmp_path / "checkpoints").iterdir()) == []
