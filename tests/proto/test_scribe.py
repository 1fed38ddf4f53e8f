"""Records go to the disk in one order; a disk that refuses makes a silent voter and no liar."""

from __future__ import annotations

import pytest
from support.statements import Cast

from p2p_diloco.proto.events import Effect, KeepRound, Notice, Persist
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.scribe import _RETRY_NS, Entry, Scribe

FULL = "no space left on device"
SIGNED = Cast(1).ready(0)


def entry(kind: str, epoch: int, data: bytes = b"x") -> Entry:
    return Entry(kind, epoch, data, SIGNED if kind in ("vote", "promise") else None)


class Disk:
    """A scribe and the writes that it asked for and were not answered yet."""

    def __init__(self) -> None:
        self.jobs = Jobs()
        self.scribe = Scribe(self.jobs)
        self.open: list[tuple[int, str]] = []  # record and kind, in the order of their effects
        self.written: list[Entry] = []
        self.notices: list[Notice] = []

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Notice):
                self.notices.append(effect)
            else:
                assert isinstance(effect, Persist | KeepRound)
                kind = "round" if isinstance(effect, KeepRound) else effect.kind
                self.open.append((effect.record, kind))

    def put(self, *entries: Entry) -> None:
        for one in entries:
            self.take(self.scribe.put(one))

    def answer(self, error: str = "", now_ns: int = 0) -> Entry:
        """The disk answers the oldest open write."""
        found = self.jobs.take(self.open.pop(0)[0])
        assert found is not None
        assert found[0] == "persist"
        [one] = found[1]
        written, effects = self.scribe.on_answer(one, error, now_ns)
        assert not (written and error)
        if written:
            self.written.append(one)
        self.take(effects)
        return one

    def tick(self, now_ns: int) -> None:
        self.take(self.scribe.tick(now_ns))

    def settle(self, now_ns: int) -> None:
        """From now on the disk takes everything."""
        self.tick(now_ns)
        while self.open:
            self.answer(now_ns=now_ns)
            self.tick(now_ns)

    def asked(self) -> list[str]:
        return [kind for _, kind in self.open]


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_records_are_written_one_at_a_time_and_in_their_order(disk: Disk) -> None:
    entries = [entry("certificate", 1), entry("promise", 2), entry("vote", 2)]
    disk.put(*entries)
    for kind in ("certificate", "promise", "vote"):
        assert disk.asked() == [kind]
        disk.answer()
    assert disk.written == entries
    assert disk.notices == []
    assert not disk.scribe.degraded
    assert disk.scribe.waiting() == 0


def test_a_round_is_kept_with_its_payloads(disk: Disk) -> None:
    [effect] = disk.scribe.put(Entry("round", 3, bytes(32), None, (b"a", b"b")))
    assert isinstance(effect, KeepRound)
    assert (effect.epoch, effect.state_root, effect.payloads) == (3, bytes(32), (b"a", b"b"))


def test_a_refused_record_degrades_the_peer_and_says_so_once(disk: Disk) -> None:
    vote = entry("vote", 2)
    disk.put(vote)
    disk.answer(FULL)
    assert disk.scribe.degraded
    assert [n.level for n in disk.notices] == ["error"]
    assert "DEGRADED_DISK: cannot write the vote of epoch 2" in disk.notices[0].text
    assert FULL in disk.notices[0].text
    disk.tick(_RETRY_NS)
    disk.answer(FULL, _RETRY_NS)
    assert len(disk.notices) == 1
    assert disk.scribe.waiting() == 1


def test_a_degraded_peer_tries_again_after_a_while_and_not_before(disk: Disk) -> None:
    disk.put(entry("vote", 2))
    disk.answer(FULL, now_ns=100)
    disk.tick(99 + _RETRY_NS)
    assert disk.asked() == []
    disk.tick(100 + _RETRY_NS)
    assert disk.asked() == ["vote"]
    disk.tick(100 + 3 * _RETRY_NS)
    assert disk.asked() == ["vote"], "one try at a time"


def test_what_comes_while_the_disk_refuses_waits_and_is_written_in_order(disk: Disk) -> None:
    entries = [entry("vote", 2), entry("promise", 2), Entry("round", 2, bytes(32)), entry("vote", 2, b"y")]
    disk.put(entries[0])
    disk.answer(FULL)
    disk.put(*entries[1:])
    assert disk.asked() == []
    assert disk.scribe.waiting() == 4
    disk.tick(_RETRY_NS)
    for _ in entries:
        assert len(disk.open) == 1, "one after the other"
        disk.answer(now_ns=_RETRY_NS)
    assert disk.written == entries
    assert not disk.scribe.degraded
    assert [n.level for n in disk.notices] == ["error", "info"]
    disk.put(entry("promise", 2, b"z"))
    assert disk.asked() == ["promise"]


