"""What a peer keeps in its run folder, written so that kill -9 at any instant leaves it readable.

======================  ==========================================================================
``genesis.bin``         the run's genesis record, written once
``votes.log``           our votes, promises, abstentions and convened attempts; fsynced before they leave
``chain.log``           certificates
``rounds/``             payloads of the newest finished rounds: a state is its checkpoint and these
``incarnation``         how often this identity has started in this run
======================  ==========================================================================

A log record is ``u32 length, u32 crc32, u8 kind, data``; a torn or damaged tail is cut off on opening.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from p2p_diloco.errors import ProtocolViolation, UserError
from p2p_diloco.wire.messages import Certificate, Genesis, pack_object, unpack_object

_HEAD: Final = struct.Struct("<IIB")
_ROUND_HEAD: Final = struct.Struct("<8sQ32sI")
_ROUND_MAGIC: Final = b"p2pround"
_SERVED_ROUNDS: Final = 3  # of the newest epochs: what others may still pull (as proto/rounds keeps)
_KINDS: Final = {"vote": 1, "promise": 2, "abstain": 3, "certificate": 4, "convened": 5, "probe": 6}
_NAMES: Final = {number: name for name, number in _KINDS.items()}
_MAX_RECORD: Final = 2 << 20
_COMPACT_BYTES: Final = 4 << 20  # a vote log longer than this is cut to its newest part (guess)

logger = logging.getLogger(__name__)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data``: temporary name, fsync, rename, fsync of the folder."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    fsync_folder(path.parent)


def fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RecordLog:
    """An append-only file of checked records. ``records`` holds what was there on opening."""

    def __init__(self, path: Path) -> None:
        self._path = path
        data = path.read_bytes() if path.exists() else b""
        self.records, good = _parse(data)
        self.damaged = _is_whole(data[good:])
        if good < len(data):
            logger.warning("%s: dropped %d bytes of an unfinished record", path, len(data) - good)
        self._file = open(path, "ab")  # noqa: SIM115 - kept open for the life of the peer
        if good < len(data):
            self._file.truncate(good)
        fsync_folder(path.parent)

    def append(self, kind: str, data: bytes) -> None:
        """Write and fsync one record; raises OSError if the disk refuses, leaving the file as it was."""
        start = self._file.seek(0, os.SEEK_END)
        try:
            self._file.write(_HEAD.pack(len(data), zlib.crc32(data), _KINDS[kind]) + data)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), start)
            raise

    def size_bytes(self) -> int:
        return self._file.seek(0, os.SEEK_END)

    def keep_newest(self, count: int) -> None:
        """Cut the log to its newest ``count`` records, by way of a second file."""
        records, _ = _parse(self._path.read_bytes())
        body = b"".join(
            _HEAD.pack(len(data), zlib.crc32(data), _KINDS[kind]) + data for kind, data in records[-count:]
        )
        write_atomically(self._path, body)
        self._file.close()
        self._file = open(self._path, "ab")  # noqa: SIM115

    def close(self) -> None:
        self._file.close()


def _parse(data: bytes) -> tuple[list[tuple[str, bytes]], int]:
    """All whole, undamaged records from the start, and where they end."""
    records: list[tuple[str, bytes]] = []
    position = 0
    while position + _HEAD.size <= len(data):
        length, checksum, kind = _HEAD.unpack_from(data, position)
        body = data[position + _HEAD.size : position + _HEAD.size + length]
        if length > _MAX_RECORD or len(body) < length or kind not in _NAMES or zlib.crc32(body) != checksum:
            break
        records.append((_NAMES[kind], body))
        position += _HEAD.size + length
    return records, position


def _is_whole(rest: bytes) -> bool:
    """True if what follows the good records is no torn tail: the bytes are there, but they are not what was
    written. Records after that point may be lost."""
    if len(rest) < _HEAD.size:
        return False
    length, _, _ = _HEAD.unpack_from(rest)
    return bool(len(rest) >= _HEAD.size + length)


class RunFolder:
    """The files of one peer in one run. `open_run` must be called before records are appended.
    ``keep_rounds``: rounds this many epochs behind the newest are deleted even if no checkpoint is newer."""

    def __init__(self, path: Path, keep_rounds: int = 32) -> None:
        self.path = path
        self._keep_rounds = keep_rounds
        self.forgot = False  # an earlier life's votes are lost
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot use {path} as run folder: {error.strerror}") from None
        self._votes: RecordLog | None = None
        self._chain: RecordLog | None = None

    def genesis(self) -> Genesis | None:
        """The genesis record of an earlier start here, if there is one and it is undamaged."""
        file = self.path / "genesis.bin"
        if not file.exists():
            return None
        try:
            return unpack_object(Genesis, file.read_bytes())
        except ProtocolViolation as error:
            raise UserError(f"{file} is damaged: {error}") from None

    def open_run(self, genesis: Genesis) -> int:
        """Bind the folder to a run and return this start's incarnation. UserError if it holds another."""
        earlier = self.genesis()
        if earlier is not None and earlier.run_id() != genesis.run_id():
            raise UserError(f"{self.path} belongs to another run; use another --run-dir")
        if earlier is None:
            write_atomically(self.path / "genesis.bin", pack_object(genesis))
        counter = self.path / "incarnation"
        votes = self.path / "votes.log"
        lost = counter.exists() and not votes.exists()
        count = int(counter.read_text() or "0") + 1 if counter.exists() else 0
        write_atomically(counter, str(count).encode())
        self._votes = RecordLog(votes)
        self.forgot = lost or self._votes.damaged
        if self.forgot:
            logger.error("%s: the vote log is lost or damaged; not voting until it cannot matter", votes)
        self._chain = RecordLog(self.path / "chain.log")
        return count * 1000  # room for the refutations of one life

    def log(self) -> tuple[tuple[str, bytes], ...]:
        """Our earlier votes, promises, abstentions and convened attempts."""
        records = () if self._votes is None else tuple(self._votes.records)
        return tuple(record for record in records if record[0] != "probe")

    def certificates(self) -> tuple[Certificate, ...]:
        """The chain on disk without gaps, as far as it decodes; the machine checks it again. May be called
        before `open_run`."""
        file = self.path / "chain.log"
        records, _ = _parse(file.read_bytes()) if file.exists() else ([], 0)
        found: dict[int, Certificate] = {}
        for _, data in records:
            certificate = unpack_object(Certificate, data)
            found.setdefault(certificate.epoch, certificate)
        whole = next(epoch for epoch in range(1, len(found) + 2) if epoch not in found)
        return tuple(found[epoch] for epoch in range(1, whole))

    def newest_epoch(self) -> int:
        """The newest certified epoch on disk, 0 if none; may be called before `open_run`."""
        return len(self.certificates())

    # --- rounds ---

    def keep_round(self, epoch: int, state_root: bytes, payloads: Sequence[bytes]) -> None:
        """Write and fsync the payloads of a finished round; raises OSError, leaving nothing behind."""
        folder = self.path / "rounds"
        folder.mkdir(exist_ok=True)
        final = folder / f"epoch-{epoch:08d}-{state_root.hex()[:16]}.round"
        temporary = final.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as file:
                file.write(_ROUND_HEAD.pack(_ROUND_MAGIC, epoch, state_root, len(payloads)))
                for payload in payloads:
                    file.write(len(payload).to_bytes(4, "little"))
                    file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, final)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        fsync_folder(folder)
        self._drop_rounds(epoch)

    def _drop_rounds(self, newest: int) -> None:
        """Delete rounds that nobody will ask for: a newer checkpoint holds them, or there are too many."""
        checkpoints = [_epoch_in(path) for path in (self.path / "checkpoints").glob("epoch-*")]
        settled = max(checkpoints, default=-1)
        for path in (self.path / "rounds").glob("epoch-*.round"):
            behind = newest - _epoch_in(path)
            if behind >= self._keep_rounds or (behind >= _SERVED_ROUNDS and _epoch_in(path) <= settled):
                path.unlink(missing_ok=True)

    def rounds(self, epoch: int) -> list[tuple[bytes, tuple[bytes, ...]]]:
        """State root and payloads of the rounds of an epoch that are on disk; damaged files are left out."""
        folder = self.path / "rounds"
        found = [_read_round(path) for path in sorted(folder.glob(f"epoch-{epoch:08d}-*.round"))]
        return [(root, payloads) for held, root, payloads in filter(None, found) if held == epoch]

    def append(self, kind: str, data: bytes) -> None:
        """Write one record to the log that it belongs to; raises OSError."""
        if self._votes is None or self._chain is None:
            raise OSError("the run folder is not open")
        if kind == "certificate":
            self._chain.append(kind, data)
            return
        self._votes.append(kind, data)
        if self._votes.size_bytes() > _COMPACT_BYTES:
            self._votes.keep_newest(64)

    def close(self) -> None:
        for log in (self._votes, self._chain):
            if log is not None:
                log.close()
        self._votes = self._chain = None


def _epoch_in(path: Path) -> int:
    digits = path.name.split("-")[1]
    return int(digits) if digits.isdigit() else 0


def _read_round(path: Path) -> tuple[int, bytes, tuple[bytes, ...]] | None:
    """Epoch, state root and payloads of a round file; None if it is not whole."""
    data = path.read_bytes()
    if len(data) < _ROUND_HEAD.size:
        return None
    magic, epoch, root, count = _ROUND_HEAD.unpack_from(data)
    payloads: list[bytes] = []
    position = _ROUND_HEAD.size
    while len(payloads) < count and position + 4 <= len(data):
        length = int.from_bytes(data[position : position + 4], "little")
        payloads.append(data[position + 4 : position + 4 + length])
        position += 4 + length
    if magic != _ROUND_MAGIC or len(payloads) != count or position != len(data):
        logger.warning("%s is damaged: not used", path)
        return None
    return epoch, root, tuple(payloads)
