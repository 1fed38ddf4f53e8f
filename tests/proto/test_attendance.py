"""Whom a ring waits for, and for how long."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.statements import Cast

from p2p_diloco.config import AgreementConfig, GossipConfig, TimeoutConfig
from p2p_diloco.proto.attendance import Attendance
from p2p_diloco.proto.membership import LINK_WAIT_NS, Membership
from p2p_diloco.wire import messages as msg

S = 1_000_000_000
TIMEOUTS = TimeoutConfig()
LATE_NS = LINK_WAIT_NS  # first links are no excuse any more


class Hall:
    """The first of four peers looks at the epoch after one in which all four were."""

    def __init__(self, linked: tuple[int, ...] = (1, 2, 3)) -> None:
        self.cast = Cast(4)
        self.cast.chain.append(self.cast.certificate([0, 1, 2, 3], [0]))
        speak = self.cast.speak
        self.members = Membership(speak[0], GossipConfig(), random.Random(1), ("10.0.0.1:7000",), 0, 0)
        self.others = [
            Membership(speak[i], GossipConfig(), random.Random(i), (f"10.0.0.{i + 1}:7000",), 0, 0)
            for i in range(4)
        ]
        records = tuple(other._own for other in self.others[1:])
        for index in linked:
            self.members.link_up(speak[index].me, (), 0)
        for index in linked:
            self.says(index, records=records)
        self.attendance = Attendance(self.cast.chain, self.members, AgreementConfig(), TIMEOUTS, now_ns=0)

    def says(self, who: int, phase: str = "training", epoch: int = 1, **news: tuple) -> None:
        progress = replace(self.others[who].progress, epoch=epoch, phase=phase)
        gossip = msg.Gossip(progress, news.get("records", ()), (), news.get("unreachable", ()))
        self.members.on_gossip(self.cast.speak[who].me, gossip, 0)

    def ready(self, who: int, **lives: int) -> None:
        signed = self.cast.ready(who, **lives)
        self.attendance.add_ready(self.cast.speak[who].me, signed, self.cast.chain.check_ready(signed)[1])
        self.attendance.note_ready("ready", S)

    def awaited(self, own_state: str = "ready") -> list[int]:
        found = self.attendance.waiting_for(own_state)
        return [index for index in range(4) if self.cast.speak[index].me in found]


def test_a_ring_waits_for_all_that_train_on_its_head_and_for_nobody_else() -> None:
    hall = Hall()
    assert hall.awaited("training") == [0, 1, 2, 3]
    hall.ready(0)
    hall.ready(1)
    assert hall.awaited() == [2, 3]
    hall.says(2, phase="joining")
    assert hall.awaited() == [3]
    assert not hall.attendance.ring_may_start("ready", LATE_NS)
    hall.ready(3)
    assert hall.attendance.ring_may_start("ready", LATE_NS)


def test_who_abstained_is_not_waited_for_and_who_is_behind_is_only_if_it_was_in_the_last_ring() -> None:
    hall = Hall()
    hall.says(1, epoch=0)
    assert hall.awaited() == [1, 2, 3], "the verdict is on its way there"
    hall.attendance.abstained[hall.cast.speak[1].me] = hall.cast.abstain(1)
    assert hall.awaited() == [2, 3]


def test_a_peer_that_only_others_reach_is_waited_for_until_nobody_says_so() -> None:
    hall = Hall(linked=(1, 2))
    assert not hall.members.usable(hall.cast.speak[3].me)
    assert hall.awaited() == [1, 2, 3]
    far = hall.cast.speak[3].me
    hall.says(1, unreachable=(far,))
    assert hall.awaited() == [1, 2, 3]
    hall.says(2, unreachable=(far,))
    assert hall.awaited() == [1, 2]


def test_stragglers_are_waited_for_a_while_after_half_are_ready_and_then_left_out() -> None:
    hall = Hall()
    for who in (0, 1, 2):
        hall.ready(who)
    begun_ns = S + round(TIMEOUTS.straggler_s * S)
    assert not hall.attendance.straggling(begun_ns - 1)
    assert hall.attendance.straggling(begun_ns)
    assert not hall.attendance.ring_may_start("ready", begun_ns)
    assert hall.attendance.ring_may_start("ready", begun_ns + round(TIMEOUTS.view_s * S))
    hall.attendance.slept(5 * S)
    assert not hall.attendance.straggling(begun_ns)
    assert hall.attendance.straggling(begun_ns + 5 * S)


@pytest.mark.parametrize("newer", [{"life": 1, "trial": 0}, {"life": 0, "trial": 1}])
def test_of_two_readies_of_one_peer_the_later_one_counts_in_whatever_order_they_come(
    newer: dict[str, int],
) -> None:
    for order in ((0, 1), (1, 0)):
        hall = Hall()
        for index in order:
            hall.ready(1, **(newer if index else {}))
        kept = hall.attendance.readies[hall.cast.speak[1].me]
        assert kept == hall.cast.ready(1, **newer)


def test_a_ready_of_an_earlier_life_puts_nobody_into_a_ring() -> None:
    hall = Hall()
    hall.ready(1)
    assert hall.attendance.ring_candidates() == [hall.cast.speak[1].me]
    hall.members.members[hall.cast.speak[1].me].life = 1
    assert hall.attendance.ring_candidates() == []
