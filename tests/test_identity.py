"""Keys on disk, ids, signatures."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from p2p_diloco.errors import IdentityError, IdentityLockedError, ProtocolViolation
from p2p_diloco.identity import Identity, check_public_key, full, peer_id_of, show, verify

P = 2**255 - 19
# The eight encodings of points of small order, as published for Curve25519's Edwards form.
SMALL_ORDER = [
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
]


def test_a_key_file_is_made_once_private_and_gives_the_same_peer_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "peer.key"
    first = Identity.load_or_create(path)
    first.close()
    again = Identity.load_or_create(path)
    assert again.peer_id == first.peer_id
    assert again.private_bytes() == first.private_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["peer.key"]
    again.close()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_a_key_file_that_others_can_touch_is_refused_with_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "peer.key"
    Identity.load_or_create(path).close()
    path.chmod(mode)
    with pytest.raises(IdentityError, match=f"0{mode:o}.*chmod 600"):
        Identity.load_or_create(path)


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"p2p-diloco ed25519 seed: abcd\n", b"\xff" * 500, b"a" * 5000]
)
def test_a_damaged_key_file_is_refused_and_left_as_it_was(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "peer.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="damaged"):
        Identity.load_or_create(path)
    assert path.read_bytes() == content


def test_a_key_path_that_is_a_folder_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(IdentityError) as caught:
        Identity.load_or_create(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_second_process_cannot_use_the_key_until_the_first_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    held = Identity.load_or_create(path)
    program = (
        "import sys; from pathlib import Path; from p2p_diloco.identity import Identity\n"
        "from p2p_diloco.errors import IdentityLockedError\n"
        "try: Identity.load_or_create(Path(sys.argv[1]))\n"
        "except IdentityLockedError as e: print(e); sys.exit(3)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    root = Path(__file__).resolve().parent.parent
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=root, check=False)
    assert refused.returncode == 3, refused.stderr
    assert refused.stdout.count("\n") == 1
    assert str(path) in refused.stdout
    held.close()
    assert subprocess.run(command, timeout=60, cwd=root, check=False).returncode == 0


def test_of_two_starts_at_once_one_key_wins_and_the_other_start_is_told(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"

    def start(_: int) -> Identity | None:
        try:
            return Identity.load_or_create(path)
        except IdentityLockedError:
            return None

    with ThreadPoolExecutor(2) as pool:
        made = [identity for identity in pool.map(start, range(2)) if identity is not None]
    assert len(made) == 1
    made[0].close()
    assert Identity.load_or_create(path).peer_id == made[0].peer_id


def test_ids_are_shown_as_base32_of_the_key_hash() -> None:
    identity = Identity.generate(bytes(range(32)))
    assert identity.peer_id == peer_id_of(identity.public_key)
    assert len(identity.peer_id) == 32
    text = full(identity.peer_id)
    assert len(text) == 52
    assert set(text) <= set("abcdefghijklmnopqrstuvwxyz234567")
    assert show(identity.peer_id) == text[:8]


def test_a_signature_holds_for_its_key_domain_and_message_only() -> None:
    identity, other = Identity.generate(), Identity.generate()
    signature = identity.sign("vote", b"message")
    assert verify(identity.public_key, "vote", b"message", signature)
    assert not verify(other.public_key, "vote", b"message", signature)
    assert not verify(identity.public_key, "ready", b"message", signature)
    assert not verify(identity.public_key, "vote", b"message2", signature)
    # The end of the domain cannot be moved into the message.
    assert not verify(identity.public_key, "vot", b"e\0message", signature)


@pytest.mark.parametrize("key", [b"", b"x", bytes(31), bytes(33), bytes(32), b"\xff" * 32])
@pytest.mark.parametrize("signature", [b"", bytes(63), bytes(64), b"\xff" * 64, bytes(65)])
def test_verifying_junk_is_false_and_never_raises(key: bytes, signature: bytes) -> None:
    assert verify(key, "vote", b"m", signature) is False
    assert verify(Identity.generate().public_key, "vote", b"m", signature) is False


@pytest.mark.parametrize("encoding", SMALL_ORDER)
def test_keys_of_small_order_are_refused(encoding: str) -> None:
    with pytest.raises(ProtocolViolation, match="small order"):
        check_public_key(bytes.fromhex(encoding))


@pytest.mark.parametrize("y", [P, P + 1, P + 2, 2**255 - 1])
@pytest.mark.parametrize("sign", [0, 1 << 255])
def test_keys_that_are_not_canonical_are_refused(y: int, sign: int) -> None:
    with pytest.raises(ProtocolViolation, match="canonical"):
        check_public_key((y | sign).to_bytes(32, "little"))


def test_ordinary_keys_pass_the_check() -> None:
    for _ in range(50):
        check_public_key(Identity.generate().public_key)
