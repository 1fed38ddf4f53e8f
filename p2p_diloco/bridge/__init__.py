"""Shared memory and control channel between the peer process and the trainer.

`TrainerHost` (processes) and `FunctionTrainer` (a plain function) are the two kinds of `Trainer` a peer can
have; `TrainerClient` is what a trainer process, or a user's own training script, holds.
"""

from p2p_diloco.bridge.api import OnEvent, Trainer, TrainerDied, TrainerEvent
from p2p_diloco.bridge.client import TrainerClient, peer_from_environment, run_from_environment
from p2p_diloco.bridge.host import TrainerHost
from p2p_diloco.bridge.inprocess import FunctionTrainer
from p2p_diloco.bridge.messages import Progress, Round, RoundDone, Shutdown, StopEarly, WriteInitial
from p2p_diloco.bridge.shared import SharedState, StateAreas

__all__ = [
    "FunctionTrainer",
    "OnEvent",
    "Progress",
    "Round",
    "RoundDone",
    "SharedState",
    "Shutdown",
    "StateAreas",
    "StopEarly",
    "Trainer",
    "TrainerClient",
    "TrainerDied",
    "TrainerEvent",
    "TrainerHost",
    "WriteInitial",
    "peer_from_environment",
    "run_from_environment",
]
