"""What a peer keeps in its run folder, written so that kill -9 at any instant leaves it readable.

======================  ==========================================================================
``genesis.bin``         the run's genesis record, written once
``votes.log``           our votes, promises and abstentions; appended and fsynced before they leave
``chain.log``           certificates in order
``incarnation``         how often this identity has started in this run
======================  ==========================================================================

A log record is ``u32 length, u32 crc32, u8 kind, data``; a torn or damaged tail is cut off on opening.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from pathlib import Path
from typing import Final

from p2p_diloco.errors import ProtocolViolation, UserError
from p2p_diloco.wire.messages import Certificate, Genesis, pack_object, unpack_object

_HEAD: Final = struct.Struct("<IIB")
_KINDS: Final = {"vote": 1, "promise": 2, "abstain": 3, "certificate": 4}
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


class RunFolder:
    """The files of one peer in one run. `open_run` must be called before records are appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
        count = int(counter.read_text() or "0") + 1 if counter.exists() else 0
        write_atomically(counter, str(count).encode())
        self._votes = RecordLog(self.path / "votes.log")
        self._chain = RecordLog(self.path / "chain.log")
        return count * 1000  # room for the refutations of one life

    def log(self) -> tuple[tuple[str, bytes], ...]:
        """Our earlier votes, promises and abstentions."""
        return () if self._votes is None else tuple(self._votes.records)

    def certificates(self) -> tuple[Certificate, ...]:
        """The chain on disk, as far as it decodes; the machine checks it again."""
        found: list[Certificate] = []
        for _, data in [] if self._chain is None else self._chain.records:
            certificate = unpack_object(Certificate, data)
            if certificate.epoch == len(found) + 1:
                found.append(certificate)
        return tuple(found)

    def newest_epoch(self) -> int:
        """The newest certified epoch on disk, 0 if none; may be called before `open_run`."""
        file = self.path / "chain.log"
        records, _ = _parse(file.read_bytes()) if file.exists() else ([], 0)
        return max((unpack_object(Certificate, data).epoch for _, data in records), default=0)

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
