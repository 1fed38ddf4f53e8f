"""The outer step: Nesterov SGD on the averaged pseudo-gradient, the same bits on every CPU.

Only single numpy multiplies and adds in a fixed order: nothing that a compiler may fuse. Equal to
``torch.optim.SGD(lr, momentum, nesterov=True)`` with the mean as gradient (DiLoCo, arXiv:2311.08105).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Flat = NDArray[np.float32]


def nesterov_update(
    anchor: Flat,
    momentum: Flat,
    mean: Flat,
    lr: float,
    mu: float,
    anchor_out: Flat,
    momentum_out: Flat,
    scratch: Flat | None = None,
) -> None:
    """``m' = mu*m + g;  a' = a - lr*(g + mu*m')``, elementwise fp32 on 1-D arrays of one length.

    The outputs and ``scratch`` (at least as long as ``mean``) must not overlap the inputs. With ``mu`` 0
    this is plain SGD.
    """
    work = np.empty_like(mean) if scratch is None else scratch[: mean.size]
    rate, keep = np.float32(lr), np.float32(mu)
    np.multiply(momentum, keep, out=momentum_out)
    np.add(momentum_out, mean, out=momentum_out)
    np.multiply(momentum_out, keep, out=work)
    np.add(mean, work, out=work)
    np.multiply(work, rate, out=work)
    np.subtract(anchor, work, out=anchor_out)


def weights_to_delta(anchor: Flat, local: Flat, out: Flat) -> None:
    """The pseudo-gradient: ``out = anchor - local`` in fp32."""
    np.subtract(anchor, local, out=out)
