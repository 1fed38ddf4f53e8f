"""Messages decode to exactly what was encoded, and nothing else decodes at all."""

import dataclasses
import math
import pickle
import random

import msgpack
import pytest

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.wire import messages as msg
from p2p_diloco.wire.messages import ZERO

SIGNED = msg.Signed(ZERO, "ready", msg.pack_object(msg.Ready(1, ZERO, ZERO, 5, ZERO)), bytes(64))
CERTIFICATE = msg.Certificate(3, ZERO, (SIGNED,), ZERO, ZERO, (SIGNED, SIGNED), (SIGNED,))
PROGRESS = msg.Progress(2, ZERO, "training", 3, 100, 4.5, 1000.0)

EXAMPLES: list[msg.Message] = [
    msg.Hello(1, "0.1", "full", ZERO, ZERO, ZERO, ("127.0.0.1:1", "[::1]:2"), 5, 6, 0),
    msg.Refuse("schema", "differs", b"abc"),
    msg.Ping(1, 2),
    msg.Pong(1, 2),
    msg.Gossip(PROGRESS, (SIGNED,), (msg.Rumour(ZERO, 4, "suspect"),)),
    msg.Probe(1, ZERO),
    msg.Ack(1, ZERO),
    msg.Statement(SIGNED),
    msg.Verdict(CERTIFICATE),
    msg.Equivocation(SIGNED, SIGNED),
    msg.GetGenesis(0),
    msg.GenesisReply(msg.Genesis(1, b"{}", b"x", 4096, ZERO, ZERO, bytes(16))),
    msg.GetChain(4),
    msg.Chain(9, (msg.pack_object(CERTIFICATE),)),
    msg.GetLeaves(ZERO, 0),
    msg.Leaves(ZERO, 0, 2, bytes(64)),
    msg.GetChunk(ZERO, 7),
    msg.Gone(ZERO, 7, "busy"),
]
BODIES: list[msg.Body] = [
    msg.MemberRecord(1, 2, 0, ("a:1",)),
    msg.Ready(1, ZERO, ZERO, 5, ZERO),
    msg.View(1, ZERO, 2, "run", (SIGNED,), (), (), (), (msg.Reuse(1, (SIGNED,), b"\xff"),)),
    msg.Vote(1, ZERO, 0, ZERO, ZERO, ZERO),
    msg.Promise(1, ZERO, 1, (SIGNED,), (SIGNED,), (msg.Holding(ZERO, b"\x05"),), (ZERO,)),
    msg.Abstain(1, ZERO, "NaN", 0),
    msg.Receipt(1, ZERO, 2, ZERO, b"\x07"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: msg.kind_of(m))
def test_every_message_survives_the_wire(message: msg.Message) -> None:
    assert msg.decode(msg.encode(message)) == message


@pytest.mark.parametrize("body", BODIES, ids=lambda b: msg.kind_of(b))
def test_every_statement_body_survives_the_wire_and_packs_to_the_same_bytes(body: msg.Body) -> None:
    packed = msg.pack_object(body)
    again = msg.decode_body(msg.kind_of(body), packed)
    assert again == body
    assert msg.pack_object(again) == packed


def test_all_message_classes_are_covered_by_the_examples() -> None:
    assert {type(m) for m in EXAMPLES} == set(msg.Message.__args__)
    assert {type(b) for b in BODIES} == set(msg.Body.__args__)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: msg.kind_of(m))
def test_a_flipped_or_missing_byte_is_refused_or_gives_a_valid_message_but_never_another_error(
    message: msg.Message,
) -> None:
    data = msg.encode(message)
    generator = random.Random(1)
    for _ in range(200):
        damaged = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        cut = (
            bytes(damaged[: generator.randint(0, len(damaged))])
            if generator.random() < 0.3
            else bytes(damaged)
        )
        try:
            msg.decode(cut)
        except ProtocolViolation:
            continue