def test_a_disk_that_refuses_in_the_middle_goes_on_there(disk: Disk) -> None:
    entries = [entry("certificate", epoch, bytes([epoch])) for epoch in range(1, 5)]
    disk.put(entries[0])
    disk.answer(FULL)
    disk.put(*entries[1:])
    disk.tick(_RETRY_NS)
    disk.answer(now_ns=_RETRY_NS)
    disk.answer(FULL, _RETRY_NS)
    assert disk.scribe.degraded
    assert disk.scribe.waiting() == 3
    disk.tick(2 * _RETRY_NS)
    for _ in range(3):
        disk.answer(now_ns=2 * _RETRY_NS)
    assert disk.written == entries


def test_of_a_decided_epoch_only_the_certificates_are_written_late_and_without_gaps(disk: Disk) -> None:
    kept = [entry("certificate", 2, b"c2"), entry("certificate", 3, b"c3"), entry("promise", 4)]
    disk.put(entry("vote", 2))
    disk.answer(FULL)
    disk.put(entry("promise", 2), Entry("round", 2, bytes(32)), kept[0])
    disk.scribe.begin(3)
    disk.put(entry("vote", 3), entry("convened", 3), kept[1])
    disk.scribe.begin(4)
    disk.put(kept[2])
    assert disk.scribe.waiting() == 3
    disk.tick(_RETRY_NS)
    while disk.open:
        disk.answer(now_ns=_RETRY_NS)
    assert disk.written == kept
    assert not disk.scribe.degraded


def test_when_nothing_waits_any_more_a_record_that_binds_to_nothing_tries_the_disk(disk: Disk) -> None:
    disk.put(entry("vote", 2))
    disk.answer(FULL)
    disk.scribe.begin(3)
    assert disk.scribe.waiting() == 0
    assert disk.scribe.degraded, "nobody knows yet that the disk works again"
    disk.tick(_RETRY_NS)
    assert disk.asked() == ["probe"]
    disk.answer(FULL, _RETRY_NS)
    assert disk.scribe.degraded
    disk.tick(2 * _RETRY_NS)
    assert disk.asked() == ["probe"]
    disk.answer(now_ns=2 * _RETRY_NS)
    assert not disk.scribe.degraded
    assert [n.level for n in disk.notices] == ["error", "info"]
    assert disk.scribe.waiting() == 0


def test_a_vote_that_waited_when_its_epoch_was_decided_is_not_tried_again_by_its_old_answer(
    disk: Disk,
) -> None:
    disk.put(entry("vote", 2))
    disk.answer(FULL)
    disk.tick(_RETRY_NS)
    assert disk.asked() == ["vote"]
    disk.scribe.begin(3)
    certificate = entry("certificate", 2)
    disk.put(certificate)
    disk.answer(now_ns=_RETRY_NS)  # the vote was written after all
    assert disk.asked() == ["certificate"]
    disk.answer(now_ns=_RETRY_NS)
    assert not disk.scribe.degraded


def test_a_vote_whose_epoch_was_decided_while_it_was_being_written_is_not_written_again(disk: Disk) -> None:
    disk.put(entry("vote", 2))
    disk.scribe.begin(3)
    disk.answer(FULL)
    assert disk.scribe.waiting() == 0


def test_the_time_that_we_were_stopped_does_not_count_as_waiting(disk: Disk) -> None:
    disk.put(entry("vote", 2))
    disk.answer(FULL)
    disk.scribe.slept(_RETRY_NS)
    disk.tick(_RETRY_NS)
    assert disk.asked() == []
    disk.tick(2 * _RETRY_NS)
    assert disk.asked() == ["vote"]


def test_writes_under_way_that_are_all_refused_keep_their_order(disk: Disk) -> None:
    entries = [entry("vote", 2), entry("promise", 2), entry("vote", 2, b"later")]
    disk.put(*entries[:2])
    disk.answer(FULL)
    disk.put(entries[2])
    while disk.open:
        disk.answer(FULL)
    disk.settle(_RETRY_NS)
    assert disk.written == entries


def test_a_record_under_way_behind_a_refused_one_counts_as_written_only_after_it(disk: Disk) -> None:
    """Or a promise that shows a vote is said while the vote is not on disk, and a kill makes a liar of us;
    or a certificate lies before the one that it follows."""
    entries = [entry("vote", 2), entry("promise", 2)]
    disk.put(*entries)
    disk.answer(FULL)
    disk.settle(_RETRY_NS)
    assert disk.written == entries


def test_a_record_is_not_tried_twice_at_once(disk: Disk) -> None:
    disk.put(entry("vote", 2), entry("promise", 2))
    disk.answer(FULL)
    disk.tick(_RETRY_NS)
    if "promise" in disk.asked():
        disk.answer(now_ns=_RETRY_NS)
    assert disk.asked().count("vote") == 1
