"""Plain training on one machine, for comparison: the run's model, data and schedule, no outer step.

``python -m p2p_diloco.train.baseline --config run.toml --steps N --json out.json`` prints the held-out loss
before and after N inner steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from p2p_diloco.config import PeerConfig, RunConfig, build_config, read_toml
from p2p_diloco.errors import P2PDilocoError, UserError

logger = logging.getLogger(__name__)


def run_baseline(run: RunConfig, peer: PeerConfig, steps: int) -> dict[str, Any]:
    """Train ``steps`` inner steps; losses are nats per token, ``seconds`` excludes the start-up.

    Raises DataError or ConfigError for data or a device that is not there.
    """
    import torch.distributed

    from p2p_diloco.train.data import DataMix
    from p2p_diloco.train.devices import alone, prepare_torch
    from p2p_diloco.train.loop import InnerLoop, StepReport

    def on_step(report: StepReport) -> None:
        logger.info("step %d loss %.4f, %.0f tokens/s", report.step, report.loss, report.tokens_per_s)

    data = DataMix(run.data, peer.data_paths, run.inner.seq_len)
    mesh = alone(prepare_torch(peer, 0, 1))
    try:
        loop = InnerLoop(run, mesh, run.seed, data)
        start = loop.evaluate()
        began = time.monotonic()
        report = loop.train(steps, 0, b"baseline", lambda: False, on_step)
        seconds = time.monotonic() - began
        end = loop.evaluate()
    finally:
        torch.distributed.destroy_process_group()
    return {
        "steps": report.steps,
        "tokens": report.tokens,
        "train_loss_mean": report.loss,
        "eval_loss_start": start,
        "eval_loss_end": end,
        "seconds": seconds,
    }


def main(argv: list[str] | None = None) -> int:
    """Exit status 0, or 2 with one line on stderr for what the user can fix."""
    parser = argparse.ArgumentParser(prog="python -m p2p_diloco.train.baseline", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="TOML file with [run] and [peer]")
    parser.add_argument("--steps", type=int, required=True, help="inner steps to take")
    parser.add_argument("--json", type=Path, help="where to write the result as JSON")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        if arguments.steps < 1:
            raise UserError("--steps must be at least 1")
        tables = read_toml(arguments.config)
        run = build_config(RunConfig, tables.get("run", {}), "run")
        peer = build_config(PeerConfig, tables.get("peer", {}), "peer")
        result = run_baseline(run, peer, arguments.steps)
    except P2PDilocoError as error:
        sys.stderr.write(f"{error}\n")
        return 2 if error.blame == "user" else 1
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(
        f"eval loss {result['eval_loss_start']:.4f} -> {result['eval_loss_end']:.4f} "
        f"after {result['steps']} steps, {result['tokens']} tokens, {result['seconds']:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
