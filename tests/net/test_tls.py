"""Mutual TLS under the authority of a run, on in-memory connections: no socket, no clock."""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import Identity
from p2p_diloco.net import tls

RUN = bytes(range(32))


class Pair:
    """A client and a server SSL object that exchange bytes through memory."""

    def __init__(self, client: ssl.SSLContext, server: ssl.SSLContext) -> None:
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = client.wrap_bio(down, up)
        self.server = server.wrap_bio(up, down, server_side=True)
        self._pipes = (up, down)

    def shake(self) -> None:
        """Both sides' handshake; raises the first error of either."""
        due = [self.client, self.server]
        for _ in range(10):
            for side in list(due):
                try:
                    side.do_handshake()
                    due.remove(side)
                except ssl.SSLWantReadError:
                    continue
            if not due:
                return
        raise AssertionError("the handshake does not end")


def bare_client(run_id: bytes) -> ssl.SSLContext:
    """A client that trusts the run's authority and shows no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    authority = tls._authority(run_id)[1]
    context.load_verify_locations(cadata=authority.public_bytes(Encoding.DER))
    return context


def with_certificate(
    context: ssl.SSLContext, folder: Path, key: object, certificate: x509.Certificate
) -> None:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())  # type: ignore[attr-defined]
    path = folder / "pair.pem"
    path.write_bytes(private + certificate.public_bytes(Encoding.PEM))
    context.load_cert_chain(path)


def leaf_for(public: object, issuer_key: Ed25519PrivateKey, issuer: x509.Name) -> x509.Certificate:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")]))
        .issuer_name(issuer)
        .public_key(public)  # type: ignore[arg-type]
        .serial_number(5)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
        .sign(issuer_key, None)
    )


def test_each_side_learns_the_key_of_the_other_under_tls_1_3() -> None:
    one, two = Identity.generate(), Identity.generate()
    pair = Pair(tls.client_context(RUN, one), tls.server_context(RUN, two))
    pair.shake()
    assert tls.peer_public_key(pair.client) == two.public_key
    assert tls.peer_public_key(pair.server) == one.public_key
    assert pair.client.version() == pair.server.version() == "TLSv1.3"


def test_all_peers_of_a_run_compute_the_same_authority_and_other_runs_another() -> None:
    first, again = (tls._authority(RUN)[1].public_bytes(Encoding.DER) for _ in range(2))
    assert first == again
    assert first != tls._authority(bytes(32))[1].public_bytes(Encoding.DER)


def test_peers_of_different_runs_do_not_get_through_the_handshake() -> None:
    pair = Pair(
        tls.client_context(RUN, Identity.generate()), tls.server_context(bytes(32), Identity.generate())
    )
    with pytest.raises(ssl.SSLCertVerificationError):
        pair.shake()


def test_a_client_without_a_certificate_is_refused() -> None:
    pair = Pair(bare_client(RUN), tls.server_context(RUN, Identity.generate()))
    with pytest.raises(ssl.SSLError, match=r"PEER_DID_NOT_RETURN_A_CERTIFICATE|peer did not return"):
        pair.shake()


def test_a_client_that_insists_on_tls_1_2_is_refused() -> None:
    client = tls.client_context(RUN, Identity.generate())
    client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        Pair(client, tls.server_context(RUN, Identity.generate())).shake()


def test_a_certificate_that_the_run_did_not_sign_is_refused(tmp_path: Path) -> None:
    key, foreign = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    client = bare_client(RUN)
    with_certificate(
        client, tmp_path, key, leaf_for(key.public_key(), foreign, tls._authority(RUN)[1].subject)
    )
    with pytest.raises(ssl.SSLError):
        Pair(client, tls.server_context(RUN, Identity.generate())).shake()


def test_a_signed_certificate_with_another_kind_of_key_is_no_identity(tmp_path: Path) -> None:
    authority_key, authority = tls._authority(RUN)
    key = ec.generate_private_key(ec.SECP256R1())
    client = bare_client(RUN)
    with_certificate(client, tmp_path, key, leaf_for(key.public_key(), authority_key, authority.subject))
    pair = Pair(client, tls.server_context(RUN, Identity.generate()))
    pair.shake()
    with pytest.raises(ProtocolViolation, match="not ed25519"):
        tls.peer_public_key(pair.server)


class _Shows:
    """Stands in for an SSL object; gives the certificate that a test made."""

    def __init__(self, der: bytes | None) -> None:
        self.der = der

    def getpeercert(self, binary_form: bool) -> bytes | None:
        assert binary_form
        return self.der


def test_a_certificate_for_a_key_of_small_order_is_refused() -> None:
    authority_key, authority = tls._authority(RUN)
    honest = Identity.generate()
    der = leaf_for(honest.private_key.public_key(), authority_key, authority.subject).public_bytes(
        Encoding.DER
    )
    assert der.count(honest.public_key) == 1
    small = bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a")
    with pytest.raises(ProtocolViolation, match="small order"):
        tls.peer_public_key(_Shows(der.replace(honest.public_key, small)))


@pytest.mark.parametrize("der", [None, b"", b"junk", bytes(1000)])
def test_no_certificate_or_a_malformed_one_is_a_protocol_violation(der: bytes | None) -> None:
    with pytest.raises(ProtocolViolation):
        tls.peer_public_key(_Shows(der))
    with pytest.raises(ProtocolViolation):
        tls.peer_public_key(None)


def test_a_key_whose_algorithm_is_unknown_is_a_protocol_violation() -> None:
    authority_key, authority = tls._authority(RUN)
    key = ec.generate_private_key(ec.SECP256R1())
    der = leaf_for(key.public_key(), authority_key, authority.subject).public_bytes(Encoding.DER)
    curve = bytes.fromhex("06082a8648ce3d030107")  # OID of P-256; the changed last byte names another curve
    assert curve in der
    with pytest.raises(ProtocolViolation):
        tls.peer_public_key(_Shows(der.replace(curve, curve[:-1] + b"\x7f")))


def test_no_session_ticket_is_given_so_every_connection_shows_a_certificate() -> None:
    pair = Pair(tls.client_context(RUN, Identity.generate()), tls.server_context(RUN, Identity.generate()))
    pair.shake()
    pair.server.write(b"x")
    assert pair.client.read(1) == b"x"  # a ticket would have come before this byte
    assert pair.client.session is None or not pair.client.session.has_ticket


def test_no_private_key_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tls.client_context(RUN, Identity.generate())
    tls.server_context(RUN, Identity.generate())
    assert os.listdir(tmp_path) == []


def test_certificates_are_valid_whatever_a_peers_clock_says() -> None:
    leaf, authority = tls._leaf(RUN, Identity.generate())
    for certificate in (leaf, authority):
        assert certificate.not_valid_before_utc.year == 2000
        assert certificate.not_valid_after_utc.year == 2100
