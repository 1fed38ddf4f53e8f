"""What stands between hivemind's storage and bytes from strangers: a record validator and a serializer.

hivemind is imported only when these are made, because that takes seconds.
"""

from __future__ import annotations

import importlib
import math
import struct
import time
from typing import Any, Final

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.net.discovery import RECORD_BYTES, read_record
from p2p_diloco.wire.scan import scan

_MAX_TTL_S: Final = 3600.0  # no record may claim to live longer; an infinite expiry would pin its key
_SKEW_S: Final = 300.0  # clocks of honest peers may differ this much (guess)
_MAX_DICTIONARY_BYTES: Final = 512 << 10
_DICTIONARY_EXT: Final = 0x50  # hivemind's type code for a dictionary of subkeys
_EXT_HEADS: Final = {0xC7: ">BB", 0xC8: ">HB", 0xC9: ">IB"}
_FIXED_EXT: Final = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def record_is_sound(subkey: bytes, value: bytes, expiry: float) -> bool:
    """A record may be kept or returned: signed by the key that is its subkey, small, with a finite expiry."""
    now = time.time()
    if not isinstance(expiry, float) or not math.isfinite(expiry) or expiry > now + _MAX_TTL_S + _SKEW_S:
        return False
    if len(subkey) != 34 or subkey[:2] != b"\xc4\x20":  # msgpack of 32 bytes
        return False
    if not 3 < len(value) <= RECORD_BYTES + 3 or value[0] not in (0xC4, 0xC5):  # msgpack of bytes
        return False
    head = 2 if value[0] == 0xC4 else 3
    if int.from_bytes(value[1:head], "big") != len(value) - head:
        return False
    try:
        return read_record(value[head:]).public_key == subkey[2:]
    except ProtocolViolation:
        return False


def make_validator() -> Any:
    """A hivemind RecordValidatorBase round `record_is_sound`."""
    base: Any = importlib.import_module("hivemind.dht.validation").RecordValidatorBase

    class PeerRecordValidator(base):  # type: ignore[misc]
        def validate(self, record: Any) -> bool:
            return record_is_sound(record.subkey, record.value, record.expiration_time)

    return PeerRecordValidator()


def check_packed(data: bytes) -> None:
    """Raise ValueError unless ``data`` is plain msgpack, or one dictionary of plain msgpack inside."""
    if len(data) > _MAX_DICTIONARY_BYTES:
        raise ValueError("DHT value is too long")
    inside = _extension(data)
    try:
        scan(data if inside is None else inside, max_items=16_384)
    except ProtocolViolation as violation:
        raise ValueError(f"DHT value is malformed: {violation}") from None


def _extension(data: bytes) -> bytes | None:
    """The content of a top-level dictionary extension, None if the value is none; ValueError for others."""
    if not data:
        raise ValueError("DHT value is empty")
    if data[0] in _FIXED_EXT:
        length, head, code = _FIXED_EXT[data[0]], 2, data[1] if len(data) > 1 else -1
    elif data[0] in _EXT_HEADS:
        form = struct.Struct(_EXT_HEADS[data[0]])
        if len(data) < 1 + form.size:
            raise ValueError("DHT value ends in its header")
        length, code = form.unpack_from(data, 1)
        head = 1 + form.size
    else:
        return None
    if code != _DICTIONARY_EXT or length != len(data) - head:
        raise ValueError("DHT value is an extension that is not expected")
    return data[head:]


def make_serializer() -> Any:
    """hivemind's MSGPackSerializer, which looks before it unpacks."""
    base: Any = importlib.import_module("hivemind.utils.serializer").MSGPackSerializer

    class GuardedSerializer(base):  # type: ignore[misc]
        @classmethod
        def loads(cls, buf: bytes) -> object:
            check_packed(bytes(buf))
            loaded: object = super().loads(buf)
            return loaded

    return GuardedSerializer
