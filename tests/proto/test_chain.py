"""Certificates: who may vote, which quorums decide, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from support.statements import Cast, identities

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.proto.chain import quorum_reached, rank


@pytest.mark.parametrize("rule", ["majority", "two_thirds"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_any_two_quorums_share_a_voter_whatever_abstentions_each_of_them_counted(
    count: int, rule: str
) -> None:
    """Exhaustive: every pair of abstention sets and every pair of vote sets of voters that did not abstain.

    An abstainer never votes, except the lowest voter once all have abstained.
    """
    voters = [identity.peer_id for identity in identities(count)]
    subsets = [set(s) for size in range(count + 1) for s in itertools.combinations(voters, size)]

    def may_vote(abstained: set) -> set:
        return {voters[0]} if abstained == set(voters) else set(voters) - abstained

    for first_gone, second_gone in itertools.product(subsets, repeat=2):
        truly_gone = first_gone | second_gone
        for first in subsets:
            if not quorum_reached(voters, first_gone, first, rule) or not first <= may_vote(truly_gone):
                continue
            for second in subsets:
                if second <= may_vote(truly_gone) and quorum_reached(voters, second_gone, second, rule):
                    assert first & second


def test_an_exact_half_decides_only_with_the_lowest_voter() -> None:
    low, high = (identity.peer_id for identity in identities(2))
    assert quorum_reached([low, high], [], [low])
    assert not quorum_reached([low, high], [], [high])
    assert quorum_reached([low, high], [low], [high])
    assert not quorum_reached([], [], [low])


def test_four_of_twelve_lost_at_once_do_not_stop_a_majority_run() -> None:
    voters = [identity.peer_id for identity in identities(12)]
    assert quorum_reached(voters, [], voters[4:])
    assert not quorum_reached(voters, [], voters[4:], "two_thirds")


def test_the_founder_decides_epoch_one_and_its_contributors_decide_epoch_two() -> None:
    cast = Cast(3)
    cast.chain.append(cast.certificate([0, 1, 2], [0]))
    assert cast.chain.voters == tuple(s.me for s in cast.speak)
    with pytest.raises(ProtocolViolation, match="quorum"):
        cast.chain.append(cast.certificate([0, 1, 2], [1]))
    cast.chain.append(cast.certificate([0, 1, 2], [1, 2]))
    assert cast.chain.epoch == 2


def test_a_newcomer_is_a_voter_only_after_two_certificates() -> None:
    cast = Cast(3)
    cast.chain.append(cast.certificate([0, 1], [0]))
    link = cast.chain.append(cast.certificate([0, 1, 2], [0, 1]))
    assert cast.speak[2].me in link.contributors
    assert cast.speak[2].me not in link.voters
    link = cast.chain.append(cast.certificate([0, 1, 2], [0, 1]))
    assert cast.speak[2].me in link.voters


def test_an_abstention_lowers_the_quorum_and_must_be_shown() -> None:
    cast = Cast(2)
    cast.chain.append(cast.certificate([0, 1], [0]))
    with pytest.raises(ProtocolViolation, match="quorum"):
        cast.chain.check(cast.certificate([1], [1]))
    cast.chain.append(cast.certificate([1], [1], abstained=(0,)))


def test_damaged_certificates_are_refused_with_a_reason() -> None:
    cast = Cast(3)
    cast.chain.append(cast.certificate([0, 1, 2], [0]))
    good = cast.certificate([0, 1, 2], [0, 1])
    other_view = cast.view([0, 1])
    wrong = {
        "does not follow": dataclasses.replace(good, epoch=3),
        "follow": dataclasses.replace(good, previous=bytes(32)),
        "no view": dataclasses.replace(good, view=()),
        "another result": dataclasses.replace(good, state_root=bytes([9]) * 32),
        "repeats": dataclasses.replace(good, votes=(good.votes[0], good.votes[0])),
        "no quorum": dataclasses.replace(good, votes=good.votes[:1]),
        "for another": dataclasses.replace(good, view=(other_view,)),
        "no VOTE": dataclasses.replace(good, votes=(cast.ready(0), cast.ready(1))),
        "wrong signature": dataclasses.replace(
            good, votes=(good.votes[0], dataclasses.replace(good.votes[1], signature=bytes(64)))
        ),
    }
    for words, certificate in wrong.items():
        with pytest.raises(ProtocolViolation, match=words):
            cast.chain.check(certificate)
    assert cast.chain.epoch == 1
    cast.chain.append(good)


def test_a_view_with_a_member_twice_or_on_another_state_is_refused() -> None:
    cast = Cast(2)
    with pytest.raises(ProtocolViolation, match="twice"):
        cast.chain.check_run_view(cast.view([0, 0]))
    with pytest.raises(ProtocolViolation, match="without members"):
        cast.chain.check_run_view(cast.view([]))
    before = cast.ready(1)
    cast.chain.append(cast.certificate([0, 1], [0]))
    with pytest.raises(ProtocolViolation, match="not on our head"):
        cast.chain.check_ready(before)


def test_statements_of_one_run_or_kind_mean_nothing_in_another() -> None:
    one, two = Cast(1), Cast(2)
    signed = one.ready(0)
    with pytest.raises(ProtocolViolation, match="signature"):
        two.speak[0].check(signed)
    with pytest.raises(ProtocolViolation):
        one.speak[0].check(dataclasses.replace(signed, kind="vote"))


def test_the_rank_of_conveners_is_a_permutation_that_changes_with_the_epoch() -> None:
    peers = [identity.peer_id for identity in identities(6)]
    orders = [tuple(rank(epoch, bytes(32), peers)) for epoch in range(20)]
    assert all(sorted(order) == peers for order in orders)
    assert len(set(orders)) > 10
    assert rank(1, bytes(32), peers[::-1]) == rank(1, bytes(32), peers)
