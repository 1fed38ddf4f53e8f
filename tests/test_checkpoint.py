"""Checkpoints: complete or not there, loadable by others, and checked when they are read."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.statements import Cast

from p2p_diloco.checkpoint import Checkpoints, complete, restore, restore_newest
from p2p_diloco.config import PeerConfig
from p2p_diloco.disk import RunFolder
from p2p_diloco.errors import UserError
from p2p_diloco.numerics.int8 import Codec
from p2p_diloco.numerics.layout import Layout, Schema, TensorSpec
from p2p_diloco.numerics.state import FlatState, StateBuffers
from p2p_diloco.wire.messages import pack_object

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


# --- a state is its checkpoint and the rounds after it ---


def history(folder: RunFolder, epochs: int) -> FlatState:
    """A founder alone goes through some epochs; its folder holds the checkpoint of epoch 1, all rounds and
    the chain."""
    state, _ = written(folder.path)
    cast = Cast(1)
    folder.open_run(cast.genesis)
    certificate = cast.certificate([0], [0], root=state.root)
    cast.chain.append(certificate)
    folder.append("certificate", pack_object(certificate))
    generator = np.random.default_rng(5)
    for epoch in range(2, epochs + 1):
        bounds = [state.layout.bounds(chunk) for chunk in range(state.layout.chunks)]
        payloads = tuple(
            state.codec.single(generator.standard_normal(stop - start, np.float32)) for start, stop in bounds
        )
        state.begin_apply()
        for chunk, payload in enumerate(payloads):
            state.apply_chunk(chunk, payload)
        root = state.next_root()
        state.swap(epoch)
        certificate = cast.certificate([0], [0], root=root)
        cast.chain.append(certificate)
        folder.keep_round(epoch, root, payloads)
        folder.append("certificate", pack_object(certificate))
    folder.close()
    return state


def test_rounds_on_disk_lead_from_the_checkpoint_to_the_newest_certified_state(tmp_path: Path) -> None:
    state = history(RunFolder(tmp_path), 5)
    fresh = make_state(2)
    assert restore_newest(RunFolder(tmp_path), fresh, SCHEMA) == 5
    assert fresh.root == state.root
    assert np.array_equal(fresh.anchor, state.anchor)
    assert np.array_equal(fresh.momentum, state.momentum)


def test_a_missing_or_foreign_round_ends_the_replay_there(tmp_path: Path) -> None:
    history(RunFolder(tmp_path), 5)
    folder = RunFolder(tmp_path)
    fourth = next((tmp_path / "rounds").glob("epoch-00000004-*"))
    ((root, payloads),) = folder.rounds(4)
    fourth.unlink()
    assert restore_newest(folder, make_state(2), SCHEMA) == 3
    folder.keep_round(4, root, payloads[::-1])  # says the right root and leads elsewhere
    assert restore_newest(folder, make_state(2), SCHEMA) == 3
    folder.keep_round(4, root, payloads)
    assert restore_newest(folder, make_state(2), SCHEMA) == 5


def test_a_round_that_was_finished_but_not_certified_is_not_taken(tmp_path: Path) -> None:
    history(RunFolder(tmp_path), 3)
    folder = RunFolder(tmp_path)
    ((_, payloads),) = folder.rounds(3)
    folder.keep_round(4, bytes(32), payloads)
    assert restore_newest(folder, make_state(2), SCHEMA) == 3


def test_a_checkpoint_that_the_chain_on_disk_does_not_certify_is_not_used(tmp_path: Path) -> None:
    history(RunFolder(tmp_path), 3)
    (tmp_path / "chain.log").unlink()
    assert restore_newest(RunFolder(tmp_path), make_state(2), SCHEMA) == -1
