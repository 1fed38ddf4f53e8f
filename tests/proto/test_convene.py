"""What a VIEW may say: by whom, on which promises, and when it is forced to adopt."""

from __future__ import annotations

import pytest
from support.statements import Cast

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.proto.acceptor import Acceptor
from p2p_diloco.proto.convene import check_promise, check_view, forced, make_view
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.wire import messages as msg


def promise(cast: Cast, who: int, attempt: int, vote: tuple = (), view: tuple = ()) -> msg.Signed:
    head = cast.chain.head
    return cast.speak[who].make(msg.Promise(cast.chain.epoch + 1, head.digest, attempt, vote, view))


def checked(cast: Cast, *signed: msg.Signed) -> dict:
    return dict(check_promise(cast.speak[0], cast.chain, s) for s in signed)


@pytest.fixture
def cast() -> Cast:
    made = Cast(3)
    made.chain.append(made.certificate([0, 1, 2], [0]))
    return made


def signed_view(cast: Cast, attempt: int, promises: dict, members: list[int]) -> msg.Signed:
    body = make_view(cast.chain, attempt, tuple(cast.ready(m) for m in members), promises)
    return cast.by_id(cast.chain.convener(attempt)).make(body)


def test_only_the_convener_of_an_attempt_may_convene_it(cast: Cast) -> None:
    good = cast.view([0, 1, 2])
    assert [p for p, _ in check_view(cast.speak[0], cast.chain, good).members] == [s.me for s in cast.speak]
    for index, speaker in enumerate(cast.speak):
        if speaker.me != cast.chain.convener(0):
            with pytest.raises(ProtocolViolation, match="not the convener"):
                check_view(cast.speak[0], cast.chain, cast.view([0, 1], author=index))


def test_a_later_attempt_needs_a_quorum_of_promises(cast: Cast) -> None:
    one = checked(cast, promise(cast, 0, 1))
    with pytest.raises(ProtocolViolation, match="no quorum of promises"):
        check_view(cast.speak[0], cast.chain, signed_view(cast, 1, one, [0, 1]))
    two = checked(cast, promise(cast, 0, 1), promise(cast, 1, 1))
    assert check_view(cast.speak[0], cast.chain, signed_view(cast, 1, two, [0, 1])).attempt == 1


def test_promises_of_another_attempt_do_not_count(cast: Cast) -> None:
    promises = checked(cast, promise(cast, 0, 2), promise(cast, 1, 2))
    with pytest.raises(ProtocolViolation, match="another attempt"):
        check_view(cast.speak[0], cast.chain, signed_view(cast, 1, promises, [0, 1]))


def test_a_reported_vote_forces_adoption_and_the_highest_one_wins(cast: Cast) -> None:
    first, later = cast.view([0, 1, 2]), cast.view([0, 1], attempt=1)
    low = cast.vote(0, first, bytes([1]) * 32)
    high = cast.vote(1, later, bytes([2]) * 32, attempt=1)
    promises = checked(cast, promise(cast, 0, 2, (low,), (first,)), promise(cast, 1, 2, (high,), (later,)))
    must = forced(promises)
    assert must is not None
    assert must[0].state_root == bytes([2]) * 32
    view = check_view(cast.speak[0], cast.chain, signed_view(cast, 2, promises, [0, 1, 2]))
    assert view.vote is not None
    assert view.run_view == later
    assert view.holders == (cast.speak[1].me,)


def test_running_again_although_a_vote_was_reported_is_refused(cast: Cast) -> None:
    first = cast.view([0, 1, 2])
    vote = cast.vote(0, first, bytes([1]) * 32)
    promises = checked(cast, promise(cast, 0, 1, (vote,), (first,)), promise(cast, 1, 1))
    head = cast.chain.head
    body = msg.View(
        cast.chain.epoch + 1,
        head.digest,
        1,
        "run",
        (cast.ready(1),),
        tuple(p.signed for p in promises.values()),
        (),
        (),
    )
    with pytest.raises(ProtocolViolation, match="runs again"):
        check_view(cast.speak[0], cast.chain, cast.by_id(cast.chain.convener(1)).make(body))


def test_a_promise_cannot_report_anothers_vote_or_one_from_its_future(cast: Cast) -> None:
    view = cast.view([0, 1, 2])
    with pytest.raises(ProtocolViolation, match="not its own"):
        checked(cast, promise(cast, 0, 1, (cast.vote(1, view, bytes(32)),), (view,)))
    with pytest.raises(ProtocolViolation, match="impossible"):
        checked(cast, promise(cast, 0, 1, (cast.vote(0, view, bytes(32), attempt=1),), (view,)))


def acceptor(cast: Cast, log: list[tuple[str, bytes]]) -> Acceptor:
    made = Acceptor(cast.speak[0], Jobs(), log)
    made.begin(cast.chain.epoch + 1, cast.chain.head.digest)
    return made


def test_an_acceptor_votes_once_per_attempt_and_never_below_its_promise(cast: Cast) -> None:
    mine = acceptor(cast, [])
    assert mine.may_vote(0)
    mine.cast(0, cast.view([0, 1]), bytes(32), bytes(32))
    assert not mine.may_vote(0)
    mine.promise(2)
    assert not mine.may_vote(1)
    assert mine.may_vote(2)


def test_a_restarted_acceptor_is_bound_by_what_its_log_says(cast: Cast) -> None:
    before = acceptor(cast, [])
    log = [(e.kind, e.data) for e in before.cast(0, cast.view([0, 1]), bytes(32), bytes([5]) * 32)]
    log += [(e.kind, e.data) for e in before.promise(3)]
    after = acceptor(cast, log)
    assert not after.may_vote(2)
    assert after.promised == 3
    assert after.vote is not None
    told = after.promise(4)[0]
    signed = msg.unpack_object(msg.Signed, told.data)
    body = msg.decode_body("promise", signed.body)
    assert body.vote == (after.vote.vote,)


def test_an_abstainer_does_not_vote_after_a_restart_and_a_voter_does_not_abstain(cast: Cast) -> None:
    before = acceptor(cast, [])
    log = [(e.kind, e.data) for e in before.abstain("NaN", leaving=False)]
    assert len(log) == 1
    assert not before.may_vote(0)
    assert not acceptor(cast, log).may_vote(0)
    voter = acceptor(cast, [])
    voter.cast(0, cast.view([0, 1]), bytes(32), bytes(32))
    assert voter.abstain("NaN", leaving=False) == []


def test_what_was_said_in_another_epoch_or_by_another_key_binds_nobody(cast: Cast) -> None:
    other = Acceptor(cast.speak[1], Jobs(), [])
    other.begin(cast.chain.epoch + 1, cast.chain.head.digest)
    log = [(e.kind, e.data) for e in other.promise(3)] + [("promise", b"junk")]
    assert acceptor(cast, log).promised == 0
