"""A stand-in for ed25519 in simulations: forgeable, but thousands of times cheaper.

The simulator has no forgers, only peers that misuse their own key; so a keyed hash that everybody can
compute serves. Key and signature have the lengths that the wire expects.
"""

from __future__ import annotations

import hashlib

from p2p_diloco.identity import PeerId, peer_id_of


class ToyIdentity:
    """Has the methods that `proto.statements.Signer` names."""

    def __init__(self, seed: bytes) -> None:
        self.public_key: bytes = hashlib.sha256(b"p2p-diloco/toy\0" + seed).digest()
        self.peer_id: PeerId = peer_id_of(self.public_key)

    def sign(self, domain: str, message: bytes) -> bytes:
        """64 bytes over the domain and the message."""
        return _mark(self.public_key, domain, message)

    def verify(self, public_key: bytes, domain: str, message: bytes, signature: bytes) -> bool:
        """True if `sign` of the identity with this key gave the signature."""
        return signature == _mark(public_key, domain, message)


def _mark(public_key: bytes, domain: str, message: bytes) -> bytes:
    return hashlib.blake2b(message, key=public_key, person=domain.encode()[:16]).digest()
