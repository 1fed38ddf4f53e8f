"""Tree hashes of state and payloads with BLAKE3: leaves are made where the data is in cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

_LEAF: Final = b"p2p-diloco/leaf\0"
_NODE: Final = b"p2p-diloco/node\0"
_ROOT: Final = b"p2p-diloco/root\0"


def leaf_hash(index: int, *buffers: object) -> bytes:
    """32-byte BLAKE3 over the chunk's index and its buffers (bytes-like, C-contiguous), in order."""
    hasher = blake3(_LEAF + index.to_bytes(8, "little"))
    for buffer in buffers:
        hasher.update(memoryview(buffer).cast("B") if memoryview(buffer).nbytes else b"")  # type: ignore[arg-type]
    return bytes(hasher.digest())


def merkle_root(leaves: Sequence[bytes]) -> bytes:
    """32-byte root of a binary tree over ``leaves``; an odd one goes up unpaired, and the number of
    leaves is bound in, so no two lists share a root. The empty list has a root of its own."""
    level = list(leaves)
    while len(level) > 1:
        paired = [
            bytes(blake3(_NODE + level[i] + level[i + 1]).digest()) for i in range(0, len(level) - 1, 2)
        ]
        level = paired + level[len(level) // 2 * 2 :]
    top = level[0] if level else b""
    return bytes(blake3(_ROOT + len(leaves).to_bytes(8, "little") + top).digest())


def short(digest: bytes) -> str:
    """The first 12 hex digits: for people."""
    return digest.hex()[:12]
