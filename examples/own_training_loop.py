"""Bring your own training loop: any torch program can be the trainer of a peer.

The peer process starts this file under torch's elastic launcher when its host gets it as the command:

    TrainerHost(run, peer, log_path, command=("examples/own_training_loop.py",))

The file holds a `TrainerClient` and keeps four promises. It says which tensors it trains (`hello`); it
writes its initial weights when asked (`WriteInitial`); in each `Round` it loads the anchor, trains, and
writes anchor - weights (`round_done`); and it ends on `Shutdown`. Every peer of a run must run the same
model. If the peer process vanishes, the client ends this program by itself.

The task here is a toy that needs no data: fit y = sin(3x) with a small network. It works with one rank per
peer; with several, split the tensors by rank (every rank calls `round_done` for its part).
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from p2p_diloco.bridge import Progress, Round, RoundDone, TrainerClient, WriteInitial, run_from_environment
from p2p_diloco.numerics.layout import Schema, TensorSpec

BATCH = 64


def batch_of(shares_key: bytes, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of this peer only: the shares key differs from peer to peer and from epoch to epoch."""
    digest = hashlib.sha256(shares_key + step.to_bytes(8, "big")).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    x = torch.rand((BATCH, 1), generator=generator) * 2 - 1
    return x, torch.sin(3 * x)


def flat_views(
    model: nn.Module, schema: Schema, flat: torch.Tensor
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with its place in a flat vector of the whole model."""
    offsets = zip(model.named_parameters(), schema.offsets, strict=True)
    return [(p, flat[start : start + p.numel()].view(p.shape)) for (_, p), start in offsets]


def train_round(
    client: TrainerClient, model: nn.Module, schema: Schema, optimiser: torch.optim.Optimizer, command: Round
) -> RoundDone:
    """One round: load the anchor, take steps until the end or an early stop, leave the delta."""
    anchor = torch.from_numpy(client.anchor_view(command.slot))
    with torch.no_grad():
        for parameter, values in flat_views(model, schema, anchor):
            parameter.copy_(values)
    total, norms, step = 0.0, 0.0, 0
    while step < command.steps:
        x, y = batch_of(command.shares_key, step)
        loss = (model(x) - y).square().mean()
        loss.backward()
        norms += float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimiser.step()
        optimiser.zero_grad()
        step += 1
        total += loss.item()
        if client.should_stop():
            break
    client.progress(
        Progress(command.epoch, step, command.global_step + step, total / step, step * BATCH, 0.0)
    )
    for (name, parameter), (_, values) in zip(
        model.named_parameters(), flat_views(model, schema, anchor), strict=True
    ):
        client.write_delta(name, (values - parameter.detach()).numpy())
    return RoundDone(command.epoch, step, step * BATCH, total / step, None, norms / step)


def main() -> None:
    """Serve rounds until Shutdown."""
    client = TrainerClient.connect()
    run = run_from_environment()
    torch.manual_seed(run.seed)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    optimiser = torch.optim.AdamW(model.parameters(), lr=run.inner.lr)
    schema = Schema(tuple(TensorSpec(n, tuple(p.shape), "float32") for n, p in model.named_parameters()))
    client.hello(schema, "cpu")
    while True:
        command = client.wait_command()
        if isinstance(command, WriteInitial):
            for parameter, values in flat_views(model, schema, torch.from_numpy(client.anchor_view(0))):
                values.copy_(parameter.detach())
            client.initial_written()
        elif isinstance(command, Round):
            client.round_done(train_round(client, model, schema, optimiser, command))
        else:
            break
    client.close()


if __name__ == "__main__":
    main()
