"""In words: what is unfinished in an epoch, and who waits for whom. For status lines and failed tests."""

from __future__ import annotations

from collections.abc import Iterable

from p2p_diloco.identity import PeerId, show
from p2p_diloco.proto.acceptor import Acceptor
from p2p_diloco.proto.attendance import Attendance
from p2p_diloco.proto.ballots import Ballots
from p2p_diloco.proto.chain import Chain
from p2p_diloco.proto.membership import Membership
from p2p_diloco.proto.ringrun import RingRun


def waits_for(
    state: str,
    chain: Chain,
    members: Membership,
    attendance: Attendance,
    ballots: Ballots,
    run: RingRun,
    acceptor: Acceptor,
) -> str:
    """One line."""
    epoch, attempt = chain.epoch + 1, acceptor.promised
    convener = chain.convener(attempt)
    there = "here" if members.usable(convener) else "not reachable"
    match state:
        case "joining":
            return f"waits for the certified state of epoch {chain.epoch}"
        case "training":
            return f"trains for epoch {epoch}"
        case "ready" | "promised" if convener == members.me:
            missing = _missing(chain, attendance, ballots, attempt, state)
            return f"convenes attempt {attempt} of epoch {epoch}: {missing}"
        case "ready" | "promised" | "sitting_out":
            return f"waits for the view of attempt {attempt} of epoch {epoch} from {show(convener)} ({there})"
        case "ring" | "finishing" if run.ring is not None:
            ring = run.ring
            count = len(ring.missing())
            return (
                f"waits for {count} of {ring.plan.chunks} chunks, from its left neighbour {show(ring.left)}"
            )
        case "voting":
            silent = [v for v in chain.voters if v not in ballots.heard(attempt)]
            return f"waits for votes on epoch {epoch} from {names(silent)}"
        case "fetching":
            return f"fetches the adopted result of epoch {epoch}"
    return state


def _missing(chain: Chain, attendance: Attendance, ballots: Ballots, attempt: int, state: str) -> str:
    silent = [v for v in chain.voters if v not in ballots.promises(attempt)]
    if attempt > 0 and not chain.enough(attendance.abstained, ballots.promises(attempt)):
        return f"waits for promises from {names(silent)}"
    return f"waits for READY from {names(attendance.waiting_for(state))}"


def names(peers: Iterable[PeerId]) -> str:
    return ", ".join(show(peer) for peer in peers) or "nobody"
