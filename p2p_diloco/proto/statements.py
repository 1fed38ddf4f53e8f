"""Signing and checking statements: one domain tag per kind, one run id in every signature."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import PeerId, peer_id_of
from p2p_diloco.wire.messages import Body, Receipt, Signed, decode_body, kind_of, pack_object

_REMEMBERED = 4096
RECEIPT_BYTES = 64  # a receipt's signature, in front of a finished chunk's payload


class Signer(Protocol):
    """What the machines need of an identity."""

    @property
    def public_key(self) -> bytes: ...
    @property
    def peer_id(self) -> PeerId: ...
    def sign(self, domain: str, message: bytes) -> bytes: ...
    def verify(self, public_key: bytes, domain: str, message: bytes, signature: bytes) -> bool: ...


class Statements:
    """Makes our statements and checks those of others; good ones are remembered (bounded)."""

    def __init__(self, signer: Signer, run_id: bytes) -> None:
        self._signer = signer
        self._run_id = run_id
        self._good: OrderedDict[bytes, tuple[PeerId, Body]] = OrderedDict()

    @property
    def me(self) -> PeerId:
        return self._signer.peer_id

    @property
    def public_key(self) -> bytes:
        return self._signer.public_key

    def make(self, body: Body) -> Signed:
        """Sign ``body`` as ours."""
        kind, packed = kind_of(body), pack_object(body)
        signature = self._signer.sign(kind, self._run_id + packed)
        return Signed(self._signer.public_key, kind, packed, signature)

    def check(self, signed: Signed) -> tuple[PeerId, Body]:
        """Return author and body; raise ProtocolViolation if the signature or the body is bad."""
        name = signed.digest() + signed.signature
        known = self._good.get(name)
        if known is not None:
            self._good.move_to_end(name)
            return known
        body = decode_body(signed.kind, signed.body)
        message = self._run_id + signed.body
        if not self._signer.verify(signed.public_key, signed.kind, message, signed.signature):
            raise ProtocolViolation(f"wrong signature under a {signed.kind} statement")
        found = (peer_id_of(signed.public_key), body)
        self._good[name] = found
        if len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)
        return found

    def sign_receipt(self, receipt: Receipt) -> bytes:
        """Our signature (64 bytes) under a chunk that we own and finished."""
        return self.make(receipt).signature

    def is_receipt(self, receipt: Receipt, owner_key: bytes, signature: bytes) -> bool:
        """True if the owner signed exactly this receipt."""
        return self._signer.verify(owner_key, "receipt", self._run_id + pack_object(receipt), signature)
