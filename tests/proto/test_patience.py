"""Waits double with each lost attempt, and attempts that fail at once come ever more slowly."""

from __future__ import annotations

import pytest

from p2p_diloco.config import TimeoutConfig
from p2p_diloco.proto.patience import Patience

S = 1_000_000_000
TIMEOUTS = TimeoutConfig()


@pytest.mark.parametrize("lost", [0, 1, 2, 5, 10, 11, 1000, 65_535])
def test_a_wait_doubles_with_each_lost_attempt_up_to_the_cap(lost: int) -> None:
    patience = Patience(TIMEOUTS)
    patience.attempts_lost = lost
    cap_ns = round(TIMEOUTS.timeout_cap_s * S)
    assert patience.wait_ns(1.0) == min(S * 2 ** min(lost, 10), cap_ns)
    assert patience.whole_ring_ns() == patience.wait_ns(TIMEOUTS.stall_s + TIMEOUTS.vote_s)


def test_the_first_attempts_after_a_death_follow_at_once_and_later_ones_ever_more_slowly() -> None:
    patience, now_ns, pauses = Patience(TIMEOUTS), 7 * S, []
    for attempt in range(20):
        pauses.append(patience.pause_until_ns(attempt, f"reason {attempt}", now_ns) - now_ns)
        patience.attempts_lost += 1
        now_ns += S
    assert pauses[:3] == [0, 0, 0]
    assert pauses[3] == S // 20
    assert pauses[4] == S // 10
    assert pauses == sorted(pauses)
    assert max(pauses) == round(TIMEOUTS.view_s * S)


def test_a_pause_neither_grows_nor_starts_again_when_the_same_attempt_fails_again() -> None:
    patience = Patience(TIMEOUTS)
    patience.attempts_lost = 6
    until_ns = patience.pause_until_ns(9, "the neighbour is not there", S)
    assert until_ns > S
    assert patience.pause_until_ns(9, "no view in time", 2 * S) == until_ns
    assert patience.reason == "the neighbour is not there"
