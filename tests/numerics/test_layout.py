"""Schema and chunks."""

from __future__ import annotations

import msgpack
import pytest

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.numerics.layout import Layout, Schema, TensorSpec

SCHEMA = Schema(
    (
        TensorSpec("embed", (256, 128), "float32"),
        TensorSpec("empty", (0, 5), "bfloat16"),
        TensorSpec("scalar", (), "float32"),
        TensorSpec("head", (7,), "float16"),
    )
)


def test_offsets_total_and_lookup_agree() -> None:
    assert SCHEMA.total_values == 256 * 128 + 1 + 7
    assert SCHEMA.offsets == (0, 32768, 32768, 32769)
    assert SCHEMA.tensor_at(0) == "embed"
    assert SCHEMA.tensor_at(32767) == "embed"
    assert SCHEMA.tensor_at(32768) == "scalar"
    assert SCHEMA.tensor_at(32775) == "head"
    assert SCHEMA.tensor_at(-1) == SCHEMA.tensor_at(32776) == "no tensor"


def test_a_schema_reads_back_and_its_hash_sees_every_difference() -> None:
    assert Schema.from_bytes(SCHEMA.to_bytes()) == SCHEMA
    others = [
        Schema(SCHEMA.tensors[:-1]),
        Schema((TensorSpec("embed", (128, 256), "float32"), *SCHEMA.tensors[1:])),
        Schema((TensorSpec("embed", (256, 128), "bfloat16"), *SCHEMA.tensors[1:])),
        Schema((TensorSpec("Embed", (256, 128), "float32"), *SCHEMA.tensors[1:])),
        Schema(()),
    ]
    assert len({s.hash() for s in others} | {SCHEMA.hash()}) == 6


@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        (
            (("e", (512, 8)),),
            (("e", (256, 8)),),
            "tensor e is 512x8 float32 here and 256x8 float32 in the run",
        ),
        ((("a", (1,)), ("b", (1,))), (("a", (1,)),), "tensor b is here and not in the run"),
        ((("a", (1,)),), (("a", (1,)), ("b", (1,))), "tensor b is in the run and not here"),
        ((("a", (1,)),), (("b", (1,)),), "tensor a is here where the run has b"),
        ((("a", (1,)),), (("a", (1,)),), ""),
    ],
)
def test_the_first_difference_is_named(mine: tuple, theirs: tuple, words: str) -> None:
    def make(rows: tuple) -> Schema:
        return Schema(tuple(TensorSpec(name, shape, "float32") for name, shape in rows))

    assert make(mine).first_difference(make(theirs)) == words


@pytest.mark.parametrize(
    "rows",
    [
        5,
        [5],
        [["a", [1]]],
        [["", [1], "float32"]],
        [["a", [-1], "float32"]],
        [["a", [True], "float32"]],
        [["a", [1] * 9, "float32"]],
        [["a", [1], "int8"]],
        [["a", [1], "float32"], ["a", [2], "float32"]],
        [["a", [1 << 40, 2], "float32"]],
        {"a": 1},
    ],
)
def test_a_malformed_schema_is_refused(rows: object) -> None:
    with pytest.raises(ProtocolViolation):
        Schema.from_bytes(msgpack.packb(rows))


def test_junk_bytes_are_refused() -> None:
    for junk in (b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000):
        with pytest.raises(ProtocolViolation):
            Schema.from_bytes(junk)


@pytest.mark.parametrize("total", [0, 1, 7, 4096, 4097, 1_000_003, 10_000_000_000])
def test_chunks_cover_every_value_once(total: int) -> None:
    layout = Layout.choose(total)
    assert 16_384 <= layout.chunk_values <= 1 << 20
    assert layout.chunk_values % 256 == 0
    if layout.chunks:
        assert layout.bounds(0)[0] == 0
        assert layout.bounds(layout.chunks - 1)[1] == total
        assert sum(layout.values(c) for c in {0, layout.chunks - 1}) > 0
    assert sum(layout.values(c) for c in range(min(layout.chunks, 300))) == min(
        total, 300 * layout.chunk_values
    )


def test_small_models_get_about_a_hundred_chunks_and_a_configured_size_wins() -> None:
    assert 90 <= Layout.choose(20_000_000).chunks <= 100
    assert Layout.choose(1000, 10) == Layout(1000, 10)


def test_a_schema_in_another_encoding_than_the_canonical_one_is_refused() -> None:
    canonical = msgpack.packb([["a", [1], "float32"]])
    assert Schema.from_bytes(canonical).tensors[0].name == "a"
    longer = b"\xdc\x00\x01" + canonical[1:]  # the same list with a 16-bit length
    assert msgpack.unpackb(longer) == msgpack.unpackb(canonical)
    with pytest.raises(ProtocolViolation, match="canonical"):
        Schema.from_bytes(longer)


def test_a_schema_that_is_a_bomb_of_empty_lists_is_refused_while_it_is_read() -> None:
    rows = b"\xdd" + (50_000).to_bytes(4, "big") + (b"\x9f" + b"\x90" * 15) * 50_000
    with pytest.raises(ProtocolViolation, match="not msgpack"):
        Schema.from_bytes(rows)


def test_a_schema_beyond_its_size_is_refused_unread() -> None:
    with pytest.raises(ProtocolViolation, match="allowed"):
        Schema.from_bytes(bytes((4 << 20) + 1))
