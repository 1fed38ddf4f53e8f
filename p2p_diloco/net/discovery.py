"""Where peers may be: signed records behind a small interface, and the in-memory backend.

Discovery gives hints only. Membership and verdicts never rest on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import Identity, PeerId, peer_id_of, verify
from p2p_diloco.wire.addresses import is_dialable
from p2p_diloco.wire.fields import blob, choice, integer, many, text, text_spec
from p2p_diloco.wire.messages import pack_object, unpack_object

RECORD_BYTES: Final = 1024  # DESIGN 5
RECORD_TTL_S: Final = 120.0  # how long a record is worth following; renewed at a third of it (guess)
_DOMAIN: Final = "peer-record"


@dataclass(frozen=True, slots=True)
class _Body:
    run_id: bytes = blob(32)
    name: str = text(64)
    addresses: tuple[str, ...] = many(text_spec(128), 8)
    sequence: int = integer()
    reachability: str = choice("direct", "unknown", "outbound")


@dataclass(frozen=True, slots=True)
class _Envelope:
    public_key: bytes = blob(32)
    body: bytes = blob(0, RECORD_BYTES)
    signature: bytes = blob(64)


@dataclass(frozen=True)
class PeerRecord:
    """A peer about itself: which run it is in and where it listens. A higher sequence replaces a lower."""

    peer_id: PeerId
    public_key: bytes
    run_id: bytes
    name: str
    addresses: tuple[str, ...]
    sequence: int
    reachability: str


@dataclass(frozen=True)
class RunEntry:
    """A run that discovery knows of, and how many peers say that they are in it."""

    run_id: bytes
    name: str
    peers: int


def make_record(
    identity: Identity,
    run_id: bytes,
    name: str,
    addresses: tuple[str, ...],
    sequence: int,
    reachability: str,
) -> bytes:
    """Our signed record, at most `RECORD_BYTES`; addresses that nobody can dial are left out."""
    dialable = [address for address in addresses if is_dialable(address)][:8]
    while True:
        body = pack_object(_Body(run_id, name[:64], tuple(dialable), sequence, reachability))
        signature = identity.sign(_DOMAIN, body)
        data = pack_object(_Envelope(identity.public_key, body, signature))
        if len(data) <= RECORD_BYTES:
            return data
        dialable.pop()


def read_record(data: bytes) -> PeerRecord:
    """Strictly decode and check a record; raises ProtocolViolation."""
    if len(data) > RECORD_BYTES:
        raise ProtocolViolation(f"peer record of {len(data)} bytes where {RECORD_BYTES} are allowed")
    envelope = unpack_object(_Envelope, data)
    if not verify(envelope.public_key, _DOMAIN, envelope.body, envelope.signature):
        raise ProtocolViolation("peer record with a wrong signature")
    body = unpack_object(_Body, envelope.body)
    if not all(is_dialable(address) for address in body.addresses):
        raise ProtocolViolation("peer record announces an address that nobody can dial")
    return PeerRecord(
        peer_id_of(envelope.public_key),
        envelope.public_key,
        body.run_id,
        body.name,
        body.addresses,
        body.sequence,
        body.reachability,
    )


class Discovery(Protocol):
    """All calls end in bounded time; NetworkError means: try again later."""

    async def start(self) -> None:
        """Begin to look around; returns even if nobody answers yet."""
        ...

    async def announce(self, run_id: bytes, name: str, addresses: tuple[str, ...], reachability: str) -> None:
        """Publish our record, and keep it fresh until `stop`; may be called again."""
        ...

    async def find(self, run_id: bytes) -> list[PeerRecord]:
        """Checked records of other peers in this run."""
        ...

    async def runs(self) -> list[RunEntry]:
        """The runs that can be seen."""
        ...

    def visible_maddrs(self) -> list[str]:
        """Multiaddrs that others can pass as --initial-peers."""
        ...

    def status(self) -> str:
        """One line for the user."""
        ...

    async def stop(self) -> None:
        """Withdraw; idempotent."""
        ...


class MemoryHub:
    """The place where in-process peers find each other; records go through their encoded form."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.records: dict[PeerId, tuple[bytes, float]] = {}
        self.hidden: set[tuple[PeerId, PeerId]] = set()
        self._clock_s = clock_s

    def publish(self, peer: PeerId, data: bytes) -> None:
        self.records[peer] = (data, self._clock_s() + RECORD_TTL_S)

    def seen_by(self, viewer: PeerId) -> list[PeerRecord]:
        """Fresh, valid records of others that are not hidden from this viewer."""
        found = []
        for peer, (data, expiry) in self.records.items():
            if peer != viewer and (viewer, peer) not in self.hidden and expiry > self._clock_s():
                found.append(read_record(data))
        return found


class MemoryDiscovery:
    """`Discovery` on a `MemoryHub`."""

    def __init__(self, hub: MemoryHub, identity: Identity) -> None:
        self._hub, self._identity = hub, identity
        self._sequence = 0

    async def start(self) -> None:
        """Nothing to do."""

    async def announce(self, run_id: bytes, name: str, addresses: tuple[str, ...], reachability: str) -> None:
        self._sequence += 1
        data = make_record(self._identity, run_id, name, addresses, self._sequence, reachability)
        self._hub.publish(self._identity.peer_id, data)

    async def find(self, run_id: bytes) -> list[PeerRecord]:
        return [r for r in self._hub.seen_by(self._identity.peer_id) if r.run_id == run_id]

    async def runs(self) -> list[RunEntry]:
        return count_runs(self._hub.seen_by(self._identity.peer_id))

    def visible_maddrs(self) -> list[str]:
        return ["memory"]

    def status(self) -> str:
        return f"{len(self._hub.records)} peers in memory"

    async def stop(self) -> None:
        self._hub.records.pop(self._identity.peer_id, None)


def count_runs(records: list[PeerRecord]) -> list[RunEntry]:
    """Group records by run, in a fixed order."""
    runs: dict[bytes, RunEntry] = {}
    for record in sorted(records, key=lambda r: r.peer_id):
        before = runs.get(record.run_id)
        count = 1 if before is None else before.peers + 1
        runs[record.run_id] = RunEntry(record.run_id, record.name, count)
    return [runs[run_id] for run_id in sorted(runs)]
