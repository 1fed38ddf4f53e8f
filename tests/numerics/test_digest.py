"""Tree hashes tell every difference."""

from __future__ import annotations

import numpy as np

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
