"""Who a peer is: one ed25519 key in one locked file, its PeerId, and signatures with domain tags."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import Final, NewType

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2p_diloco.errors import IdentityError, IdentityLockedError, ProtocolViolation

PeerId = NewType("PeerId", bytes)  # 32 bytes: SHA-256 of the public key

_MAGIC: Final = "p2p-diloco ed25519 seed: "
_P: Final = 2**255 - 19
# The y coordinates of the eight points of small order (RFC 8032's curve); with either sign bit they
# would let one signature fit many messages.
_ORDER_8_Y: Final = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826
_SMALL_ORDER_Y: Final = frozenset({0, 1, _P - 1, _ORDER_8_Y, _P - _ORDER_8_Y})


def peer_id_of(public_key: bytes) -> PeerId:
    """SHA-256 of a 32-byte public key."""
    return PeerId(hashlib.sha256(public_key).digest())


def full(peer_id: PeerId) -> str:
    """All of a PeerId as base32, lower case, 52 characters."""
    return base64.b32encode(peer_id).decode().rstrip("=").lower()


def show(peer_id: PeerId) -> str:
    """The first 8 characters of `full`: for logs."""
    return full(peer_id)[:8]


def check_public_key(public_key: bytes) -> None:
    """Raise ProtocolViolation for a key of wrong length, non-canonical, or of small order."""
    if len(public_key) != 32:
        raise ProtocolViolation("an ed25519 public key has 32 bytes")
    y = int.from_bytes(public_key, "little") & ((1 << 255) - 1)
    if y >= _P:
        raise ProtocolViolation("public key is not canonical")
    if y in _SMALL_ORDER_Y:
        raise ProtocolViolation("public key has small order")


def _tagged(domain: str, message: bytes) -> bytes:
    return b"p2p-diloco/1/" + domain.encode() + b"\0" + message


def verify(public_key: bytes, domain: str, message: bytes, signature: bytes) -> bool:
    """True if the signature is this key's under this domain; junk of any kind is False."""
    try:
        check_public_key(public_key)
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, _tagged(domain, message))
    except (ProtocolViolation, InvalidSignature, ValueError):
        return False
    return True


class Identity:
    """A private key, and the lock on its file if it came from one."""

    def __init__(self, seed: bytes, lock_fd: int = -1) -> None:
        self.private_key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key: bytes = self.private_key.public_key().public_bytes_raw()
        self.peer_id = peer_id_of(self.public_key)
        self._seed = seed
        self._lock_fd = lock_fd

    @classmethod
    def generate(cls, seed: bytes | None = None) -> Identity:
        """A key without a file (tests, simulation); ``seed`` of 32 bytes makes it reproducible."""
        return cls(secrets.token_bytes(32) if seed is None else seed)

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The key in ``path``, made there (mode 0600) if there is none, locked until `close`.

        Raises IdentityError if the file is unreadable, damaged or readable by others, and
        IdentityLockedError if another process holds it.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _create(path)
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise IdentityError(f"cannot use key file {path}: {error.strerror}") from None
        try:
            seed = _lock_and_read(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(seed, descriptor)

    def private_bytes(self) -> bytes:
        """The 32-byte seed."""
        return self._seed

    def sign(self, domain: str, message: bytes) -> bytes:
        """64-byte signature over the domain tag and the message."""
        return self.private_key.sign(_tagged(domain, message))

    def verify(self, public_key: bytes, domain: str, message: bytes, signature: bytes) -> bool:
        """`verify` of this module, for those who are handed an identity and not the module."""
        return verify(public_key, domain, message, signature)

    def close(self) -> None:
        """Let go of the file's lock."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _create(path: Path) -> None:
    """Write a new key under a temporary name, then link it: of two that start at once, one wins."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(_MAGIC + secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            return  # the other start made it first; its key is used
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # a name that a power cut may take back would cost the peer its identity
        finally:
            os.close(folder)
    finally:
        os.unlink(temporary)


def _lock_and_read(path: Path, descriptor: int) -> bytes:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise IdentityLockedError(f"key file {path} is in use by another process") from None
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    if mode & 0o077:
        raise IdentityError(f"key file {path} has mode {mode:04o}: others can read it; chmod 600 it")
    text = os.read(descriptor, 4096).decode("ascii", "replace").strip()
    digits = text.removeprefix(_MAGIC)
    try:
        seed = bytes.fromhex(digits)
    except ValueError:
        seed = b""
    if not text.startswith(_MAGIC) or len(seed) != 32:
        raise IdentityError(f"key file {path} is damaged")
    return seed
