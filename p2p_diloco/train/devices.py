"""Devices, threads and process groups: what a trainer rank needs before its model."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from p2p_diloco.config import PeerConfig
from p2p_diloco.errors import ConfigError


def prepare_torch(peer: PeerConfig, local_rank: int, ranks: int) -> str:
    """Choose threads and device; "cuda" or "cpu". ConfigError if the machine lacks the asked GPUs."""
    if peer.trainer_threads:
        torch.set_num_threads(peer.trainer_threads)
    if peer.device == "cpu" or (peer.device == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if torch.cuda.device_count() < ranks:
        raise ConfigError(f"peer.ranks is {ranks}, but {torch.cuda.device_count()} GPU(s) are visible")
    torch.set_float32_matmul_precision("high")  # TF32; a no-op for bfloat16 compute
    torch.cuda.set_device(local_rank)
    return "cuda"


def join_ranks(device: str) -> DeviceMesh:
    """The mesh of all ranks that torch's launcher started; gloo carries CPU tensors, NCCL those of GPUs."""
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    return init_device_mesh(device, (dist.get_world_size(),))


def alone(device: str) -> DeviceMesh:
    """A mesh of this one process, without a launcher and without a network socket."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but absent from the type stubs
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return init_device_mesh(device, (1,))


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device of this rank's shards."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def local_rank() -> int:
    """This process's index on its machine, as torch's launcher sets it; 0 without one."""
    return int(os.environ.get("LOCAL_RANK", "0"))
