"""What is said again to those who may have missed it."""

from __future__ import annotations

import pytest
from support.statements import Cast

from p2p_diloco.proto.archive import _KEPT, Archive
from p2p_diloco.wire import messages as msg


@pytest.fixture
def cast() -> Cast:
    made = Cast(3)
    made.chain.append(made.certificate([0, 1, 2], [0]))
    return made


def add(archive: Archive, cast: Cast, *statements: msg.Signed) -> None:
    for signed in statements:
        author, body = cast.speak[0].check(signed)
        archive.add(author, signed, body)


def promise(cast: Cast, who: int, attempt: int) -> msg.Signed:
    return cast.speak[who].make(msg.Promise(cast.chain.epoch + 1, cast.chain.head.digest, attempt, (), ()))


def test_each_statement_of_the_epoch_is_kept_once_and_told_in_a_fixed_order(cast: Cast) -> None:
    view = cast.view([0, 1, 2])
    everything = [cast.ready(1), cast.ready(0), view, cast.vote(2, view, bytes(32)), cast.abstain(1)]
    everything += [promise(cast, 0, 1), promise(cast, 0, 2)]
    here, there = Archive(), Archive()
    add(here, cast, *everything, *everything)
    add(there, cast, *everything[::-1])
    assert len(here) == len(everything)
    assert list(here.everything()) == list(there.everything())
    assert sorted(s.digest() for s in here.everything()) == sorted(s.digest() for s in everything)
    assert all(here.has(signed) for signed in everything)
    assert not here.has(promise(cast, 0, 3))


def test_a_peers_own_words_can_be_told_alone(cast: Cast) -> None:
    archive = Archive()
    view = cast.view([0, 1, 2])
    mine = [cast.ready(0), promise(cast, 0, 1), cast.vote(0, view, bytes(32))]
    add(archive, cast, cast.ready(1), *mine, promise(cast, 2, 1))
    assert {s.digest() for s in archive.of(cast.speak[0].me)} == {s.digest() for s in mine}
    assert list(archive.of(bytes(32))) == []


def test_a_later_ready_takes_the_place_of_an_earlier_one(cast: Cast) -> None:
    archive = Archive()
    old, trial, life = cast.ready(0), cast.ready(0, trial=1), cast.ready(0, life=1)
    add(archive, cast, old, trial, life)
    assert list(archive.everything()) == [life]
    assert archive.has(old), "it was heard"


def test_an_earlier_ready_that_is_heard_later_changes_nothing(cast: Cast) -> None:
    archive = Archive()
    newest = cast.ready(0, life=1)
    add(archive, cast, newest, cast.ready(0, trial=1))
    assert list(archive.everything()) == [newest]


def test_of_two_votes_or_views_in_one_attempt_the_first_is_told(cast: Cast) -> None:
    archive = Archive()
    view, other = cast.view([0, 1, 2]), cast.view([0, 1])
    mine, second = cast.vote(0, view, bytes(32)), cast.vote(0, other, bytes(32))
    add(archive, cast, view, other, mine, second)
    assert {s.digest() for s in archive.everything()} == {view.digest(), mine.digest()}
    assert archive.has(other)


def test_a_flood_of_attempts_ends_at_a_bound_and_a_new_ready_still_gets_in(cast: Cast) -> None:
    archive = Archive()
    add(archive, cast, cast.ready(1))
    author, body = cast.speak[0].check(promise(cast, 0, 1))
    for attempt in range(1, _KEPT + 100):
        flood = msg.Promise(2, body.previous, attempt, (), ())
        archive.add(author, msg.Signed(author, "promise", msg.pack_object(flood), bytes(64)), flood)
    assert len(archive) == _KEPT
    newest = cast.ready(1, trial=1)
    add(archive, cast, newest)
    assert newest in list(archive.everything())


def test_a_flood_of_readies_by_one_peer_is_not_remembered_for_ever(cast: Cast) -> None:
    archive = Archive()
    author, body = cast.speak[0].check(cast.ready(0))
    flood = [msg.Signed(author, "ready", trial.to_bytes(4, "big"), bytes(64)) for trial in range(3 * _KEPT)]
    for signed in flood:
        archive.add(author, signed, body)
    assert sum(archive.has(signed) for signed in flood) <= 2 * _KEPT
