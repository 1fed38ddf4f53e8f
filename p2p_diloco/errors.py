"""Every error of the package. Each says who is to blame, which decides what happens next.

========  ==========================================================
blame     what happens next
========  ==========================================================
user      one clear line on stderr, exit status 2; fix and restart
remote    that link closes, the peer is named, the run goes on
network   retried elsewhere or later with back-off
ours      a defect of this program: crash loudly with the history
========  ==========================================================
"""

from __future__ import annotations

from typing import ClassVar, Literal

Blame = Literal["user", "remote", "network", "ours"]


class P2PDilocoError(Exception):
    """Base of all errors raised on purpose by this package."""

    blame: ClassVar[Blame] = "ours"
    next_step: ClassVar[str] = "this is a defect: please report it with the log"


class UserError(P2PDilocoError):
    """The user asked for something that cannot work."""

    blame = "user"
    next_step = "fix it and start again"


class ConfigError(UserError):
    """A config key is unknown or has an impossible value; the message names the key."""


class IdentityError(UserError):
    """The key file is unreadable, damaged, or has unsafe permissions."""


class IdentityLockedError(IdentityError):
    """Another process on this machine already uses the key file."""


class SchemaMismatchError(UserError):
    """Our parameters differ from the run's; the message names the first tensor that differs."""


class RunMismatchError(UserError):
    """We were configured for another run than the one that we found."""


class DataError(UserError):
    """A data source is missing, empty or unreadable."""


class RemoteError(P2PDilocoError):
    """A peer sent something it must not send. The link to it is closed."""

    blame = "remote"
    next_step = "the link is closed; the run goes on without it"


class ProtocolViolation(RemoteError):  # noqa: N818 - the field's word
    """Malformed, oversized, unexpected or wrongly signed bytes."""


class RefusedByPeer(RemoteError):  # noqa: N818
    """The other side refused our HELLO; `code` is one of `wire.messages.REFUSALS`."""

    def __init__(self, code: str, text: str, schema: bytes = b"") -> None:
        super().__init__(f"refused ({code}): {text}")
        self.code = code
        self.text = text
        self.schema = schema


class NetworkError(P2PDilocoError):
    """The network failed us; nobody misbehaved."""

    blame = "network"
    next_step = "retried with back-off"


class DialError(NetworkError):
    """No address of a peer could be reached."""


class LinkLostError(NetworkError):
    """A link closed or stalled while something was owed on it."""


class DiscoveryError(NetworkError):
    """The DHT daemon died or did not answer in time."""


class InternalError(P2PDilocoError):
    """A broken invariant of our own."""


class IllegalTransitionError(InternalError):
    """A state machine was asked for a move that its table does not have; carries the history."""

    def __init__(self, machine: str, state: str, event: str, history: list[str]) -> None:
        lines = "\n  ".join(history) or "(none)"
        super().__init__(f"{machine}: no move from {state} on {event}; history:\n  {lines}")
        self.history = history


class TrainerError(P2PDilocoError):
    """The trainer processes failed more often than the peer may restart them."""

    blame = "user"
    next_step = "read the trainer's log named above, fix the cause and start again"
