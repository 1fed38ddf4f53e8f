"""The codec: what it loses, what it refuses, and that its bits never depend on how it is run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.numerics import int8
from p2p_diloco.numerics.int8 import Codec, ErrorStats, NonFiniteError

SIZES = [0, 1, 7, 255, 256, 257, 65_536, 65_537, 1_000_003]
CODEC = Codec("int8")


def sample(size: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def reference_encode(x: np.ndarray) -> np.ndarray:
    """Decoded values by the definition, block by block in plain Python steps."""
    out = np.zeros_like(x)
    for start in range(0, x.size, 256):
        block = x[start : start + 256]
        scale = np.float32(np.abs(block).max() / np.float32(127))
        if scale >= np.float32(2.0**-126):
            codes = np.rint(block * (np.float32(1) / scale))
            assert np.abs(codes).max() <= 127
            out[start : start + 256] = codes.astype(np.float32) * scale
    return out


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["int8", "fp32"])
def test_what_comes_back_is_within_the_stated_bound(size: int, kind: str) -> None:
    codec = Codec(kind)
    x = sample(size, size)
    payload = codec.encode(x)
    assert len(payload) == codec.payload_bytes(size)
    back = codec.decode(payload, size)
    assert (np.abs(back - x) <= codec.error_bound(x)).all()


@pytest.mark.parametrize("size", [1, 7, 257, 65_537])
def test_the_fast_encoder_equals_the_definition_bit_for_bit(size: int) -> None:
    x = sample(size, 3)
    assert np.array_equal(CODEC.decode(CODEC.encode(x), size), reference_encode(x))


def test_zero_blocks_are_exact_zeros_and_do_not_disturb_their_neighbours() -> None:
    x = sample(1024)
    x[256:512] = 0
    back = CODEC.decode(CODEC.encode(x), 1024)
    assert not back[256:512].any()
    assert back[:256].any()


@pytest.mark.parametrize("scale", [1e38, 1e-30, 1e-37, 1e-40, 1e-45])
def test_huge_and_tiny_values_stay_finite_and_within_the_bound(scale: float) -> None:
    x = np.clip(sample(1000, 5), -3, 3) * np.float32(scale)
    back = CODEC.decode(CODEC.encode(x), 1000)
    assert np.isfinite(back).all()
    assert (np.abs(back - x) <= CODEC.error_bound(x)).all()


def test_the_largest_float_survives() -> None:
    x = np.full(3, np.finfo(np.float32).max, np.float32)
    back = CODEC.decode(CODEC.encode(x), 3)
    assert np.isfinite(back).all()


def test_values_that_were_bfloat16_are_as_good_as_any() -> None:
    x = (sample(5000).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    back = CODEC.decode(CODEC.encode(x), 5000)
    assert (np.abs(back - x) <= CODEC.error_bound(x)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["int8", "fp32"])
@pytest.mark.parametrize("place", [0, 300, 999])
def test_a_value_that_is_not_finite_is_refused_at_the_source(bad: float, kind: str, place: int) -> None:
    x = sample(1000)
    x[place] = bad
    with pytest.raises(NonFiniteError):
        Codec(kind).encode(x)


def with_scale(value: float) -> bytes:
    payload = bytearray(CODEC.encode(sample(300)))
    payload[0:4] = np.float32(value).tobytes()
    return bytes(payload)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 3e36, -np.inf])
def test_a_bad_scale_on_the_wire_is_refused(scale: float) -> None:
    with pytest.raises(ProtocolViolation, match="scale"):
        CODEC.decode(with_scale(scale), 300)


def test_a_wrong_length_and_the_code_minus_128_are_refused() -> None:
    payload = CODEC.encode(sample(300))
    for wrong in (payload[:-1], payload + b"\x00", b""):
        with pytest.raises(ProtocolViolation, match="bytes"):
            CODEC.decode(wrong, 300)
    with pytest.raises(ProtocolViolation, match="-128"):
        CODEC.decode(payload[:-1] + b"\x80", 300)


def test_a_sum_that_overflows_names_the_sender_not_us() -> None:
    big = np.full(10, 3e38, np.float32)
    with pytest.raises(ProtocolViolation, match="sum"):
        CODEC.hop(CODEC.encode(big), big, 1)


@pytest.mark.parametrize("size", [0, 1, 7, 65_537])
def test_a_hop_is_decode_plus_weighted_own_plus_encode(size: int) -> None:
    a, b = sample(size, 1), sample(size, 2)
    first = CODEC.first(a, 3)
    expected = CODEC.decode(first, size) + np.float32(5) * b
    assert CODEC.hop(first, b, 5) == CODEC.encode(expected)
    assert CODEC.finish(first, b, 5, 8) == CODEC.encode(expected / np.float32(8))


@pytest.mark.parametrize("peers", [1, 2, 3, 5, 8])
def test_the_mean_of_a_ring_is_within_the_sum_of_its_hops_bounds(peers: int) -> None:
    size = 10_007
    parts = [sample(size, peer) for peer in range(peers)]
    weights = [peer + 1 for peer in range(peers)]
    total = sum(weights)
    exact = sum(w * p.astype(np.float64) for w, p in zip(weights, parts, strict=True)) / total
    bound = np.zeros(size)
    partial = np.zeros(size, np.float32)
    payload = b""
    for index, (weight, part) in enumerate(zip(weights, parts, strict=True)):
        partial = partial + np.float32(weight) * part
        if index == peers - 1:
            payload = CODEC.finish(payload, part, weight, total) if index else CODEC.single(part)
            mean = CODEC.decode(payload, size)
            bound += CODEC.error_bound(mean + np.float32(1e-6)) * 1.01
        else:
            payload = CODEC.hop(payload, part, weight) if index else CODEC.first(part, weight)
            bound += CODEC.error_bound(CODEC.decode(payload, size)) * 1.01 / total
    assert (np.abs(mean - exact) <= bound + 1e-5).all()


def test_sub_block_size_and_threads_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [sample(200_000, seed) for seed in range(4)]
    once = [CODEC.hop(CODEC.first(p, 2), p, 3) for p in parts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda p: CODEC.hop(CODEC.first(p, 2), p, 3), parts)) == once
    monkeypatch.setattr(int8, "_SUB", 1024)
    assert [CODEC.hop(CODEC.first(p, 2), p, 3) for p in parts] == once


def test_the_error_statistics_show_what_encoding_lost_in_the_first_blocks() -> None:
    x = sample(65_536)
    stats = ErrorStats()
    back = CODEC.decode(CODEC.encode(x, stats), x.size)[:4096]
    x = x[:4096]
    expected = np.linalg.norm(back - x) / np.linalg.norm(x)
    assert stats.relative() == pytest.approx(expected, rel=1e-3)
    assert ErrorStats().relative() == 0.0


def test_statistics_of_several_chunks_weigh_every_value_alike() -> None:
    parts = [sample(1000, 1), sample(1000, 2, 1e-3), sample(1000, 3, 1e30)]
    stats = ErrorStats()
    backs = [CODEC.decode(CODEC.encode(x, stats), x.size) for x in parts]
    lost = sum(float(np.square(b.astype(np.float64) - x).sum()) for b, x in zip(backs, parts, strict=True))
    total = sum(float(np.square(x.astype(np.float64)).sum()) for x in parts)
    assert stats.relative() == pytest.approx((lost / total) ** 0.5, rel=1e-3)


def test_an_overflow_of_our_own_weighted_part_is_not_blamed_on_the_neighbour() -> None:
    fine = CODEC.encode(sample(10))
    own = np.full(10, 1e30, np.float32)
    for call in (
        lambda: CODEC.first(own, 1e12),
        lambda: CODEC.hop(fine, own, 1e12),
        lambda: CODEC.finish(fine, own, 1e12, 2e12),
    ):
        with pytest.raises(NonFiniteError):
            call()


def test_the_largest_scale_that_is_accepted_decodes_to_finite_values() -> None:
    payload = bytearray(CODEC.encode(sample(300)))
    payload[0:4] = int8._LARGEST_SCALE.tobytes()
    payload[8 : 8 + 256] = b"\x7f\x81" * 128
    assert np.isfinite(CODEC.decode(bytes(payload), 300)).all()


def test_an_fp32_payload_that_is_not_finite_is_refused() -> None:
    payload = np.array([1, np.inf, 2], np.float32).tobytes()
    with pytest.raises(ProtocolViolation, match="not finite"):
        Codec("fp32").decode(payload, 3)


def test_decoding_into_a_given_array_or_piece_by_piece_gives_the_same_values() -> None:
    x = sample(70_001)
    payload = CODEC.encode(x)
    whole, into, pieces = CODEC.decode(payload, x.size), np.empty_like(x), np.empty_like(x)
    assert CODEC.decode(payload, x.size, into) is into
    read = CODEC.reader(payload, x.size)
    for start in range(0, x.size, 5 * 256):
        stop = min(start + 5 * 256, x.size)
        read(start, stop, pieces[start:stop])
    assert np.array_equal(whole, into)
    assert np.array_equal(whole, pieces)


def test_a_block_too_small_for_a_scale_becomes_exact_zeros_with_scale_zero() -> None:
    x = np.full(257, 1e-37, np.float32)  # a scale of 8e-40, below the normal numbers
    x[256] = 1.0
    payload = CODEC.encode(x)
    assert np.frombuffer(payload, "<f4", 2)[0] == 0
    assert payload[8:] == bytes(256) + b"\x7f"
