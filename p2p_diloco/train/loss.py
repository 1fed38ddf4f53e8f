"""The training loss: cross-entropy plus max-z-loss."""

from __future__ import annotations

import torch
from torch.nn import functional


def training_loss(
    logits: torch.Tensor, targets: torch.Tensor, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss to differentiate, its cross-entropy part), both fp32 scalars, means over all tokens.

    ``logits``: [batch, seq, vocab], any float type, reduced in fp32. ``targets``: int64 [batch, seq].
    max-z-loss, ``z_loss * mean(max_v logit^2)`` (Baichuan 2, arXiv:2309.10305; INTELLECT-1), keeps the
    logits from drifting, which matters with bfloat16.
    """
    flat = logits.float().flatten(0, 1)
    cross_entropy = functional.cross_entropy(flat, targets.flatten())
    if z_loss == 0.0:
        return cross_entropy, cross_entropy.detach()
    largest = flat.max(dim=-1).values
    return cross_entropy + z_loss * largest.square().mean(), cross_entropy.detach()
