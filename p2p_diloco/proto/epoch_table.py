"""The whole life of a peer in the epoch agreement, as one table.

joining: our memory does not hold the head's state. training, ready, ring, voting: the way of an epoch that
goes well. promised: waiting for the view of a later attempt. fetching: an adopted result is being pulled.
sitting_out: no part in the running attempt. finishing: the verdict came while our ring still runs; what is
missing is on its way. closing: the copy is the certified state and is being swapped in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from p2p_diloco.identity import PeerId, show
from p2p_diloco.proto.chain import Link
from p2p_diloco.proto.events import Metric, Notice

IN_PLAY = ("ready", "ring", "voting", "promised", "fetching", "sitting_out")
_ANY = ("joining", "training", *IN_PLAY)
TABLE: dict[tuple[str, str], str] = {
    ("joining", "caught_up"): "training",
    ("training", "local_ready"): "ready",
    ("training", "local_bad"): "sitting_out",
    ("sitting_out", "retry"): "training",
    ("promised", "retry"): "training",
    **{(s, "view_run"): "ring" for s in IN_PLAY},
    **{(s, "view_have"): "voting" for s in IN_PLAY},
    **{(s, "view_fetch"): "fetching" for s in IN_PLAY},
    **{(s, "view_without"): "sitting_out" for s in IN_PLAY},
    ("ring", "ring_done"): "voting",
    ("fetching", "fetched"): "voting",
    **{(s, "fail"): "promised" for s in IN_PLAY},
    **{(s, "verdict_mine"): "closing" for s in _ANY},
    ("ring", "verdict_early"): "finishing",
    ("finishing", "finished"): "closing",
    **{(s, "verdict_other"): "joining" for s in (*_ANY, "closing", "finishing")},
    ("closing", "swapped"): "training",
}

TOO_LATE = {  # what it means that the deadline of a state passed
    "ring": "the ring stalled",
    "finishing": "the ring stalled",
    "voting": "no quorum of votes in time",
    "promised": "no view in time",
    "fetching": "the adopted result did not come in time",
    "ready": "no view in time",
    "sitting_out": "no certificate in time",
}
PHASES = {"promised": "waiting", "fetching": "voting", "closing": "voting"}


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
