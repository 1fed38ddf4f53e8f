"""A run id as people see and type it: base32, lower case, no padding (52 characters for 32 bytes)."""

from __future__ import annotations

import base64
import binascii

from p2p_diloco.errors import ConfigError


def show_run_id(run_id: bytes) -> str:
    """The 32 bytes as text."""
    return base64.b32encode(run_id).decode().rstrip("=").lower()


def parse_run_id(text: str) -> bytes:
    """The inverse of `show_run_id`; raises ConfigError."""
    try:
        run_id = base64.b32decode(text.strip().upper() + "=" * (-len(text.strip()) % 8))
    except (binascii.Error, ValueError):
        raise ConfigError(f"peer.run_id: {text[:64]!r} is not base32") from None
    if len(run_id) != 32:
        raise ConfigError(f"peer.run_id: {text[:64]!r} must be the 52 characters of a run id")
    return run_id
