"""FSDP2 sharding, and the way between a rank's shards and the flat vector in shared memory.

`fully_shard` splits every parameter on dimension 0 as `torch.chunk` does, so a rank's shard is one
contiguous range of the parameter's flat range. Each rank reads and writes its own ranges; nothing is
gathered, and the flat vector does not depend on the number of ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from p2p_diloco.config import RunConfig
from p2p_diloco.errors import InternalError
from p2p_diloco.numerics.layout import Schema, TensorSpec
from p2p_diloco.train.devices import device_of
from p2p_diloco.train.model import build_on_meta, initial_values, materialise

Flat = NDArray[np.float32]


def shard_rows(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """(start, stop) of the rows of dimension 0 that ``rank`` holds; empty for the last ranks of a small
    dimension."""
    per_rank = -(-rows // ranks)
    return min(rank * per_rank, rows), min((rank + 1) * per_rank, rows)


@dataclasses.dataclass(frozen=True)
class Shard:
    """One parameter's local part: ``values`` is the local tensor, [start, stop) its flat range."""

    name: str
    values: torch.Tensor
    start: int
    stop: int


def schema_of(model: torch.nn.Module) -> Schema:
    """Names, full shapes and dtypes of all parameters in order, tied ones once."""
    return Schema(
        tuple(
            TensorSpec(name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
            for name, parameter in model.named_parameters()
        )
    )


def build_sharded(run: RunConfig, mesh: DeviceMesh, seed: int) -> torch.nn.Module:
    """The run's model, sharded over ``mesh`` (each decoder block, then the rest) and seeded.

    At no time does a rank hold more than its shards and one whole parameter.
    """
    model = build_on_meta(run.model)
    policy = MixedPrecisionPolicy()
    if run.inner.compute_dtype == "bfloat16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in cast(Any, model).model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    materialise(model, run.model, device_of(mesh))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = initial_values(name, tuple(parameter.shape), seed, run.model.init_std)
            start, stop = shard_rows(parameter.shape[0], mesh.size(), mesh.get_local_rank())
            cast(DTensor, parameter).to_local().copy_(whole[start:stop])
    return model


def shards_of(model: torch.nn.Module, schema: Schema, mesh: DeviceMesh) -> list[Shard]:
    """This rank's part of every parameter. InternalError if torch splits in another way than
    `shard_rows` says, which would scatter weights into wrong places."""
    found = []
    for (name, parameter), offset in zip(model.named_parameters(), schema.offsets, strict=True):
        local = cast(DTensor, parameter).to_local().detach()
        rows = parameter.shape[0]
        first, last = shard_rows(rows, mesh.size(), mesh.get_local_rank())
        if local.shape[0] != last - first or local.shape[1:] != parameter.shape[1:]:
            raise InternalError(f"shard of {name} is {tuple(local.shape)}, expected rows {first}..{last}")
        row_values = parameter.numel() // max(rows, 1)
        found.append(Shard(name, local, offset + first * row_values, offset + last * row_values))
    return found


def load_anchor(shards: list[Shard], anchor: Flat) -> None:
    """Set the local weights to the anchor's values (rounded if the model's dtype is narrower)."""
    for shard in shards:
        source = torch.from_numpy(anchor[shard.start : shard.stop])
        shard.values.copy_(source.view(shard.values.shape))


def store_weights(shards: list[Shard], out: Flat) -> None:
    """Write the local weights, widened to fp32, to their flat ranges of ``out``."""
    for shard in shards:
        out[shard.start : shard.stop] = _to_numpy(shard.values)


def store_delta(shards: list[Shard], anchor: Flat, out: Flat) -> None:
    """Write anchor - local to the flat ranges of ``out``. Non-finite values are written as they are."""
    for shard in shards:
        where = slice(shard.start, shard.stop)
        np.subtract(anchor[where], _to_numpy(shard.values), out=out[where])


def _to_numpy(values: torch.Tensor) -> Flat:
    return cast(Flat, values.to(device="cpu", dtype=torch.float32).reshape(-1).numpy())
