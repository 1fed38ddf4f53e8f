"""What an epoch has to tell its user. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2p_diloco.identity import PeerId, show
from p2p_diloco.proto.chain import Link
from p2p_diloco.proto.events import Metric, Notice


def quorum_lost(epoch: int, reason: str, usable: Sequence[PeerId], voters: Sequence[PeerId]) -> Notice:
    """What a peer says that cannot go on without more voters."""
    missing = ", ".join(show(voter) for voter in voters if voter not in usable)
    text = f"QuorumLost in epoch {epoch} ({reason}): {len(usable)} of {len(voters)} voters are here"
    return Notice("error", f"{text}; waiting for {missing or 'a convener'}")


def diverged(epoch: int) -> Notice:
    """What a peer says whose own sum is not the certified one."""
    text = f"StateDivergence in epoch {epoch}: our sum differs from the certified one"
    return Notice("error", f"{text}; dropping ours and fetching theirs")


def verdict_metric(link: Link, me: PeerId, attempt: int, ring_ns: int) -> Metric:
    """The figures of a certified epoch; `ring_ns` is 0 for a peer that took no part."""
    certificate = link.certificate
    values: dict[str, Any] = {
        "epoch": certificate.epoch,
        "attempt": attempt,
        "contributors": [show(peer) for peer in link.contributors],
        "tokens": sum(link.weights),
        "ring_ns": ring_ns if me in link.contributors else 0,
        "state_root": certificate.state_root.hex(),
        "took_part": me in link.contributors,
    }
    return Metric("epoch", values)
