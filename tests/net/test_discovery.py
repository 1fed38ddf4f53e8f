"""Peer records and the in-memory backend: only what its owner signed, only what can be dialled."""

from __future__ import annotations

import math
import time

import msgpack
import pytest

from p2p_diloco.errors import ConfigError, ProtocolViolation
from p2p_diloco.identity import Identity
from p2p_diloco.net.dht import _peer_of
from p2p_diloco.net.dhtguard import check_packed, record_is_sound
from p2p_diloco.net.discovery import (
    RECORD_BYTES,
    MemoryDiscovery,
    MemoryHub,
    make_record,
    read_record,
)

RUN = bytes(range(32))
ME = Identity.generate(bytes(32))


def record(**changes: object) -> bytes:
    values = {
        "run_id": RUN,
        "name": "n",
        "addresses": ("10.0.0.1:5",),
        "sequence": 1,
        "reachability": "direct",
    }
    return make_record(ME, **{**values, **changes})  # type: ignore[arg-type]


def test_a_record_says_who_where_and_which_run() -> None:
    found = read_record(record())
    assert (found.peer_id, found.run_id, found.addresses) == (ME.peer_id, RUN, ("10.0.0.1:5",))


def test_a_record_never_exceeds_its_limit_nor_names_an_address_that_cannot_be_dialled() -> None:
    long = tuple(f"{'x' * 110}.example:{port}" for port in range(1, 9))
    data = record(addresses=("0.0.0.0:5", "10.0.0.1:0", *long))
    assert len(data) <= RECORD_BYTES
    assert read_record(data).addresses
    assert read_record(record(addresses=("0.0.0.0:0",))).addresses == ()


def test_a_flipped_byte_anywhere_makes_a_record_invalid() -> None:
    data = record()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        with pytest.raises(ProtocolViolation):
            read_record(bytes(damaged))


def packed(data: bytes) -> bytes:
    return bytes(msgpack.packb(data))


def test_the_dht_keeps_a_record_only_under_its_own_key_with_a_finite_near_expiry() -> None:
    subkey, value, soon = packed(ME.public_key), packed(record()), time.time() + 100
    assert record_is_sound(subkey, value, soon)
    assert not record_is_sound(packed(Identity.generate().public_key), value, soon)
    assert not record_is_sound(b"", value, soon)
    assert not record_is_sound(subkey, packed(record()[:-1]), soon)
    assert not record_is_sound(subkey, value + b"x", soon)
    assert not record_is_sound(subkey, packed(bytes(5000)), soon)
    assert not record_is_sound(subkey, b"\xc7\x01\x50\x00", soon)
    for expiry in (math.inf, math.nan, time.time() + 1e6):
        assert not record_is_sound(subkey, value, expiry)


def test_the_serializer_refuses_what_would_crash_or_bloat_it() -> None:
    check_packed(packed(b"x"))
    check_packed(bytes(msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([5, 1.0, []])))))
    inner = msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([])))
    nested = msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([5, 1.0, [[b"k", b"v", 1.0]]]) + inner))
    deep = b"\x91" * 100 + b"\x00"
    unknown = bytes(msgpack.packb(msgpack.ExtType(3, b"x")))
    for bad in (b"", bytes(nested), unknown, deep, bytes(1 << 20), b"\xc9\xff"):
        with pytest.raises(ValueError):
            check_packed(bad)


async def test_peers_in_memory_find_those_of_their_run_and_nobody_hidden() -> None:
    hub = MemoryHub()
    people = [Identity.generate() for _ in range(3)]
    views = [MemoryDiscovery(hub, person) for person in people]
    for view in views[:2]:
        await view.announce(RUN, "one", ("10.0.0.1:5",), "direct")
    await views[2].announce(bytes(32), "two", ("10.0.0.3:5",), "direct")
    assert [r.peer_id for r in await views[0].find(RUN)] == [people[1].peer_id]
    assert {(entry.name, entry.peers) for entry in await views[0].runs()} == {("one", 1), ("two", 1)}
    hub.hidden.add((people[0].peer_id, people[1].peer_id))
    assert await views[0].find(RUN) == []
    await views[2].stop()
    assert [entry.name for entry in await views[1].runs()] == ["one"]


async def test_a_record_in_memory_expires() -> None:
    now = [0.0]
    hub = MemoryHub(lambda: now[0])
    viewer, gone = Identity.generate(), Identity.generate()
    await MemoryDiscovery(hub, gone).announce(RUN, "one", ("10.0.0.1:5",), "direct")
    assert await MemoryDiscovery(hub, viewer).find(RUN)
    now[0] = 1e4
    assert not await MemoryDiscovery(hub, viewer).find(RUN)


@pytest.mark.parametrize(
    "text", ["", "10.0.0.1:5", "/ip4/10.0.0.1/tcp/5", "/ip4/x/tcp/5/p2p/Qm", "/ip4/1.2.3.4/tcp/0/p2p/Qm"]
)
def test_an_initial_peer_that_is_no_multiaddr_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="initial_peers"):
        _peer_of(text)
