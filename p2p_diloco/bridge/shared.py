"""The memory that a peer process and its trainer ranks share: two anchors, two momenta, one delta.

It is an anonymous file (memfd on Linux, an already unlinked temporary file elsewhere) whose descriptor is
handed to the ranks over a unix socket. No name exists at any time, so nothing can be left behind, not even
after SIGKILL: the kernel frees the pages with the last process that maps them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.bridge.messages import AREAS, Attach
from p2p_diloco.errors import InternalError, ProtocolViolation

PAGE_BYTES = 4096
Flat = NDArray[np.float32]


class StateAreas(Protocol):
    """The fp32 areas of a peer's state, each ``total_values`` long. `SharedState` has them in shared
    memory; the state module's plain buffers fit as well."""

    @property
    def anchor0(self) -> Flat: ...
    @property
    def anchor1(self) -> Flat: ...
    @property
    def momentum0(self) -> Flat: ...
    @property
    def momentum1(self) -> Flat: ...
    @property
    def delta(self) -> Flat: ...


class SharedState:
    """Five fp32 areas of ``total_values`` values in one mapped anonymous file, zero at creation.

    The creator closes it with `close`; views handed out stay valid until they are dropped.
    """

    def __init__(self, fd: int, total_values: int, offsets: tuple[int, ...], length_bytes: int) -> None:
        self.fd = fd
        self.total_values = total_values
        self.offsets = offsets
        self._map = mmap.mmap(fd, length_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._areas: dict[str, Flat] = {
            name: np.frombuffer(self._map, dtype=np.float32, count=total_values, offset=offset)
            for name, offset in zip(AREAS, offsets, strict=True)
        }

    @classmethod
    def create(cls, total_values: int) -> SharedState:
        """Make a new one; OSError if the machine has not that much memory or disk."""
        area_bytes = -(-total_values * 4 // PAGE_BYTES) * PAGE_BYTES
        length_bytes = max(PAGE_BYTES, area_bytes * len(AREAS))
        fd = _anonymous_file()
        try:
            os.ftruncate(fd, length_bytes)
            _seal_size(fd)
            offsets = tuple(index * area_bytes for index in range(len(AREAS)))
            return cls(fd, total_values, offsets, length_bytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int, message: Attach) -> SharedState:
        """Map the file whose descriptor came with ``message``; ProtocolViolation if the two do not fit.

        Owns ``fd`` from here on, also when it raises.
        """
        try:
            length_bytes = os.fstat(fd).st_size
            area_bytes = message.total_values * 4
            if len(message.offsets) != len(AREAS):
                raise ProtocolViolation(f"Attach names {len(message.offsets)} areas instead of {len(AREAS)}")
            for offset in message.offsets:
                if offset % PAGE_BYTES or offset + area_bytes > length_bytes:
                    raise ProtocolViolation("Attach names an area outside the shared memory")
            return cls(fd, message.total_values, message.offsets, length_bytes)
        except BaseException:
            os.close(fd)
            raise

    def attach_message(self) -> Attach:
        """What a rank needs, besides the descriptor, to map the same areas."""
        return Attach(self.total_values, self.offsets)

    @property
    def anchor0(self) -> Flat:
        """Anchor of slot 0, fp32 [total_values]."""
        return self._areas["anchor0"]

    @property
    def anchor1(self) -> Flat:
        """Anchor of slot 1, fp32 [total_values]."""
        return self._areas["anchor1"]

    @property
    def momentum0(self) -> Flat:
        """Outer momentum of slot 0, fp32 [total_values]."""
        return self._areas["momentum0"]

    @property
    def momentum1(self) -> Flat:
        """Outer momentum of slot 1, fp32 [total_values]."""
        return self._areas["momentum1"]

    @property
    def delta(self) -> Flat:
        """Pseudo-gradient of the last round, fp32 [total_values]."""
        return self._areas["delta"]

    def anchor(self, slot: int) -> Flat:
        """Anchor of ``slot`` (0 or 1), fp32 [total_values]."""
        return anchor_of(self, slot)

    def momentum(self, slot: int) -> Flat:
        """Outer momentum of ``slot`` (0 or 1), fp32 [total_values]."""
        if slot not in (0, 1):
            raise InternalError(f"slot {slot} does not exist")
        return self.momentum1 if slot else self.momentum0

    def close(self) -> None:
        """Close the descriptor and drop the own views; the pages live while any view of them does."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._areas.clear()


def anchor_of(state: StateAreas, slot: int) -> Flat:
    """The anchor of ``slot`` in any kind of state; InternalError for another slot than 0 and 1."""
    if slot not in (0, 1):
        raise InternalError(f"slot {slot} does not exist")
    return state.anchor1 if slot else state.anchor0


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("p2p-diloco-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _seal_size(fd: int) -> None:
    # A file that cannot shrink cannot make another process die of SIGBUS in its own mapping.
    if sys.platform == "linux":
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
