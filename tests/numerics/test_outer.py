"""The outer step against torch, and its exact cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2p_diloco.numerics.outer import nesterov_update, weights_to_delta


def step(anchor: np.ndarray, momentum: np.ndarray, mean: np.ndarray, lr: float, mu: float) -> tuple:
    anchor_out, momentum_out = np.empty_like(anchor), np.empty_like(momentum)
    nesterov_update(anchor, momentum, mean.copy(), lr, mu, anchor_out, momentum_out)
    return anchor_out, momentum_out


@pytest.mark.parametrize(("lr", "mu"), [(0.7, 0.9), (1.0, 0.0), (0.1, 0.5)])
def test_it_equals_torch_sgd_with_nesterov_momentum(lr: float, mu: float) -> None:
    generator = np.random.default_rng(1)
    anchor = generator.standard_normal(1000).astype(np.float32)
    momentum = np.zeros(1000, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(anchor.copy()))
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=mu, nesterov=mu > 0)
    for _ in range(10):
        mean = generator.standard_normal(1000).astype(np.float32)
        anchor, momentum = step(anchor, momentum, mean, lr, mu)
        parameter.grad = torch.from_numpy(mean.copy())
        optimizer.step()
        np.testing.assert_allclose(anchor, parameter.detach().numpy(), rtol=2e-6, atol=2e-6)


def test_one_peer_with_rate_one_and_no_momentum_takes_its_local_weights() -> None:
    generator = np.random.default_rng(2)
    anchor = generator.standard_normal(1000).astype(np.float32)
    local = (anchor + 0.01 * generator.standard_normal(1000)).astype(np.float32)
    delta = np.empty_like(anchor)
    weights_to_delta(anchor, local, delta)
    after, _ = step(anchor, np.zeros_like(anchor), delta, 1.0, 0.0)
    # anchor - (anchor - local) rounds twice: within one unit in the last place of the larger value.
    np.testing.assert_array_max_ulp(after, local, maxulp=64)
    assert np.abs(after - local).max() <= np.spacing(np.abs(anchor).max())


def test_opposite_deltas_leave_the_anchor_unchanged() -> None:
    anchor = np.random.default_rng(3).standard_normal(100).astype(np.float32)
    after, momentum = step(anchor, np.zeros_like(anchor), np.zeros_like(anchor), 0.7, 0.9)
    assert np.array_equal(after, anchor)
    assert not momentum.any()


def test_empty_and_single_vectors_work() -> None:
    for size in (0, 1):
        after, _ = step(
            np.ones(size, np.float32), np.zeros(size, np.float32), np.ones(size, np.float32), 1, 0
        )
        assert after.size == size
        assert not after.any()


def test_bits_do_not_depend_on_how_the_vector_is_cut() -> None:
    generator = np.random.default_rng(4)
    a, m, g = (generator.standard_normal(999).astype(np.float32) for _ in range(3))
    whole = step(a, m, g, 0.7, 0.9)
    parts = [step(a[i : i + 10], m[i : i + 10], g[i : i + 10], 0.7, 0.9) for i in range(0, 999, 10)]
    assert np.array_equal(whole[0], np.concatenate([p[0] for p in parts]))
    assert np.array_equal(whole[1], np.concatenate([p[1] for p in parts]))
