"""TLS 1.3 with both sides' ed25519 keys, under a certificate authority that everybody can compute.

Python's `ssl` only takes client certificates that some CA signed. So each run has a CA whose private key
follows from the run id: its signature carries no trust and is not meant to. Identity is the leaf key
itself, which TLS proves the other side holds. Validity dates are fixed and wide, so that no peer's clock
matters.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
import tempfile
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import Identity, check_public_key, show

_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_TO = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _authority(run_id: bytes) -> tuple[Ed25519PrivateKey, x509.Certificate]:
    seed = hashlib.sha256(b"p2p-diloco/tls-authority\0" + run_id).digest()
    key = Ed25519PrivateKey.from_private_bytes(seed)
    public = key.public_key()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name("p2p-diloco run"))
        .issuer_name(_name("p2p-diloco run"))
        .public_key(public)
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_TO)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, None)
    )
    return key, certificate


def _leaf(run_id: bytes, identity: Identity) -> tuple[x509.Certificate, x509.Certificate]:
    key, authority = _authority(run_id)
    public = identity.private_key.public_key()
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_name(show(identity.peer_id)))
        .issuer_name(authority.subject)
        .public_key(public)
        .serial_number(int.from_bytes(identity.peer_id[:16], "big") >> 1 | 1)
        .not_valid_before(_FROM)
        .not_valid_after(_TO)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )
    return certificate, authority


def _context(protocol: int, run_id: bytes, identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    leaf, authority = _leaf(run_id, identity)
    context.load_verify_locations(cadata=authority.public_bytes(Encoding.DER))
    private = identity.private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    # `ssl` reads keys from files only: a private temporary one, gone again before this returns.
    descriptor, path = tempfile.mkstemp(prefix="p2p-diloco-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(private + leaf.public_bytes(Encoding.PEM))
        context.load_cert_chain(path)
    finally:
        os.unlink(path)
    return context


def server_context(run_id: bytes, identity: Identity) -> ssl.SSLContext:
    """For accepting; demands a client certificate on every connection (no resumption)."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, run_id, identity)
    context.num_tickets = 0
    return context


def client_context(run_id: bytes, identity: Identity) -> ssl.SSLContext:
    """For dialling."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, run_id, identity)


def peer_public_key(ssl_object: Any) -> bytes:
    """The other side's 32-byte ed25519 key; raises ProtocolViolation for any other kind of key."""
    der = None if ssl_object is None else ssl_object.getpeercert(binary_form=True)
    if not der:
        raise ProtocolViolation("no certificate was presented")
    try:
        public = x509.load_der_x509_certificate(der).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ProtocolViolation(f"the certificate is malformed: {error}") from None
    if not isinstance(public, Ed25519PublicKey):
        raise ProtocolViolation("the certificate's key is not ed25519")
    raw = public.public_bytes_raw()
    check_public_key(raw)
    return raw
