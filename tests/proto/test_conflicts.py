"""Pairs of statements that convict a key, and pairs that honest peers make."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from support.statements import Cast

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.proto.acceptor import Acceptor, LogRecord
from p2p_diloco.proto.conflicts import Witness, contradiction
from p2p_diloco.wire import messages as msg

ROOT, OTHER_ROOT = bytes([1]) * 32, bytes([2]) * 32


@pytest.fixture
def cast() -> Cast:
    made = Cast(3)
    made.chain.append(made.certificate([0, 1, 2], [0]))
    return made


def promise(
    cast: Cast, who: int, attempt: int, vote: msg.Signed | None = None, view: msg.Signed | None = None
) -> msg.Signed:
    shown = ((), ()) if vote is None or view is None else ((vote,), (view,))
    return cast.speak[who].make(msg.Promise(cast.chain.epoch + 1, cast.chain.head.digest, attempt, *shown))


def judge(cast: Cast, first: msg.Signed, second: msg.Signed, lowest: int | None = None) -> str:
    """What both orders of the pair say; they must agree on the guilt."""
    voter = None if lowest is None else cast.speak[lowest].me
    found = contradiction(cast.speak[2], first, second, voter)
    assert found == contradiction(cast.speak[2], second, first, voter)
    return found


def test_two_votes_in_one_attempt_convict(cast: Cast) -> None:
    view = cast.view([0, 1, 2])
    mine = cast.vote(0, view, ROOT)
    for other in (cast.vote(0, view, OTHER_ROOT), cast.vote(0, cast.view([0, 1]), ROOT)):
        assert "voted twice in attempt 0 of epoch 2" in judge(cast, mine, other)
        assert judge(cast, mine, other, lowest=0), "the lowest voter too"


def test_two_views_of_one_attempt_convict(cast: Cast) -> None:
    one, two = cast.view([0, 1, 2], author=1), cast.view([0, 1], author=1)
    assert "two views of attempt 0" in judge(cast, one, two)
    assert judge(cast, one, cast.view([0, 1], attempt=3, author=1)) == ""


def test_a_promise_that_hides_a_vote_below_it_convicts(cast: Cast) -> None:
    first, later = cast.view([0, 1, 2]), cast.view([0, 1], attempt=1)
    old, new = cast.vote(0, first, ROOT), cast.vote(0, later, OTHER_ROOT, attempt=1)
    assert "hid its vote in attempt 0" in judge(cast, old, promise(cast, 0, 1))
    assert "hid its vote in attempt 1" in judge(cast, new, promise(cast, 0, 2, old, first))
    assert "hid its vote in attempt 1" in judge(cast, new, promise(cast, 0, 5))


def test_a_vote_and_an_abstention_convict_unless_the_rules_void_the_abstention(cast: Cast) -> None:
    for who in range(3):
        vote, abstention = cast.vote(who, cast.view([0, 1, 2]), ROOT), cast.abstain(who)
        assert "voted and abstained" in judge(cast, vote, abstention)
        assert bool(judge(cast, vote, abstention, lowest=0)) == (who != 0)


def test_what_honest_peers_say_convicts_nobody(cast: Cast) -> None:
    first, later = cast.view([0, 1, 2]), cast.view([0, 1], attempt=1)
    old, new = cast.vote(0, first, ROOT), cast.vote(0, later, OTHER_ROOT, attempt=1)
    again = cast.vote(0, first, ROOT, attempt=1)  # a result that was adopted
    held = msg.Holding(bytes(32), b"\x01")
    body = msg.Promise(2, cast.chain.head.digest, 1, (old,), (first,), (held,), (bytes(32),))
    shown = promise(cast, 0, 1, old, first)
    for pair in (
        (old, shown),
        (old, cast.speak[0].make(body)),
        (shown, cast.speak[0].make(body)),  # promised again after a restart, holding more
        (old, new),
        (old, again),
        (new, shown),
        (new, promise(cast, 0, 2, new, later)),
        (old, promise(cast, 0, 2, new, later)),
        (new, promise(cast, 0, 1)),  # promised, and voted afterwards
        (promise(cast, 0, 1), promise(cast, 0, 2)),
        (promise(cast, 0, 1), cast.abstain(0)),
        (cast.abstain(0), cast.speak[0].make(msg.Abstain(2, cast.chain.head.digest, "leaving", 1))),
        (cast.ready(0), cast.ready(0, trial=1)),
        (cast.ready(0, weight=1), cast.ready(0, weight=2)),
        (old, cast.ready(0)),
    ):
        assert judge(cast, *pair) == ""


def test_the_same_statement_again_is_no_contradiction(cast: Cast) -> None:
    vote = cast.vote(0, cast.view([0, 1, 2]), ROOT)
    assert judge(cast, vote, vote) == ""
    assert judge(cast, vote, dataclasses.replace(vote)) == ""


def test_statements_of_two_authors_two_epochs_or_two_heads_convict_nobody(cast: Cast) -> None:
    view = cast.view([0, 1, 2])
    mine = cast.vote(0, view, ROOT)
    body = msg.decode_body("vote", mine.body)
    assert judge(cast, mine, cast.vote(1, view, OTHER_ROOT)) == ""
    for change in ({"epoch": 3}, {"previous": bytes([9]) * 32}):
        other = cast.speak[0].make(dataclasses.replace(body, state_root=OTHER_ROOT, **change))
        assert judge(cast, mine, other) == ""
        abstention = cast.speak[0].make(
            msg.Abstain(change.get("epoch", 2), change.get("previous", cast.chain.head.digest), "", 0)
        )
        assert judge(cast, mine, abstention) == ""


def test_a_forged_or_malformed_statement_is_a_violation_and_not_a_proof(cast: Cast) -> None:
    view = cast.view([0, 1, 2])
    mine, other = cast.vote(0, view, ROOT), cast.vote(0, view, OTHER_ROOT)
    unsigned = dataclasses.replace(other, signature=bytes(64))
    by_another = dataclasses.replace(cast.vote(1, view, OTHER_ROOT), public_key=mine.public_key)
    broken = dataclasses.replace(other, body=other.body[:-1])
    for bad in (unsigned, by_another, broken, dataclasses.replace(other, kind="view")):
        for pair in ((mine, bad), (bad, mine)):
            with pytest.raises(ProtocolViolation):
                contradiction(cast.speak[2], *pair)


def test_a_promise_that_shows_something_malformed_as_its_vote_hides_the_vote(cast: Cast) -> None:
    view = cast.view([0, 1, 2])
    vote = cast.vote(0, view, ROOT)
    for shown in (dataclasses.replace(vote, body=b"\x00"), cast.ready(0)):
        assert "hid its vote" in judge(cast, vote, promise(cast, 0, 1, shown, view))


def test_a_witness_names_the_earlier_statement_of_the_same_author(cast: Cast) -> None:
    witness = Witness(cast.speak[2])
    view = cast.view([0, 1, 2])
    mine, other = cast.vote(0, view, ROOT), cast.vote(0, view, OTHER_ROOT)
    me, lowest = cast.speak[0].me, cast.chain.voters[0]
    assert witness.hear(cast.speak[1].me, cast.vote(1, view, OTHER_ROOT), lowest) is None
    assert witness.hear(me, mine, lowest) is None
    assert witness.hear(me, mine, lowest) is None, "heard again"
    found = witness.hear(me, other, lowest)
    assert found is not None
    assert found[0] == mine
    assert "voted twice" in found[1]
    witness.turn()
    assert witness.hear(me, other, lowest) is not None, "it may arrive when the epoch has just been decided"
    witness.turn()
    assert witness.hear(me, other, lowest) is None


def test_a_witness_remembers_a_bounded_number_of_statements(cast: Cast) -> None:
    witness = Witness(cast.speak[2])
    me, lowest = cast.speak[0].me, cast.chain.voters[0]
    for attempt in range(1, 300):
        witness.hear(me, promise(cast, 0, attempt), lowest)
    assert len(witness._said[me, "promise"]) <= 64
    for _ in range(300):
        witness.hear(me, cast.ready(0), lowest)
    assert len(witness._said) == 1


def honest_life(cast: Cast, who: int, generator: random.Random) -> list[msg.Signed]:
    """All that a peer says in one epoch, through restarts, as its acceptor and its log allow it."""
    log: list[LogRecord] = []
    said: list[msg.Signed] = []
    head = cast.chain.head.digest

    def born() -> Acceptor:
        acceptor = Acceptor(cast.speak[who], list(log))
        acceptor.begin(cast.chain.epoch + 1, head)
        return acceptor

    mine = born()
    for _ in range(generator.randint(5, 25)):
        attempt = mine.promised + generator.randrange(3)
        entry = None
        match generator.randrange(6):
            case 0 if mine.may_vote(attempt):
                view = cast.view(generator.sample(range(3), 2), attempt=generator.randint(0, attempt))
                entry = mine.cast(attempt, view, bytes(32), bytes([generator.randrange(256)]) * 32)
            case 1 | 2:
                entry = mine.promise(attempt + 1)
            case 3 if generator.random() < 0.3:
                entry = mine.abstain("NaN", leaving=False)
            case 4 if mine.may_convene(attempt):
                members = generator.sample(range(3), generator.randint(1, 3))
                entry = mine.convene(attempt, cast.view(members, attempt, author=who))
            case 5:
                mine = born()
        if entry is not None:
            if generator.random() < 0.1:  # killed before the record was on disk
                mine = born()
                continue
            log.append((entry.kind, entry.data))
            if entry.signed is not None and generator.random() < 0.9:  # or killed before it was sent
                said.append(entry.signed)
    return said


def test_no_honest_life_through_restarts_convicts_itself(cast: Cast) -> None:
    generator = random.Random(4)
    heard = 0
    for _ in range(150):
        said = honest_life(cast, generator.randrange(3), generator)
        heard += len(said)
        for pair in itertools.combinations(said, 2):
            assert judge(cast, *pair) == ""
    assert heard > 600