def test_an_unknown_a_missing_and_a_renamed_key_are_refused() -> None:
    fields = {"nonce": 1, "wall_time_ms": 2}
    for wrong in ({**fields, "more": 1}, {"nonce": 1}, {"nonce": 1, "wall": 2}):
        with pytest.raises(ProtocolViolation):
            msg.decode(msgpack.packb(["ping", wrong]))


@pytest.mark.parametrize(
    "fields",
    [
        {"nonce": True, "wall_time_ms": 2},
        {"nonce": -1, "wall_time_ms": 2},
        {"nonce": 1 << 63, "wall_time_ms": 2},
        {"nonce": 1.0, "wall_time_ms": 2},
        {"nonce": b"1", "wall_time_ms": 2},
        {"nonce": None, "wall_time_ms": 2},
    ],
)
def test_a_value_of_the_wrong_type_or_out_of_bounds_is_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(ProtocolViolation, match="nonce"):
        msg.decode(msgpack.packb(["ping", fields]))


def test_an_infinite_loss_is_refused_and_a_missing_one_is_nan() -> None:
    good = msg.Gossip(dataclasses.replace(PROGRESS, loss=math.nan), (), ())
    again = msg.decode(msg.encode(good))
    assert isinstance(again, msg.Gossip)
    assert math.isnan(again.progress.loss)
    with pytest.raises(ProtocolViolation, match="loss"):
        msg.decode(msg.encode(msg.Gossip(dataclasses.replace(PROGRESS, loss=math.inf), (), ())))


def test_text_that_could_rewrite_a_terminal_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="printable"):
        msg.decode(msg.encode(msg.Refuse("run", "\x1b[2J", b"")))


def test_nesting_item_count_extension_types_and_trailing_bytes_are_bounded_before_decoding() -> None:
    deep = b"\x91" * 200 + b"\x00"
    wide = msgpack.packb(["ping", list(range(5000))])
    for bomb in (
        deep,
        wide,
        msgpack.packb(["ping", msgpack.ExtType(5, b"x")]),
        msg.encode(EXAMPLES[2]) + b"\x00",
    ):
        with pytest.raises(ProtocolViolation):
            msg.decode(bomb)


def test_a_declared_length_beyond_the_data_is_refused_without_allocating_it() -> None:
    for bomb in (
        b"\xc6\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff\x00",
        b"\xdf\x7f\xff\xff\xff\x00",
        b"\x92\xa4ping\xdb\xff",
    ):
        with pytest.raises(ProtocolViolation):
            msg.decode(bomb)


def test_a_pickle_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        msg.decode(pickle.dumps({"ping": 1}))


def test_only_large_kinds_may_exceed_the_control_limit() -> None:
    many = tuple(dataclasses.replace(SIGNED, body=bytes(2000)) for _ in range(40))
    with pytest.raises(ProtocolViolation, match="gossip message"):
        msg.decode(msg.encode(msg.Gossip(PROGRESS, many, ())))
    large = msg.Leaves(ZERO, 0, 30_000, bytes(32 * 24_000))
    assert msg.decode(msg.encode(large)) == large


def test_a_certificate_names_the_same_decision_whatever_quorum_signed_it() -> None:
    other = dataclasses.replace(CERTIFICATE, votes=(SIGNED,), abstentions=())
    assert other.digest() == CERTIFICATE.digest()
    assert dataclasses.replace(CERTIFICATE, state_root=bytes([1]) * 32).digest() != CERTIFICATE.digest()


def test_the_run_id_depends_on_every_field_of_genesis() -> None:
    genesis = msg.Genesis(1, b"{}", b"x", 4096, ZERO, ZERO, bytes(16))
    changes = [
        {"config": b"[]"}, {"schema": b"y"}, {"chunk_values": 8192}, {"state_root": b"\x01" * 32},
        {"founder": b"\x01" * 32}, {"nonce": b"\x01" * 16}, {"protocol": 2},
    ]  # fmt: skip
    ids = {dataclasses.replace(genesis, **change).run_id() for change in changes}
    assert len(ids | {genesis.run_id()}) == len(changes) + 1
