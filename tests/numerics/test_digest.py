"""Tree hashes tell every difference."""

from __future__ import annotations

import numpy as np
from blake3 import blake3

from p2p_diloco.numerics import digest
from p2p_diloco.numerics.digest import leaf_hash, merkle_root, short


def test_a_leaf_depends_on_index_order_and_every_byte() -> None:
    a, b = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    hashes = {leaf_hash(0, a, b), leaf_hash(1, a, b), leaf_hash(0, b, a), leaf_hash(0, a), leaf_hash(0)}
    assert len(hashes) == 5
    assert leaf_hash(0, a, b) == leaf_hash(0, a.tobytes() + b.tobytes())


def test_a_root_depends_on_order_number_and_content_of_the_leaves() -> None:
    x, y = bytes(32), bytes([1]) * 32
    lists = [[], [x], [y], [x, x], [x, y], [y, x], [x, y, x], [x, y, x, x], [merkle_root([x, y])]]
    assert len({merkle_root(leaves) for leaves in lists}) == len(lists)
    assert all(len(merkle_root(leaves)) == 32 for leaves in lists)


def test_short_is_twelve_hex_digits() -> None:
    assert short(bytes(range(32))) == "000102030405"


def test_an_inner_node_cannot_pose_as_a_leaf() -> None:
    x, y, z = (bytes([i]) * 32 for i in range(3))
    inner = blake3(digest._NODE + x + y).digest()
    # Without the number of leaves both trees would have the same top.
    assert merkle_root([inner, z]) != merkle_root([x, y, z])
