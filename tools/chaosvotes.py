"""Audits what peers left on disk: nobody may have voted without writing it down, nor for two results at once.

Reads the run folders of one swarm after its end. The agreement rests on these two rules, and they can be
broken without any digest diverging in that run, so they are looked at by themselves.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from p2p_diloco.identity import peer_id_of, show
from p2p_diloco.wire.messages import Certificate, Signed, Vote, VoteRecord, decode_body, unpack_object

_HEAD = struct.Struct("<IIB")  # as p2p_diloco/disk.py writes it: length, crc32, kind
_VOTE, _CERTIFICATE = 1, 4

Ballot = tuple[str, int, int]  # voter (as logs show it), epoch, attempt


def records(path: Path, kind: int) -> Iterator[bytes]:
    """The data of all whole records of one kind; stops at the first damaged one, as the peer itself would."""
    data = path.read_bytes() if path.exists() else b""
    position = 0
    while position + _HEAD.size <= len(data):
        length, checksum, found = _HEAD.unpack_from(data, position)
        body = data[position + _HEAD.size : position + _HEAD.size + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            return
        if found == kind:
            yield body
        position += _HEAD.size + length


def ballot(signed: Signed) -> tuple[Ballot, Vote] | None:
    """Whose vote this is, in which attempt, and what for; None if it is no vote."""
    body = decode_body(signed.kind, signed.body)
    if not isinstance(body, Vote):
        return None
    return (show(peer_id_of(signed.public_key)), body.epoch, body.attempt), body


def written(folder: Path) -> list[tuple[Ballot, Vote]]:
    """The votes in a peer's vote log, in order."""
    votes = (unpack_object(VoteRecord, data).vote for data in records(folder / "votes.log", _VOTE))
    return [found for vote in votes if (found := ballot(vote)) is not None]


def counted(folder: Path) -> list[tuple[Ballot, Vote]]:
    """All votes in the certificates that a peer keeps."""
    found: list[tuple[Ballot, Vote]] = []
    for data in records(folder / "chain.log", _CERTIFICATE):
        votes = unpack_object(Certificate, data).votes
        found += [entry for vote in votes if (entry := ballot(vote)) is not None]
    return found


def audit(folders: Mapping[str, Path]) -> list[str]:
    """One line for each broken rule; ``folders`` maps the ids of peers, as logs show them, to run folders."""
    lines: list[str] = []
    seen: dict[Ballot, Vote] = {}
    logs = {peer: written(folder) for peer, folder in folders.items()}
    certified = [entry for folder in folders.values() for entry in counted(folder)]
    for key, vote in [*certified, *(entry for log in logs.values() for entry in log)]:
        if seen.setdefault(key, vote) != vote:
            lines.append(f"{key[0]} voted twice in epoch {key[1]} attempt {key[2]}")
    for peer, log in logs.items():
        kept = {key for key, _ in log}
        oldest = min((key[1] for key in kept), default=0)  # older ones may have been cut off as old
        missing = {key for key, _ in certified if key[0] == peer and key[1] >= oldest} - kept
        for _, epoch, attempt in sorted(missing):
            lines.append(f"{peer} voted in epoch {epoch} attempt {attempt}, but its vote log lacks that vote")
    return sorted(set(lines))
