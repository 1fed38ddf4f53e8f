"""What the pure machines take in (events) and ask for (effects).

A machine is called as ``handle(event, now_ns)`` and answers with effects; a driver (sockets or a
simulator) carries them out and feeds the outcomes back as events. Times are monotonic nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from p2p_diloco.identity import PeerId
from p2p_diloco.wire.messages import Message

# --- events ---


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


@dataclass(frozen=True, slots=True)
class LinkUp:
    """A control link to this peer is open; `addresses` are what its HELLO said it listens on."""

    peer: PeerId
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LinkDown:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class DialFailed:
    """None of a peer's addresses answered."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class LaneFailed:
    """A data frame to this peer could not be delivered."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class RateMeasured:
    """How fast data went to this peer while its link was what held us up."""

    peer: PeerId
    kbit_per_s: int


@dataclass(frozen=True, slots=True)
class Received:
    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class FrameIn:
    """A data frame: `kind` is reduce, gather or state; `tag` the view hash or the state root."""

    peer: PeerId
    kind: str
    tag: bytes
    chunk: int
    hop: int
    weight: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ComputeDone:
    """The answer to `Compute`; `error` is set instead of `result` when remote bytes were bad."""

    job: int
    result: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Persisted:
    """The record of `Persist` is on disk (`error` empty) or could not be written."""

    record: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class RoundDone:
    """The trainer finished its local round."""

    epoch: int
    steps: int
    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class RoundProgress:
    epoch: int
    step: int
    steps: int
    loss: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class TrainerLost:
    reason: str


@dataclass(frozen=True, slots=True)
class TrainerBack:
    """The trainer is attached and can start a round."""


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    reason: str


Event = (
    Tick | LinkUp | LinkDown | DialFailed | LaneFailed | RateMeasured | Received | FrameIn | ComputeDone
    | Persisted | RoundDone | RoundProgress | TrainerLost | TrainerBack | LeaveRequested
)  # fmt: skip

# --- effects ---


@dataclass(frozen=True, slots=True)
class Send:
    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class SendFrame:
    peer: PeerId
    kind: str
    tag: bytes
    chunk: int
    hop: int
    weight: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Dial:
    peer: PeerId
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """Close the link to a peer that broke the protocol."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Compute:
    """Numerics off the event loop; `op` names a function of the driver's worker table."""

    job: int
    op: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Persist:
    """Write and fsync one record before anything that depends on it leaves; records are written in the
    order of their effects. kind: vote, promise, abstain, convened, certificate."""

    record: int
    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class KeepRound:
    """Write and fsync the payloads of a finished round, so that its state can be worked out again from the
    one before it; answered by `Persisted`, in the order of `Persist`."""

    record: int
    epoch: int
    state_root: bytes
    payloads: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class StartRound:
    """Train locally from the current anchor towards `epoch`."""

    epoch: int
    steps: int
    global_step: int
    shares_key: bytes


@dataclass(frozen=True, slots=True)
class StopEarly:
    epoch: int


@dataclass(frozen=True, slots=True)
class Notice:
    """One line for the user. level: info, warning, error."""

    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Metric:
    kind: str
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finished:
    """This peer has left or reached its last epoch; the process may end."""

    reason: str


Effect = (
    Send
    | SendFrame
    | Dial
    | Close
    | Compute
    | Persist
    | KeepRound
    | StartRound
    | StopEarly
    | Notice
    | Metric
    | Finished
)
