"""One trainer rank: ``python -m p2p_diloco.train.trainer``, started by the peer through torch's launcher.

It connects to the peer process before the slow imports, so that it ends at once if that process is gone,
then serves rounds until it is told to shut down.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from p2p_diloco.bridge.client import ENV_SEED, TrainerClient, peer_from_environment, run_from_environment
from p2p_diloco.bridge.messages import Progress, Round, RoundDone, Shutdown, WriteInitial
from p2p_diloco.errors import P2PDilocoError
from p2p_diloco.train.faults import CRASH_STATUS, Faults

if TYPE_CHECKING:
    from p2p_diloco.train.loop import InnerLoop, StepReport

logger = logging.getLogger(__name__)


def serve(client: TrainerClient, loop: InnerLoop, faults: Faults) -> None:
    """Answer the peer's commands until Shutdown."""
    while True:
        command = client.wait_command()
        if isinstance(command, WriteInitial):
            loop.store(client.anchor_view(0))
            client.initial_written()
        elif isinstance(command, Round):
            client.round_done(run_round(client, loop, faults, command))
        elif isinstance(command, Shutdown):
            logger.info("the peer process asks to end")
            return


def run_round(client: TrainerClient, loop: InnerLoop, faults: Faults, command: Round) -> RoundDone:
    """One round of this rank, from the anchor to its part of the delta."""
    anchor = client.anchor_view(command.slot)
    loop.load(anchor)
    eval_loss = loop.evaluate() if command.evaluate else None

    def on_step(report: StepReport) -> None:
        client.progress(
            Progress(
                command.epoch,
                report.step,
                command.global_step + report.step,
                report.loss,
                report.tokens,
                report.tokens_per_s,
            )
        )

    def before_step(step: int) -> None:
        if client.rank == 0 and step == command.steps // 2 and faults.crashes(command.epoch):
            sys.stderr.write(f"fault: crash in epoch {command.epoch}\n")
            sys.stderr.flush()
            os._exit(CRASH_STATUS)

    report = loop.train(
        command.steps, command.global_step, command.shares_key, client.should_stop, on_step, before_step
    )
    delta = client.delta_view()
    loop.store_delta(anchor, delta)
    spoilt = faults.spoils(command.epoch)
    if client.rank == 0 and spoilt is not None:
        delta[0] = spoilt  # rank 0 always holds the first value
    return RoundDone(command.epoch, report.steps, report.tokens, report.loss, eval_loss, report.grad_norm)


def main() -> int:
    """Exit status 0 after Shutdown, 2 for an error of the user, 1 for a defect; never returns if the peer
    process vanishes."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s rank{os.environ.get('RANK', '0')} %(levelname)s %(message)s",
    )
    try:
        client = TrainerClient.connect()
    except (OSError, P2PDilocoError) as error:
        logger.error("cannot reach the peer process: %s", error)
        return 2
    try:
        run, peer, faults = run_from_environment(), peer_from_environment(), Faults.from_environment()
        # Imported late: these take seconds, in which the client already watches the peer process.
        import torch.distributed

        from p2p_diloco.train.data import DataMix
        from p2p_diloco.train.devices import join_ranks, local_rank, prepare_torch
        from p2p_diloco.train.loop import InnerLoop

        data = DataMix(run.data, peer.data_paths, run.inner.seq_len)
        mesh = join_ranks(prepare_torch(peer, local_rank(), client.ranks))
        loop = InnerLoop(run, mesh, int(os.environ.get(ENV_SEED, "0")), data)
        logger.info("model of %d values on %s", loop.schema.total_values, loop.device)
        client.hello(loop.schema, loop.device)
        serve(client, loop, faults)
        torch.distributed.destroy_process_group()
    except P2PDilocoError as error:
        logger.error("%s", error)
        client.failed(str(error))
        return 2 if error.blame == "user" else 1
    except Exception as error:
        client.failed(f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
