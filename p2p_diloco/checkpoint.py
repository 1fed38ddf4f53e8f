"""Certified snapshots on disk: safetensors and a manifest with the certificate, written aside, then renamed.

A folder ``epoch-00000012`` holds ``weights.safetensors`` (the anchor, one tensor per parameter, loadable by
any tool), ``momentum.safetensors`` and ``manifest.json``. A folder under its final name is complete.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from p2p_diloco.config import PeerConfig
from p2p_diloco.disk import RunFolder, fsync_folder, write_atomically
from p2p_diloco.errors import UserError
from p2p_diloco.numerics.layout import Schema
from p2p_diloco.numerics.state import FlatState, SnapshotGone
from p2p_diloco.numerics.work import replay
from p2p_diloco.proto.chain import Chain
from p2p_diloco.wire.messages import pack_object
from p2p_diloco.wire.runid import show_run_id

logger = logging.getLogger(__name__)

_LOOK_S = 0.5  # between two looks at the chain (guess)


class Checkpoints:
    """Writes the current state every so many epochs, in a thread; training never waits for it."""

    def __init__(self, peer: PeerConfig, state: FlatState, chain: Chain, schema: Schema) -> None:
        self.folder = peer.run_dir / "checkpoints"
        self._every, self._keep = peer.checkpoint_every_epochs, peer.checkpoint_keep
        self._state, self._chain, self._schema = state, chain, schema
        self._written = -1

    async def follow(self) -> None:
        """Write the first state that we hold, and then whenever it has reached a multiple of the interval;
        until cancelled. With the rounds since then on disk, a state is never further than a replay away."""
        while self._every:
            epoch = self._state.epoch
            if self._written < 0 or epoch // self._every > self._written // self._every:
                await asyncio.to_thread(self.write)
            await asyncio.sleep(_LOOK_S)

    def write(self) -> Path | None:
        """Write the current certified state; None if there is none, or it moved on while being read."""
        epoch, root = self._state.epoch, self._state.root
        if epoch < 0 or not root or epoch == self._written or epoch > self._chain.epoch:
            return None
        certificate = self._chain.link(epoch).certificate
        if certificate.state_root != root:
            return None
        final = self.folder / f"epoch-{epoch:08d}"
        if final.exists():
            self._written = epoch
            return final
        try:
            weights, momentum = self._read(root)
            return self._save(final, weights, momentum, epoch, root, pack_object(certificate))
        except SnapshotGone:
            logger.info("the state of epoch %d was replaced before its checkpoint was read", epoch)
        except OSError as error:
            logger.warning("no checkpoint of epoch %d: %s", epoch, error)
        return None

    def _read(self, root: bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        layout = self._state.layout
        weights = np.empty(layout.total_values, np.float32)
        momentum = np.empty(layout.total_values, np.float32)
        for chunk in range(layout.chunks):
            start, stop = layout.bounds(chunk)
            data = np.frombuffer(self._state.read_chunk(root, chunk), np.float32)
            weights[start:stop], momentum[start:stop] = data[: stop - start], data[stop - start :]
        return weights, momentum

    def _save(
        self,
        final: Path,
        weights: NDArray[np.float32],
        momentum: NDArray[np.float32],
        epoch: int,
        root: bytes,
        certificate: bytes,
    ) -> Path:
        aside = self.folder / f".{final.name}.{os.getpid()}.tmp"
        aside.mkdir(parents=True)
        try:
            for name, flat in (("weights", weights), ("momentum", momentum)):
                path = aside / f"{name}.safetensors"
                save_file(split(self._schema, flat), path)
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            manifest = {
                "run_id": show_run_id(self._chain.genesis.run_id()),
                "epoch": epoch,
                "state_root": root.hex(),
                "certificate": certificate.hex(),
            }
            write_atomically(aside / "manifest.json", json.dumps(manifest, indent=1).encode())
            os.rename(aside, final)
            fsync_folder(self.folder)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        self._written = epoch
        for old in complete(self.folder)[: -self._keep]:
            shutil.rmtree(old)
        return final


def split(schema: Schema, flat: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """The flat vector as named tensors (fp32, views)."""
    tensors = {}
    for tensor, start in zip(schema.tensors, schema.offsets, strict=True):
        tensors[tensor.name] = flat[start : start + tensor.values].reshape(tensor.shape)
    return tensors


def complete(folder: Path) -> list[Path]:
    """All complete checkpoints, oldest first."""
    return sorted(folder.glob("epoch-*")) if folder.exists() else []


def restore_newest(folder: RunFolder, state: FlatState, schema: Schema) -> int:
    """Load the newest state that the folder leads to: its checkpoint, and the rounds on disk after it as
    far as the chain on disk certifies them. Returns its epoch, -1 if there is none that is certified."""
    epoch = restore(folder.path / "checkpoints", state, schema)
    chain = folder.certificates()
    if epoch < 0 or epoch > len(chain) or (epoch > 0 and chain[epoch - 1].state_root != state.root):
        return -1
    while epoch < len(chain):
        wanted = chain[epoch].state_root
        found = [payloads for root, payloads in folder.rounds(epoch + 1) if root == wanted]
        if not found or not replay(state, epoch + 1, wanted, found[0]):
            break
        epoch += 1
    return epoch


def restore(folder: Path, state: FlatState, schema: Schema) -> int:
    """Load the newest checkpoint into the current slot and hash it; returns its epoch, -1 if there is none.

    Raises UserError if it is damaged or of another model.
    """
    found = complete(folder)
    if not found:
        return -1
    newest = found[-1]
    try:
        manifest: dict[str, Any] = json.loads((newest / "manifest.json").read_text())
        weights = load_file(newest / "weights.safetensors")
        momentum = load_file(newest / "momentum.safetensors")
        for tensor, start in zip(schema.tensors, schema.offsets, strict=True):
            stop = start + tensor.values
            state.anchor[start:stop] = weights[tensor.name].reshape(-1)
            state.momentum[start:stop] = momentum[tensor.name].reshape(-1)
        epoch, root = int(manifest["epoch"]), str(manifest["state_root"])
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"checkpoint {newest} cannot be read: {error}") from None
    state.initialise(epoch)
    if state.root.hex() != root:
        raise UserError(f"checkpoint {newest} is damaged: its state root is not the certified one")
    return epoch
