"""Frame heads and data headers."""

from __future__ import annotations

import random

import pytest

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.wire import framing
from p2p_diloco.wire.framing import DATA_HEADER_BYTES, HEAD, DataHeader, Limits, pack_message
from p2p_diloco.wire.messages import GetGenesis, Leaves, Ping, decode

HEADER = DataHeader(kind=2, chunk=7, hop=3, weight=2**63, tag=bytes(range(32)), length=1000)


def test_a_data_header_comes_back_as_it_was() -> None:
    packed = HEADER.pack()
    length, kind = HEAD.unpack(packed[: HEAD.size])
    assert kind == framing.DATA
    assert length == DATA_HEADER_BYTES + 1000
    assert DataHeader.unpack(packed[HEAD.size :], length) == HEADER


@pytest.mark.parametrize("index", [0, 1, 2, 3, 10, 11])  # magic, kind, flags, reserved
def test_a_data_header_with_a_wrong_fixed_field_is_refused(index: int) -> None:
    packed = bytearray(HEADER.pack()[HEAD.size :])
    packed[index] ^= 0xFF
    with pytest.raises(ProtocolViolation, match="malformed"):
        DataHeader.unpack(bytes(packed), DATA_HEADER_BYTES + 1000)


def test_a_data_header_whose_length_is_not_the_frames_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="payload bytes"):
        DataHeader.unpack(HEADER.pack()[HEAD.size :], DATA_HEADER_BYTES + 999)
    with pytest.raises(ProtocolViolation, match="payload bytes"):
        DataHeader.unpack(HEADER.pack()[HEAD.size :], 10)


def test_random_bytes_as_a_data_header_raise_nothing_but_protocol_violations() -> None:
    rng = random.Random(0)
    for _ in range(500):
        with pytest.raises(ProtocolViolation):
            DataHeader.unpack(rng.randbytes(rng.randrange(0, 80)), rng.randrange(0, 1 << 32))


def test_a_packed_message_is_a_small_or_a_large_frame_by_its_kind() -> None:
    for message, expected in ((Ping(1, 2), framing.SMALL), (Leaves(bytes(32), 0, 0, b""), framing.LARGE)):
        packed = pack_message(message)
        length, kind = HEAD.unpack(packed[: HEAD.size])
        assert kind == expected
        assert length == len(packed) - HEAD.size
        assert decode(packed[HEAD.size :]) == message
    assert decode(pack_message(GetGenesis(0))[HEAD.size :]) == GetGenesis(0)


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        (framing.before_hello(), (2048, 0, 0)),
        (framing.dialler_before_hello(), (64 << 10, 0, 0)),
        (framing.after_hello(1000), (64 << 10, 1 << 20, 1000 + DATA_HEADER_BYTES)),
        (framing.on_lane(1000), (0, 0, 1000 + DATA_HEADER_BYTES)),
    ],
)
def test_each_stage_allows_so_many_bytes_of_each_class_and_not_one_more(
    limits: Limits, allowed: tuple[int, int, int]
) -> None:
    for kind, most in enumerate(allowed):
        limits.check(most, kind)
        for length in (most + 1, 0xFFFFFFFF):
            with pytest.raises(ProtocolViolation, match="are allowed"):
                limits.check(length, kind)


@pytest.mark.parametrize("kind", [3, 4, 255])
def test_a_frame_of_an_unknown_class_is_refused_even_when_empty(kind: int) -> None:
    with pytest.raises(ProtocolViolation, match="unknown class"):
        framing.after_hello(1).check(0, kind)
