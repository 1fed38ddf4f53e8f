"""SWIM: doubt, death, refutation, good-byes; and that one slow observer does not kill others."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from support.statements import identities

from p2p_diloco.config import GossipConfig
from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import PeerId
from p2p_diloco.proto.events import Close, Dial, Send
from p2p_diloco.proto.membership import LINK_WAIT_NS, Membership
from p2p_diloco.proto.statements import Statements
from p2p_diloco.wire import messages as msg

S = 1_000_000_000
RUN = bytes(32)


def member(index: int, incarnation: int = 0) -> Membership:
    identity = identities(5)[index]
    addresses = (f"10.0.0.{index + 1}:7000",)
    speak = Statements(identity, RUN)
    return Membership(speak, GossipConfig(), random.Random(index), addresses, incarnation, 0)


def sent(effects: list[Any], kind: type) -> list[Any]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def link(one: Membership, two: Membership, now_ns: int = 0) -> None:
    """A link comes up on both sides; the records of the first exchange are delivered."""
    for here, there in ((one, two), (two, one)):
        for message in sent(here.link_up(there.me, (), now_ns), msg.Gossip):
            there.on_gossip(here.me, message, now_ns)
    for here, there in ((one, two), (two, one)):
        for message in sent(here._send_full(there.me, now_ns), msg.Gossip):
            there.on_gossip(here.me, message, now_ns)


def gossip(source: Membership, *, rumours: tuple = (), records: tuple = ()) -> msg.Gossip:
    return msg.Gossip(source.progress, records, rumours)


def test_a_newcomer_learns_of_everybody_through_one_link_and_dials_them() -> None:
    a, b, c = member(0), member(1), member(2)
    link(a, b)
    link(b, c)
    assert a.me in c.members
    dials = [e for e in c.tick(S) if isinstance(e, Dial)]
    assert [d.peer for d in dials] == [a.me]
    assert dials[0].addresses == ("10.0.0.1:7000",)
    assert not [e for e in c.tick(S + 1) if isinstance(e, Dial)], "one dial at a time"


def test_a_lost_link_makes_a_suspect_and_silence_a_dead_member() -> None:
    a, b = member(0), member(1)
    link(a, b)
    assert a.usable(b.me)
    a.link_down(b.me, "reset", S)
    assert a.members[b.me].status == "suspect"
    assert not a.usable(b.me)
    a.tick(S + 20 * S)
    assert a.members[b.me].status == "dead"


def test_a_peer_that_hears_of_its_own_death_refutes_it_with_a_higher_incarnation() -> None:
    a, b = member(0), member(1)
    link(a, b)
    b.on_gossip(a.me, gossip(a, rumours=(msg.Rumour(b.me, 0, "dead"),)), S)
    assert b.incarnation == 1
    a.link_down(b.me, "reset", S)
    a.tick(30 * S)
    assert a.members[b.me].status == "dead"
    a.on_gossip(a.me, gossip(b, records=(b._own,)), 31 * S)
    assert a.members[b.me].status == "alive"


def test_a_restarted_peer_overrides_its_old_death_notice() -> None:
    a, b = member(0), member(1)
    link(a, b)
    a.link_down(b.me, "reset", S)
    a.tick(30 * S)
    again = member(1, incarnation=1000)
    a.on_gossip(a.me, gossip(again, records=(again._own,)), 31 * S)
    assert a.members[b.me].status == "alive"


def test_an_old_record_or_an_old_rumour_changes_nothing() -> None:
    a, b = member(0), member(1)
    old = b._own
    b.set_addresses(("10.9.9.9:1",))
    link(a, b)
    a.on_gossip(b.me, gossip(b, records=(old,)), S)
    assert a.members[b.me].addresses == ("10.9.9.9:1",)
    newer = member(1, incarnation=5)
    a.on_gossip(b.me, gossip(b, records=(newer._own,)), S)
    a.on_gossip(b.me, gossip(b, rumours=(msg.Rumour(b.me, 4, "suspect"),)), S)
    assert a.members[b.me].status == "alive"


def test_a_peer_that_said_goodbye_has_left_and_is_not_dialled_again() -> None:
    a, b = member(0), member(1)
    link(a, b)
    for message in sent(b.leave(), msg.Gossip):
        a.on_gossip(b.me, message, S)
    assert a.members[b.me].status == "left"
    a.link_down(b.me, "closed", S)
    assert not [e for e in a.tick(100 * S) if isinstance(e, Dial)]


def test_a_probe_that_nobody_answers_goes_through_helpers_and_then_makes_a_suspect() -> None:
    a, b, c = member(0), member(1), member(2)
    link(a, b)
    link(a, c)
    now, asked = 0, []
    while a.members[b.me].status == "alive" and now < 60 * S:
        now += S // 10
        for effect in a.tick(now):
            if isinstance(effect, Send) and isinstance(effect.message, msg.Probe):
                asked.append((effect.peer, effect.message.target))
                if effect.message.target == c.me:  # c answers, b is silent
                    a.on_ack(c.me, msg.Ack(effect.message.nonce, c.me), now)
    assert (c.me, b.me) in asked, "a helper was asked"
    assert a.members[b.me].status == "suspect"
    assert a._health > 0, "it also doubts itself"


def test_a_helper_passes_the_question_and_the_answer_on() -> None:
    a, b, c = member(0), member(1), member(2)
    link(c, a)
    link(c, b)
    [forwarded] = sent(c.on_probe(a.me, msg.Probe(77, b.me), 0), msg.Probe)
    [answer] = sent(b.on_probe(c.me, forwarded, 0), msg.Ack)
    [back] = sent(c.on_ack(b.me, answer, 0), msg.Ack)
    assert back == msg.Ack(77, b.me)


def test_an_observer_that_keeps_failing_grows_patient() -> None:
    a, b = member(0), member(1)
    link(a, b)
    healthy = a._scaled(1.0)
    a._health = 3
    assert a._scaled(1.0) == 4 * healthy


def test_nobody_is_dialled_at_an_address_that_cannot_be() -> None:
    a, b = member(0), member(1)
    b.set_addresses(("0.0.0.0:0", "127.0.0.1:0"))
    with pytest.raises(ProtocolViolation):
        a.on_gossip(b.me, gossip(b, records=(b._own,)), 0)
    assert not [e for e in a.tick(S) if isinstance(e, Dial)]


def test_a_record_with_a_wrong_signature_or_of_another_kind_is_a_violation() -> None:
    a, b = member(0), member(1)
    forged = msg.Signed(b._own.public_key, "member", b._own.body, bytes(64))
    other = b._statements.make(msg.Abstain(1, bytes(32), "", 0))
    for signed in (forged, other):
        with pytest.raises(ProtocolViolation):
            a.on_gossip(b.me, gossip(b, records=(signed,)), 0)


def test_a_flood_of_invented_members_ends_at_a_bound() -> None:
    a = member(0)
    for index in range(3000):
        a.learn(index.to_bytes(32, "big"), ("10.0.0.1:1",), 0)
    assert len(a.members) <= 1024


def test_the_dead_are_forgotten_after_a_while() -> None:
    a, b = member(0), member(1)
    link(a, b)
    a.link_down(b.me, "reset", 0)
    a.tick(30 * S)
    a.tick(2000 * S)
    assert b.me not in a.members


def trio() -> tuple[Membership, Membership, Membership]:
    """b knows a and c; a and c know of each other through b and have no link."""
    a, b, c = member(0), member(1), member(2)
    link(a, b)
    link(b, c)
    [news] = sent(b._send_full(a.me, 0), msg.Gossip)
    a.on_gossip(b.me, news, 0)
    return a, b, c


def test_a_peer_heard_of_just_now_is_hoped_for_and_then_called_unreachable() -> None:
    a, b, c = trio()
    assert a.hopeful(c.me, S)
    assert a.unreachable(S) == ()
    late = LINK_WAIT_NS
    assert not a.hopeful(c.me, late)
    assert a.unreachable(late) == (c.me,)
    assert a.bad_edges(late) == {frozenset((a.me, c.me))}
    a.link_up(c.me, (), late)
    assert a.unreachable(late) == ()
    assert not a.hopeful(b.me, 0), "it has its link"


def test_a_peer_without_a_link_may_be_in_a_ring_as_long_as_somebody_usable_has_one() -> None:
    a, b, c = trio()
    assert not a.usable(c.me)
    assert a.reachable(c.me)
    lonely = msg.Gossip(b.progress, (), (), (c.me,))
    a.on_gossip(b.me, lonely, S)
    assert not a.reachable(c.me)
    assert a.bad_edges(S) == {frozenset((b.me, c.me))}
    a.on_gossip(b.me, gossip(b), 2 * S)
    assert a.reachable(c.me), "the newest word counts"
    a.link_down(b.me, "reset", 3 * S)
    assert not a.reachable(c.me), "nobody is left who could know"


def test_an_unreachable_peer_is_told_to_the_others_with_every_gossip() -> None:
    a, b, c = trio()
    [news] = sent(a.tick(LINK_WAIT_NS), msg.Gossip)
    assert news.unreachable == (c.me,)
    b.on_gossip(a.me, news, LINK_WAIT_NS)
    assert b.bad_edges(LINK_WAIT_NS) == {frozenset((a.me, c.me))}
    b.link_down(a.me, "reset", LINK_WAIT_NS)
    assert b.bad_edges(LINK_WAIT_NS + S) == frozenset(), "what a lost link said does not last"


def test_a_lane_that_failed_keeps_two_linked_peers_apart_for_a_minute() -> None:
    a, b = member(0), member(1)
    link(a, b)
    a.edge_failed(b.me, S)
    assert a.usable(b.me)
    assert a.bad_edges(60 * S) == {frozenset((a.me, b.me))}
    assert a.bad_edges(61 * S) == frozenset()
    a.edge_failed(bytes(32), S)  # a stranger: nothing happens
    assert a.unreachable(61 * S) == ()


def test_the_list_of_unreachable_peers_fits_its_message() -> None:
    a = member(0)
    for index in range(msg.MAX_UNREACHABLE + 8):
        a.learn(index.to_bytes(32, "big"), ("10.0.0.1:1",), 0)
    assert len(a.unreachable(LINK_WAIT_NS)) == msg.MAX_UNREACHABLE


def test_a_peer_held_for_dead_hears_of_it_when_its_link_is_back_and_returns_for_everybody_at_once() -> None:
    """After a partition the first link that comes up must spare all others their long wait to dial."""
    a, b, c = member(0), member(1), member(2)
    link(a, b)
    link(a, c)
    link(b, c)
    for here in (a, b):
        here.link_down(c.me, "cut", S)
        here.tick(40 * S)
        assert here.members[c.me].status == "dead"
        for _ in range(8):
            here.dial_failed(c.me, 40 * S)
    assert not [e for e in b.tick(41 * S) if isinstance(e, Dial)], "its next dial is a while away"
    for news in sent(a.link_up(c.me, (), 42 * S), msg.Gossip):
        c.on_gossip(a.me, news, 42 * S)
    assert c.incarnation > 0
    b.on_gossip(a.me, gossip(a, records=(c._own,)), 43 * S)
    assert b.members[c.me].status == "alive"
    assert [e.peer for e in b.tick(43 * S) if isinstance(e, Dial)] == [c.me]


def test_whom_we_hold_for_dead_is_named_in_promises_after_those_that_an_attempt_failed_for() -> None:
    a, b, c = trio()
    late = LINK_WAIT_NS
    a.link_down(b.me, "reset", late)
    assert a.unreachable(late) == (c.me,), "gossip names those that live"
    assert a.cut_off_from((), late) == (c.me, b.me)
    assert a.cut_off_from((b.me,), late) == (b.me, c.me)
    a.ban(b.me, late)
    assert a.cut_off_from((), late) == (c.me,)
    for index in range(msg.MAX_UNREACHABLE + 8):
        a.learn(index.to_bytes(32, "big"), ("10.0.0.1:1",), 0)
    assert len(a.cut_off_from((b.me,), late)) == msg.MAX_UNREACHABLE
    assert a.cut_off_from((b.me,), late)[0] == b.me


def test_a_banned_key_is_cut_off_and_neither_used_nor_dialled_again() -> None:
    a, b = member(0), member(1)
    link(a, b)
    assert [e.peer for e in a.ban(b.me, S) if isinstance(e, Close)] == [b.me]
    assert a.ban(b.me, S) == [], "once"
    assert a.banned() == [b.me]
    assert not a.usable(b.me)
    assert not a.reachable(b.me)
    a.link_down(b.me, "closed", S)
    assert not [e for e in a.tick(100 * S) if isinstance(e, Dial)]
    assert [e.peer for e in a.link_up(b.me, (), 101 * S) if isinstance(e, Close)] == [b.me]
    assert not a.usable(b.me)


def test_a_key_is_banned_before_its_first_link() -> None:
    a, b = member(0), member(1)
    assert a.ban(b.me, 0) == []
    assert [e.peer for e in a.link_up(b.me, (), S) if isinstance(e, Close)] == [b.me]


def test_a_later_life_is_known_from_the_record_and_an_earlier_one_does_not_come_back() -> None:
    a, b = member(0), member(1, incarnation=3000)
    assert a.life_of(b.me) == 0
    link(a, b)
    assert a.life_of(b.me) == 3
    assert b.life_of(b.me) == 3
    b.on_gossip(a.me, gossip(a, rumours=(msg.Rumour(b.me, 3000, "dead"),)), S)
    assert (b.incarnation, b.life) == (3001, 3), "a refutation is no new life"
    old = member(1, incarnation=2000)
    a.on_gossip(b.me, gossip(b, records=(old._own,)), S)
    assert a.life_of(b.me) == 3


def test_an_observer_that_was_stopped_blames_itself_and_gives_suspects_the_time_again() -> None:
    a, b = member(0), member(1)
    link(a, b)
    a.link_down(b.me, "reset", 0)
    deadline = a.members[b.me].deadline_ns
    a.slept(100 * S)
    a.tick(deadline + 50 * S)
    assert a.members[b.me].status == "suspect"
    a.tick(deadline + 100 * S)
    assert a.members[b.me].status == "dead"
    assert a._health > 0


def test_a_probe_that_was_under_way_while_we_slept_does_not_fail() -> None:
    a, b = member(0), member(1)
    link(a, b)
    asked = [e for e in a.tick(10 * S) if isinstance(e, Send) and isinstance(e.message, msg.Probe)]
    assert [e.peer for e in asked] == [b.me]
    a.slept(100 * S)
    a.tick(110 * S)
    assert a.members[b.me].status == "alive"
    a.on_ack(b.me, msg.Ack(asked[0].message.nonce, b.me), 110 * S)
    assert a._pending is None


def test_rates_that_peers_measured_are_gossiped_smoothed_and_forgotten_in_time() -> None:
    a, b = member(0), member(1)
    link(a, b)
    a.note_rate(b.me, 1000)
    a.note_rate(b.me, 500)
    assert a.rates() == {(a.me, b.me): 750}, "down by halves"
    a.note_rate(b.me, 2000)
    assert a.rates() == {(a.me, b.me): 2000}, "up at once"
    message = msg.decode(msg.encode(a._news((), (), 0)))
    assert isinstance(message, msg.Gossip)
    b.on_gossip(a.me, message, 0)
    assert b.rates() == {(a.me, b.me): 2000}
    a.progress = dataclasses.replace(a.progress, epoch=51)
    assert a.rates() == {}
    for number in range(100):
        a.note_rate(PeerId(bytes([number]) * 32), 10)
    assert len(a.rates()) == msg.MAX_RATES
