"""The whole life of a peer in the epoch agreement, as one table.

joining: our memory does not hold the head's state. training, ready, ring, voting: the way of an epoch that
goes well. promised: waiting for the view of a later attempt. fetching: an adopted result is being pulled.
sitting_out: no part in the running attempt. finishing: the verdict came while our ring still runs; what is
missing is on its way. closing: the copy is the certified state and is being swapped in.
"""

from __future__ import annotations

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
