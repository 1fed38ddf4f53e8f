"""Pulling a state from donors that are slow, wrong, busy or gone."""

from __future__ import annotations

import pytest

from p2p_diloco.numerics.digest import leaf_hash, merkle_root
from p2p_diloco.proto.catchup import CatchUp
from p2p_diloco.proto.events import Close, Compute, FrameIn, Send
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.wire.messages import GetChunk, GetLeaves, Gone, Leaves

S = 1_000_000_000
CHUNKS = 20
LEAVES = [leaf_hash(c, bytes([c])) for c in range(CHUNKS)]
ROOT = merkle_root(LEAVES)
A, B, C = (bytes([i]) * 32 for i in (1, 2, 3))


class Pull:
    """A catch-up with its jobs answered at once; donors are played by the test."""

    def __init__(self, donors: list[bytes], chunks: int = CHUNKS) -> None:
        self.jobs = Jobs()
        self.now = 0
        self.machine = CatchUp(ROOT, 5, chunks, donors, 15.0, self.jobs)
        self.asked: list[tuple[bytes, object]] = []
        self.closed: list[bytes] = []
        self.take(self.machine.start(0))

    def take(self, effects: list) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.asked.append((effect.peer, effect.message))
            elif isinstance(effect, Close):
                self.closed.append(effect.peer)
            elif isinstance(effect, Compute):
                entry = self.jobs.take(effect.job)
                assert entry is not None
                result = True
                if effect.op == "install_chunk":
                    chunk, data = effect.arguments
                    result = leaf_hash(chunk, data) == LEAVES[chunk]
                self.take(self.machine.on_computed(entry[1], result, "", self.now))

    def requests(self) -> list[tuple[bytes, object]]:
        found, self.asked = self.asked, []
        return found

    def give_leaves(self, donor: bytes, hashes: list[bytes] | None = None) -> None:
        data = b"".join(LEAVES if hashes is None else hashes)
        self.take(self.machine.on_leaves(donor, Leaves(ROOT, 0, CHUNKS, data), self.now))

    def give(self, donor: bytes, chunk: int, data: bytes | None = None) -> None:
        payload = bytes([chunk]) if data is None else data
        self.take(self.machine.on_frame(FrameIn(donor, "state", ROOT, chunk, 0, 0, payload), self.now))

    def serve(self, silent: tuple[bytes, ...] = ()) -> None:
        """Answer chunk requests until there are none that anybody answers."""
        while True:
            answered = False
            for donor, message in self.requests():
                if isinstance(message, GetChunk) and donor not in silent:
                    answered = True
                    self.give(donor, message.chunk)
            if not answered:
                return


def test_chunks_come_from_several_donors_at_once_and_end_installed() -> None:
    pull = Pull([A, B, C])
    pull.give_leaves(pull.requests()[0][0])
    first = pull.requests()
    assert {donor for donor, _ in first} == {A, B, C}
    assert len(first) == 12, "four at a time for each"
    for donor, message in first:
        pull.give(donor, message.chunk)
    pull.serve()
    assert pull.machine.state == "done"
    assert sorted(pull.machine.donors_used) == [A, B, C]


def test_a_donor_that_dies_costs_only_what_it_owed() -> None:
    pull = Pull([A, B])
    pull.give_leaves(pull.requests()[0][0])
    pull.take(pull.machine.lose_donor(A, 0))
    pull.serve()
    assert pull.machine.state == "done"
    assert pull.machine.donors_used == [B]


def test_a_wrong_chunk_bans_its_donor_and_is_fetched_elsewhere() -> None:
    pull = Pull([A, B])
    pull.give_leaves(pull.requests()[0][0])
    donor, message = pull.requests()[0]
    pull.give(donor, message.chunk, b"wrong")
    assert pull.closed == [donor]
    for other, request in list(pull.machine._asked.items()):
        pull.give(request[0], other)
    pull.serve()
    assert pull.machine.state == "done"
    assert donor not in pull.machine.donors_used


def test_leaves_that_do_not_hash_to_the_root_ban_their_donor() -> None:
    pull = Pull([A, B])
    liar = pull.requests()[0][0]
    pull.give_leaves(liar, LEAVES[::-1])
    assert pull.closed == [liar]
    other, message = pull.requests()[0]
    assert isinstance(message, GetLeaves)
    assert other != liar


@pytest.mark.parametrize("wrong", [[*LEAVES[:-1], b"short"], LEAVES + LEAVES, []])
def test_a_leaf_list_of_the_wrong_size_bans_its_donor(wrong: list[bytes]) -> None:
    pull = Pull([A])
    pull.give_leaves(A, wrong)
    assert pull.closed == [A]
    assert pull.machine.state == "failed"
    assert "no donor" in pull.machine.failed


def test_a_silent_donor_is_passed_over_and_given_up_in_the_end() -> None:
    pull = Pull([A, B])
    pull.give_leaves(pull.requests()[0][0])
    for _ in range(20):
        pull.serve(silent=(A,))
        pull.now += 16 * S
        pull.take(pull.machine.on_tick(pull.now))
    assert pull.machine.state == "done"
    assert pull.machine.donors_used == [B]


def test_a_busy_donor_is_asked_again_soon_and_one_without_the_state_is_not() -> None:
    pull = Pull([A])
    pull.give_leaves(A)
    asked = [entry for entry in pull.requests() if isinstance(entry[1], GetChunk)]
    pull.take(pull.machine.on_gone(A, Gone(ROOT, asked[0][1].chunk, "busy"), 0))
    pull.now = 2 * S
    pull.take(pull.machine.on_tick(pull.now))
    assert pull.requests(), "asked again"
    pull.take(pull.machine.on_gone(A, Gone(ROOT, 0, "unknown"), pull.now))
    assert pull.machine.state == "failed"


def test_a_donor_that_turns_up_later_is_used() -> None:
    pull = Pull([A])
    pull.give_leaves(A)
    pull.take(pull.machine.add_donors([A, B], 0))
    assert B in {donor for donor, _ in pull.requests()}


def test_chunks_that_were_not_asked_for_are_dropped() -> None:
    pull = Pull([A])
    pull.give_leaves(A)
    pull.give(B, 0)
    pull.give(A, 250)
    assert pull.machine.bytes_received == 0


def test_an_empty_state_is_installed_without_donors() -> None:
    jobs = Jobs()
    machine = CatchUp(merkle_root([]), 1, 0, [], 15.0, jobs)
    [begin] = machine.start(0)
    entry = jobs.take(begin.job)
    [finish] = machine.on_computed(entry[1], None, "", 0)
    entry = jobs.take(finish.job)
    machine.on_computed(entry[1], None, "", 0)
    assert machine.state == "done"
