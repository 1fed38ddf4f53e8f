"""Whole peers in one event loop, with real sockets and TLS."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.swarm import Swarm, normal_deltas, swarm


def assert_mean_within_bound(made: Swarm, epoch: int) -> None:
    """The certified outer step rests on a mean that is within the codec's bound of the exact one."""
    node = made.nodes[0]
    link = node.driver.machine.chain.link(epoch)
    index_of = {n.identity.peer_id: n.index for n in made.nodes}
    order = [index_of[peer] for peer in link.contributors]
    deltas = [made.delta_of(i, epoch).astype(np.float64) for i in order]
    total = sum(link.weights)
    exact = sum(w * d for w, d in zip(link.weights, deltas, strict=True)) / total
    # Each encode rounds by at most half a step of its block's largest partial sum.
    largest = sum(w * np.abs(d) for w, d in zip(link.weights, deltas, strict=True)) / total
    peak = float(largest.max()) if largest.size else 0.0
    bound = (len(order) + 1) * peak / 254 * 1.1 + 1e-6
    before, after = node.anchors[epoch - 1].astype(np.float64), node.anchors[epoch].astype(np.float64)
    momentum = made.momenta[epoch - 1]
    implied_momentum = 0.9 * momentum + exact
    expected = before - 0.7 * (exact + 0.9 * implied_momentum)
    assert np.abs(after - expected).max(initial=0.0) <= 0.7 * 1.9 * bound + 1e-5
    made.momenta[epoch] = recovered_momentum(before, after, momentum)


def recovered_momentum(before: np.ndarray, after: np.ndarray, momentum: np.ndarray) -> np.ndarray:
    """m' from a' = a - 0.7 (g + 0.9 m') with m' = 0.9 m + g."""
    step = (before - after) / 0.7
    mean = (step - 0.81 * momentum) / 1.9
    return 0.9 * momentum + mean


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("values", [0, 1, 7, 1_000_003])
@pytest.mark.parametrize("peers", [1, 2, 3, 5, 8])
async def test_after_each_of_five_epochs_all_peers_hold_the_same_bits_and_the_mean_is_right(
    tmp_path: Path, peers: int, values: int, dtype: str
) -> None:
    deltas = normal_deltas(values, dtype=dtype)
    async with swarm(tmp_path, peers, values, deltas, dtype=dtype) as made:
        await made.at_epoch(6)
        made.assert_bitwise_equal(0, 5)
        made.momenta = {0: np.zeros(values)}  # type: ignore[attr-defined]
        for epoch in range(1, 6):
            assert len(made.nodes[0].driver.machine.chain.link(epoch).contributors) == peers
            assert_mean_within_bound(made, epoch)
