"""The inner loop of one rank: rounds of AdamW steps between two outer steps, and evaluation."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from p2p_diloco.config import RunConfig
from p2p_diloco.numerics.layout import Schema
from p2p_diloco.train.data import DataMix
from p2p_diloco.train.devices import device_of
from p2p_diloco.train.fsdp import build_sharded, load_anchor, schema_of, shards_of, store_delta, store_weights
from p2p_diloco.train.loss import training_loss
from p2p_diloco.train.schedule import learning_rate

logger = logging.getLogger(__name__)

Flat = NDArray[np.float32]
PROGRESS_INTERVAL_S = 0.2


@dataclasses.dataclass(frozen=True)
class StepReport:
    """One inner step as rank 0 saw it; ``tokens`` counts the whole peer's in this round so far."""

    step: int
    loss: float
    tokens: int
    tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class RoundReport:
    """A finished round, figures of the whole peer: loss and gradient norm are means over its steps."""

    steps: int
    tokens: int
    loss: float
    grad_norm: float


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Sequence indices of one forward pass and their share of the step's sequences (0 for padding)."""

    indices: tuple[int, ...]
    weight: float


def micro_batches(first: int, batch: int, micro: int, ranks: int, rank: int) -> list[MicroBatch]:
    """How ``rank`` works through the step's sequences ``first .. first + batch - 1``.

    Every rank gets the same number of micro-batches, since each forward pass is a collective; a rank with
    fewer sequences repeats one at weight 0. The weights of all ranks sum to 1.
    """
    per_rank = -(-batch // ranks)
    begin, end = min(rank * per_rank, batch), min((rank + 1) * per_rank, batch)
    result = []
    for start in range(0, per_rank, micro):
        low, high = min(begin + start, end), min(begin + start + micro, end)
        indices = tuple(range(first + low, first + high))
        result.append(MicroBatch(indices or (first,), len(indices) / batch))
    return result


class InnerLoop:
    """Model, optimiser and data of one rank. Optimiser state lives on from round to round.

    Every method is a collective: all ranks of the mesh call it with equal arguments.
    """

    def __init__(self, run: RunConfig, mesh: DeviceMesh, seed: int, data: DataMix) -> None:
        self._run = run
        self._mesh = mesh
        self._data = data
        self._device = device_of(mesh)
        self.model = build_sharded(run, mesh, seed)
        self.schema: Schema = schema_of(self.model)
        self._shards = shards_of(self.model, self.schema, mesh)
        self._optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=run.inner.lr,
            betas=(run.inner.beta1, run.inner.beta2),
            weight_decay=run.inner.weight_decay,
            fused=True,
        )

    @property
    def device(self) -> str:
        """Where the model is, such as ``cpu`` or ``cuda:0``."""
        return str(self._device)

    def load(self, anchor: Flat) -> None:
        """Set the weights to ``anchor``, fp32 [total_values]."""
        load_anchor(self._shards, anchor)

    def store(self, out: Flat) -> None:
        """Write this rank's part of the weights to ``out``, fp32 [total_values]."""
        store_weights(self._shards, out)

    def store_delta(self, anchor: Flat, out: Flat) -> None:
        """Write this rank's part of anchor - weights to ``out``, fp32 [total_values]."""
        store_delta(self._shards, anchor, out)

    def train(
        self,
        steps: int,
        global_step: int,
        shares_key: bytes,
        should_stop: Callable[[], bool],
        on_step: Callable[[StepReport], None],
        before_step: Callable[[int], None] = lambda step: None,
    ) -> RoundReport:
        """Take up to ``steps`` inner steps; ends after the step in which any rank's ``should_stop`` is
        true. ``on_step`` hears of a few steps a second and of the last; ``before_step`` of each."""
        inner = self._run.inner
        own_share = -(-inner.batch_sequences // self._mesh.size()) / inner.batch_sequences
        started = time.monotonic()
        reported = -1.0
        losses = torch.zeros((), device=self._device)
        norms = torch.zeros((), device=self._device)
        tokens = 0
        step = 0
        while step < steps:
            before_step(step)
            rate = learning_rate(global_step + step, inner.lr, self._run.schedule)
            loss, norm = self._step(step, rate, shares_key)
            losses += loss
            norms += norm
            step += 1
            tokens += inner.batch_sequences * inner.seq_len
            last = self._any_rank(should_stop()) or step == steps
            elapsed = time.monotonic() - started
            # Reading the loss waits for the GPU, so it is not done at every step.
            if self._mesh.get_local_rank() == 0 and (last or elapsed - reported >= PROGRESS_INTERVAL_S):
                reported = elapsed
                on_step(StepReport(step, loss.item() / own_share, tokens, tokens / max(elapsed, 1e-9)))
            if last:
                break
        if self._mesh.size() > 1:
            dist.all_reduce(losses, group=self._mesh.get_group())
        return RoundReport(step, tokens, losses.item() / step, norms.item() / step)

    def evaluate(self) -> float:
        """Mean cross-entropy per token over the held-out sequences, with the present weights."""
        batches = micro_batches(
            0,
            self._run.data.eval_sequences,
            self._run.inner.micro_batch_sequences,
            self._mesh.size(),
            self._mesh.get_local_rank(),
        )
        total = torch.zeros((), device=self._device)
        self.model.eval()
        with torch.no_grad():
            for batch in batches:
                inputs, targets = self._to_device(self._data.held_out_tokens(batch.indices))
                logits = self.model(input_ids=inputs, use_cache=False).logits
                loss = functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
                total += loss * batch.weight
        self.model.train()
        if self._mesh.size() > 1:
            dist.all_reduce(total, group=self._mesh.get_group())
        return total.item()

    def _step(self, step: int, rate: float, shares_key: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimiser step; (this rank's part of the mean loss, gradient norm before clipping)."""
        inner = self._run.inner
        ranks = self._mesh.size()
        batches = micro_batches(
            step * inner.batch_sequences,
            inner.batch_sequences,
            inner.micro_batch_sequences,
            ranks,
            self._mesh.get_local_rank(),
        )
        mean = torch.zeros((), device=self._device)
        for batch in batches:
            inputs, targets = self._to_device(self._data.training_tokens(shares_key, batch.indices))
            logits = self.model(input_ids=inputs, use_cache=False).logits
            loss, cross_entropy = training_loss(logits, targets, inner.z_loss)
            # FSDP averages gradients over ranks; the weights already make this a mean over sequences.
            cast(Any, loss * (batch.weight * ranks)).backward()
            mean += cross_entropy * batch.weight
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), inner.clip_norm)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        return mean, whole.detach()

    def _to_device(self, tokens: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.from_numpy(tokens).to(self._device)
        return whole[:, :-1], whole[:, 1:]

    def _any_rank(self, flag: bool) -> bool:
        """True on all ranks if ``flag`` is on any. Goes over the CPU, so it does not wait for the GPU."""
        if self._mesh.size() == 1:
            return flag
        value = torch.tensor(int(flag))
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())
