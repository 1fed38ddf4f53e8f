"""What a VIEW may say: by whom, on which promises, and when it is forced to adopt."""

from __future__ import annotations

import dataclasses

import pytest
from support.statements import Cast

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.proto.acceptor import Acceptor
from p2p_diloco.proto.convene import check_promise, check_view, forced, make_view
from p2p_diloco.proto.plans import Trip, bits_of
from p2p_diloco.proto.scribe import Entry
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
    ring = check_view(cast.speak[0], cast.chain, good).run_view.plan
    assert [p for p, _ in ring.members] == [s.me for s in cast.speak]
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
    assert view.run_view.signed == later
    assert view.run_view.plan.order == (cast.speak[0].me, cast.speak[1].me)
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


def written(*entries: Entry | None) -> list[tuple[str, bytes]]:
    """The log after these entries."""
    return [(entry.kind, entry.data) for entry in entries if entry is not None]


def acceptor(cast: Cast, log: list[tuple[str, bytes]]) -> Acceptor:
    made = Acceptor(cast.speak[0], log)
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
    log = written(before.cast(0, cast.view([0, 1]), bytes(32), bytes([5]) * 32), before.promise(3))
    assert len(log) == 2
    after = acceptor(cast, log)
    assert not after.may_vote(2)
    assert after.promised == 3
    assert after.vote is not None
    told = after.promise(4)
    assert told is not None
    assert told.signed == msg.unpack_object(msg.Signed, told.data), "what is written is what is said"
    body = msg.decode_body("promise", told.signed.body)
    assert isinstance(body, msg.Promise)
    assert body.vote == (after.vote.vote,)


def test_an_abstainer_does_not_vote_after_a_restart_and_a_voter_does_not_abstain(cast: Cast) -> None:
    before = acceptor(cast, [])
    log = written(before.abstain("NaN", leaving=False))
    assert len(log) == 1
    assert not before.may_vote(0)
    assert not acceptor(cast, log).may_vote(0)
    voter = acceptor(cast, [])
    voter.cast(0, cast.view([0, 1]), bytes(32), bytes(32))
    assert voter.abstain("NaN", leaving=False) is None


def test_what_was_said_in_another_epoch_or_by_another_key_binds_nobody(cast: Cast) -> None:
    other = Acceptor(cast.speak[1], [])
    other.begin(cast.chain.epoch + 1, cast.chain.head.digest)
    log = [*written(other.promise(3)), ("promise", b"junk")]
    assert len(log) == 2
    assert acceptor(cast, log).promised == 0


def test_a_restarted_acceptor_makes_no_second_view_of_an_attempt(cast: Cast) -> None:
    before = acceptor(cast, [])
    assert before.may_convene(0)
    entry = before.convene(0, cast.view([0, 1]))
    assert not before.may_convene(0)
    after = acceptor(cast, written(entry))
    assert not after.may_convene(0)
    assert after.may_convene(1)
    assert after.may_vote(0), "to convene is not to vote"


def test_an_acceptor_that_lost_its_log_says_nothing_in_that_epoch_and_speaks_in_the_next(cast: Cast) -> None:
    mute = Acceptor(cast.speak[0], [], silent_through=cast.chain.epoch + 1)
    mute.begin(cast.chain.epoch + 1, cast.chain.head.digest)
    assert not mute.may_vote(0)
    assert not mute.may_convene(0)
    assert mute.promise(1) is None
    assert mute.promised == 1, "it keeps to what it does not say"
    assert mute.abstain("NaN", leaving=False) is None
    mute.begin(cast.chain.epoch + 2, bytes(32))
    assert mute.may_vote(0)


def test_what_was_said_in_the_next_epoch_is_remembered_until_it_comes(cast: Cast) -> None:
    ahead = Acceptor(cast.speak[0], [])
    ahead.begin(cast.chain.epoch + 2, bytes([8]) * 32)
    log = written(ahead.promise(4), ahead.convene(5, cast.view([0])))
    mine = acceptor(cast, log)
    assert (mine.promised, mine.convened) == (0, -1)
    mine.begin(cast.chain.epoch + 2, bytes([8]) * 32)
    assert (mine.promised, mine.convened) == (4, 5)


def reusing(cast: Cast, members: list[int], chunks: list[int], promises: dict) -> msg.View:
    """The VIEW of attempt 1 that takes ``chunks`` over from a ring of all three in attempt 0."""
    first = cast.plan([0, 1, 2])
    reuse = (msg.Reuse(0, first.readies, bits_of(chunks)),)
    return make_view(cast.chain, 1, tuple(cast.ready(m) for m in members), promises, (), reuse)


def holding(cast: Cast, who: int, chunks: list[int]) -> msg.Signed:
    held = (msg.Holding(cast.plan([0, 1, 2]).name, bits_of(chunks)),)
    body = msg.Promise(cast.chain.epoch + 1, cast.chain.head.digest, 1, (), (), held)
    return cast.speak[who].make(body)


def test_reused_chunks_keep_their_own_plan_and_travel_to_those_who_lack_them(cast: Cast) -> None:
    promises = checked(cast, holding(cast, 0, [2, 5]), holding(cast, 1, [2]))
    signed = cast.by_id(cast.chain.convener(1)).make(reusing(cast, [0, 1], [2, 5], promises))
    view = check_view(cast.speak[2], cast.chain, signed)
    old = cast.plan([0, 1, 2])
    assert view.trips == {2: Trip(old, 0, 0), 5: Trip(old, 0, 1)}
    assert view.run_view.plan_of(5) == old
    assert view.run_view.plan_of(0).order == (cast.speak[0].me, cast.speak[1].me)


def test_a_view_that_reuses_what_nobody_in_its_ring_holds_is_refused(cast: Cast) -> None:
    promises = checked(cast, promise(cast, 0, 1), promise(cast, 1, 1), holding(cast, 2, [5]))
    signed = cast.by_id(cast.chain.convener(1)).make(reusing(cast, [0, 1], [5], promises))
    with pytest.raises(ProtocolViolation, match="reuses chunk 5, which no member"):
        check_view(cast.speak[0], cast.chain, signed)


def test_a_view_that_reuses_a_chunk_twice_or_from_its_own_attempt_is_refused(cast: Cast) -> None:
    promises = checked(cast, holding(cast, 0, [5]), holding(cast, 1, [5]))
    good = reusing(cast, [0, 1], [5], promises)
    for reuse in (good.reuse * 2, (dataclasses.replace(good.reuse[0], attempt=1),)):
        signed = cast.by_id(cast.chain.convener(1)).make(dataclasses.replace(good, reuse=reuse))
        with pytest.raises(ProtocolViolation, match="reuses a chunk twice, or one of a later"):
            check_view(cast.speak[0], cast.chain, signed)


def test_a_newcomers_promise_shows_what_it_holds_but_is_no_vote_for_the_attempt(cast: Cast) -> None:
    cast.chain.append(cast.certificate([0, 1], [0, 1]))  # member 2 votes no more
    promises = checked(cast, promise(cast, 0, 1), holding(cast, 2, [5]))
    view = reusing(cast, [0, 2], [5], promises)
    assert len(view.promises) == 2
    alone = dataclasses.replace(view, promises=(promises[cast.speak[2].me].signed,))
    with pytest.raises(ProtocolViolation, match="no quorum of promises"):
        check_view(cast.speak[0], cast.chain, cast.by_id(cast.chain.convener(1)).make(alone))
    good = check_view(cast.speak[0], cast.chain, cast.by_id(cast.chain.convener(1)).make(view))
    assert good.trips[5].start == 1
