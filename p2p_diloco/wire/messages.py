"""Every message that travels on a control link: one frozen dataclass each, strict decoding.

A frame body is the msgpack list ``[kind, fields]``. What a peer states for others to pass on (membership
records, READY, VIEW, VOTE, PROMISE, ABSTAIN, RECEIPT) travels as `Signed`: the body's exact bytes under
an ed25519 signature over a domain tag, the run id and the body, so a statement can be forwarded,
stored in a certificate, or shown as proof, and never means anything in another run or as another kind.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgpack

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.wire.fields import (
    blob,
    bytes_spec,
    choice,
    dump_object,
    integer,
    load_object,
    many,
    nested,
    object_spec,
    real,
    text,
    text_spec,
)
from p2p_diloco.wire.scan import scan

PROTOCOL: Final = 1
HELLO_BYTES: Final = 2 << 10  # DESIGN 6
CONTROL_BYTES: Final = 64 << 10  # DESIGN 6
LARGE_BYTES: Final = 1 << 20  # DESIGN 6
MAX_MEMBERS: Final = 256
MAX_ATTEMPT: Final = 1 << 20
MAX_REUSE: Final = 4  # earlier attempts whose chunks a view may reuse
MAX_BITMAP: Final = 8 << 10  # 65,536 chunks: 69 billion values in chunks of 2^20
MAX_UNREACHABLE: Final = 32
MAX_RATES: Final = 64  # edges whose speed one peer gossips
ZERO: Final = bytes(32)
REFUSALS: Final = (
    "protocol", "run", "schema", "config", "full", "key", "self", "lane", "bootstrap", "duplicate",
)  # fmt: skip

_U32 = (1 << 32) - 1
_U63 = (1 << 63) - 1
_ADDRESS = text_spec(128)
_PEER = bytes_spec(32)


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message on every connection. `nonce` is drawn once per process start."""

    protocol: int = integer(0, 1 << 16)
    version: str = text(32)
    mode: str = choice("full", "bootstrap", "lane")
    run_id: bytes = blob(32)
    schema_hash: bytes = blob(0, 32)
    config_hash: bytes = blob(0, 32)
    listen: tuple[str, ...] = many(_ADDRESS, 8)
    nonce: int = integer()
    wall_time_ms: int = integer()
    lane: int = integer(0, 255)


@dataclass(frozen=True, slots=True)
class Refuse:
    """Why a HELLO was turned down, in one line; `schema` lets the other side name the first difference."""

    code: str = choice(*REFUSALS)
    text: str = text(512)
    schema: bytes = blob(0, 48 << 10, default=b"")


@dataclass(frozen=True, slots=True)
class Ping:
    nonce: int = integer()
    wall_time_ms: int = integer()


@dataclass(frozen=True, slots=True)
class Pong:
    nonce: int = integer()
    wall_time_ms: int = integer()


@dataclass(frozen=True, slots=True)
class Signed:
    """A statement and its author. `body` is msgpack of the dataclass that `kind` names."""

    public_key: bytes = blob(32)
    kind: str = text(16)
    body: bytes = blob(0, 768 << 10)
    signature: bytes = blob(64)

    def digest(self) -> bytes:
        """SHA-256 of author, kind and body: names the statement (the signature is left out)."""
        hasher = hashlib.sha256(b"p2p-diloco/statement\0")
        hasher.update(self.public_key + self.kind.encode() + b"\0" + self.body)
        return hasher.digest()


_SIGNED = object_spec(Signed)


# --- statements (bodies of Signed) -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemberRecord:
    """A peer about itself. A higher (incarnation, sequence) replaces a lower one. `life` counts its starts:
    what it held in memory in an earlier life, its delta above all, is gone."""

    incarnation: int = integer()
    sequence: int = integer()
    left: int = integer(0, 1)
    addresses: tuple[str, ...] = many(_ADDRESS, 8)
    life: int = integer(default=0)


@dataclass(frozen=True, slots=True)
class Ready:
    """My delta for this epoch is final. `weight` is the tokens it was trained on. A higher (life, trial)
    replaces a lower one: the older delta is gone."""

    epoch: int = integer(1)
    previous: bytes = blob(32)
    state_root: bytes = blob(32)
    weight: int = integer(1)
    commitment: bytes = blob(32)
    life: int = integer(default=0)
    trial: int = integer(default=0)


@dataclass(frozen=True, slots=True)
class Reuse:
    """Chunks that an earlier attempt of the epoch finished, with that attempt's own contributors: its ring
    in order as signed READYs, and a bit map of the chunks (bit 0 of byte 0 is chunk 0)."""

    attempt: int = integer(0, MAX_ATTEMPT)
    readies: tuple[Signed, ...] = many(_SIGNED, MAX_MEMBERS)
    chunks: bytes = blob(1, MAX_BITMAP)


@dataclass(frozen=True, slots=True)
class View:
    """Attempt's plan by its convener. run: the ring, in order, as signed READYs, and what it reuses. adopt:
    the run view to finish (`adopted`). `promises` show that it was forced or free, and who holds finished
    chunks; `abstentions` who is not counted."""

    epoch: int = integer(1)
    previous: bytes = blob(32)
    attempt: int = integer(0, MAX_ATTEMPT)
    mode: str = choice("run", "adopt")
    readies: tuple[Signed, ...] = many(_SIGNED, MAX_MEMBERS)
    promises: tuple[Signed, ...] = many(_SIGNED, MAX_MEMBERS)
    adopted: tuple[Signed, ...] = many(_SIGNED, 1)
    abstentions: tuple[Signed, ...] = many(_SIGNED, MAX_MEMBERS)
    reuse: tuple[Reuse, ...] = many(object_spec(Reuse), MAX_REUSE, default=())


@dataclass(frozen=True, slots=True)
class Vote:
    """I hold the result of this view, applied to a copy. One per attempt, fsynced before it leaves."""

    epoch: int = integer(1)
    previous: bytes = blob(32)
    attempt: int = integer(0, MAX_ATTEMPT)
    view_hash: bytes = blob(32)
    chunk_root: bytes = blob(32)
    state_root: bytes = blob(32)


@dataclass(frozen=True, slots=True)
class Holding:
    """Chunks of one attempt's plan (by its name) that the author holds complete, with their receipts."""

    plan: bytes = blob(32)
    chunks: bytes = blob(1, MAX_BITMAP)


@dataclass(frozen=True, slots=True)
class Promise:
    """I take part in no lower attempt. `vote`/`view`: my highest vote so far and the view it was on;
    `finished`: what I hold complete, for reuse; `unreachable`: peers to which I have no working link."""

    epoch: int = integer(1)
    previous: bytes = blob(32)
    attempt: int = integer(1, MAX_ATTEMPT)
    vote: tuple[Signed, ...] = many(_SIGNED, 1)
    view: tuple[Signed, ...] = many(_SIGNED, 1)
    finished: tuple[Holding, ...] = many(object_spec(Holding), MAX_REUSE, default=())
    unreachable: tuple[bytes, ...] = many(_PEER, MAX_UNREACHABLE, default=())


@dataclass(frozen=True, slots=True)
class Abstain:
    """I have not voted in this epoch and never will: do not count me in its quorum."""

    epoch: int = integer(1)
    previous: bytes = blob(32)
    reason: str = text(128)
    leaving: int = integer(0, 1)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The owner finished this chunk of a plan; `contributors` is a bit map over the plan's order. It is
    rebuilt by whoever gets the chunk: only the signature travels, in front of the payload."""

    epoch: int = integer(1)
    plan: bytes = blob(32)
    chunk: int = integer(0, _U32)
    payload_hash: bytes = blob(32)
    contributors: bytes = blob(0, MAX_MEMBERS // 8)


@dataclass(frozen=True, slots=True)
class VoteRecord:
    """A line of the vote log: our vote and the run view whose result it is for."""

    vote: Signed = nested(Signed)
    view: Signed = nested(Signed)


@dataclass(frozen=True, slots=True)
class Convened:
    """A line of the vote log: we sent a VIEW of this attempt, and never send another."""

    epoch: int = integer(1)
    previous: bytes = blob(32)
    attempt: int = integer(0, MAX_ATTEMPT)


# --- link messages ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rumour:
    """What one member thinks of another."""

    peer: bytes = blob(32)
    incarnation: int = integer()
    status: str = choice("alive", "suspect", "dead")


@dataclass(frozen=True, slots=True)
class Progress:
    """The sender's own head and progress, for status and for pacing; never trusted for a verdict."""

    epoch: int = integer()
    state_root: bytes = blob(32)
    phase: str = choice(
        "joining", "training", "ready", "ring", "voting", "finishing", "sitting_out", "waiting", "leaving"
    )
    step: int = integer(0, _U32)
    steps: int = integer(0, _U32)
    loss: float = real()
    tokens_per_s: float = real()


@dataclass(frozen=True, slots=True)
class EdgeRate:
    """What the sender of this could send to ``peer`` when it was the link that held it up."""

    peer: bytes = blob(32)
    kbit_per_s: int = integer(1, _U32)


@dataclass(frozen=True, slots=True)
class Gossip:
    """Periodic state of the sender, news about members, the peers to which it has no working link, and
    how fast its links are."""

    progress: Progress = nested(Progress)
    records: tuple[Signed, ...] = many(_SIGNED, MAX_MEMBERS)
    rumours: tuple[Rumour, ...] = many(object_spec(Rumour), MAX_MEMBERS)
    unreachable: tuple[bytes, ...] = many(_PEER, MAX_UNREACHABLE, default=())
    rates: tuple[EdgeRate, ...] = many(object_spec(EdgeRate), MAX_RATES, default=())


@dataclass(frozen=True, slots=True)
class Probe:
    """Are you there? `target` is the peer asked after (the receiver itself, or one it should ask)."""

    nonce: int = integer()
    target: bytes = blob(32)


@dataclass(frozen=True, slots=True)
class Ack:
    nonce: int = integer()
    target: bytes = blob(32)


@dataclass(frozen=True, slots=True)
class Statement:
    """A signed statement of the epoch agreement, passed on once by everyone who had not seen it."""

    signed: Signed = nested(Signed)


@dataclass(frozen=True, slots=True)
class Equivocation:
    """Two statements by one key that contradict each other: proof for anyone (`proto.conflicts`)."""

    first: Signed = nested(Signed)
    second: Signed = nested(Signed)


@dataclass(frozen=True, slots=True)
class Certificate:
    """The verdict of one epoch: valid by its votes alone.

    `view` is the run-mode VIEW whose ring gave the result (certificate 0 has none); `abstentions` are the
    voters not counted. Contributors and weights are read from the view's READYs.
    """

    epoch: int = integer()
    previous: bytes = blob(32)
    view: tuple[Signed, ...] = many(_SIGNED, 1)
    chunk_root: bytes = blob(32)
    state_root: bytes = blob(32)
    votes: tuple[Signed, ...] = many(_SIGNED, MAX_MEMBERS)
    abstentions: tuple[Signed, ...] = many(_SIGNED, MAX_MEMBERS)

    def digest(self) -> bytes:
        """SHA-256 over what was decided; the same whichever quorum of votes is attached."""
        view = self.view[0].digest() if self.view else ZERO
        hasher = hashlib.sha256(b"p2p-diloco/certificate\0" + self.epoch.to_bytes(8, "big"))
        hasher.update(self.previous + view + self.chunk_root + self.state_root)
        return hasher.digest()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A certificate on its way to everyone."""

    certificate: Certificate = nested(Certificate)


@dataclass(frozen=True, slots=True)
class Genesis:
    """What founds a run; its hash is the run id. `config` is canonical JSON, `schema` numerics' bytes."""

    protocol: int = integer(0, 1 << 16)
    config: bytes = blob(2, 256 << 10)
    schema: bytes = blob(1, 512 << 10)
    chunk_values: int = integer(1, 1 << 24)
    state_root: bytes = blob(32)
    founder: bytes = blob(32)
    nonce: bytes = blob(16)

    def run_id(self) -> bytes:
        """SHA-256 of the record's canonical bytes, 32 bytes."""
        return hashlib.sha256(b"p2p-diloco/genesis\0" + pack_object(self)).digest()


@dataclass(frozen=True, slots=True)
class GetGenesis:
    nonce: int = integer()


@dataclass(frozen=True, slots=True)
class GenesisReply:
    genesis: Genesis = nested(Genesis)


@dataclass(frozen=True, slots=True)
class GetChain:
    """Certificates from `epoch` on, as many as fit."""

    epoch: int = integer()


@dataclass(frozen=True, slots=True)
class Chain:
    """`head` is the sender's newest epoch; `certificates` are consecutive, each packed by itself: the
    bound on a message's items holds for one certificate, not for a page of them."""

    head: int = integer()
    certificates: tuple[bytes, ...] = many(bytes_spec(1, LARGE_BYTES), 1024)


@dataclass(frozen=True, slots=True)
class GetLeaves:
    """Leaf hashes `start`.. of the state with this root."""

    root: bytes = blob(32)
    start: int = integer(0, _U32)


@dataclass(frozen=True, slots=True)
class Leaves:
    root: bytes = blob(32)
    start: int = integer(0, _U32)
    total: int = integer(0, _U32)
    hashes: bytes = blob(0, 960 << 10)


@dataclass(frozen=True, slots=True)
class GetChunk:
    """Ask for one chunk of a state; it comes as a data frame tagged with the root."""

    root: bytes = blob(32)
    chunk: int = integer(0, _U32)


@dataclass(frozen=True, slots=True)
class Gone:
    """I do not hold that state (any more), or am too busy: ask elsewhere."""

    root: bytes = blob(32)
    chunk: int = integer(0, _U32)
    why: str = choice("unknown", "busy")


Message = (
    Hello | Refuse | Ping | Pong | Gossip | Probe | Ack | Statement | Verdict | Equivocation
    | GetGenesis | GenesisReply | GetChain | Chain | GetLeaves | Leaves | GetChunk | Gone
)  # fmt: skip
Body = MemberRecord | Ready | View | Vote | Promise | Abstain | Receipt

_MESSAGES: Final[dict[str, type]] = {
    "hello": Hello, "refuse": Refuse, "ping": Ping, "pong": Pong, "gossip": Gossip, "probe": Probe,
    "ack": Ack, "statement": Statement, "verdict": Verdict, "equivocation": Equivocation,
    "get_genesis": GetGenesis, "genesis": GenesisReply, "get_chain": GetChain, "chain": Chain,
    "get_leaves": GetLeaves, "leaves": Leaves, "get_chunk": GetChunk, "gone": Gone,
}  # fmt: skip
_BODIES: Final[dict[str, type]] = {
    "member": MemberRecord, "ready": Ready, "view": View, "vote": Vote, "promise": Promise,
    "abstain": Abstain, "receipt": Receipt,
}  # fmt: skip
_KIND_OF: Final = {cls: kind for kind, cls in (_MESSAGES | _BODIES).items()}
# Kinds that may exceed CONTROL_BYTES: they carry many signatures or hashes.
LARGE_KINDS: Final = frozenset({"statement", "verdict", "equivocation", "genesis", "chain", "leaves"})

B = TypeVar("B")


def kind_of(message: Message | Body) -> str:
    """The word for a message class on the wire."""
    return _KIND_OF[type(message)]


def is_large(message: Message) -> bool:
    """True if this kind may be as long as LARGE_BYTES; all others end at CONTROL_BYTES."""
    return _KIND_OF[type(message)] in LARGE_KINDS


def pack_object(value: Any) -> bytes:
    """Canonical msgpack of one message object."""
    return bytes(msgpack.packb(dump_object(value), use_bin_type=True))


def encode(message: Message) -> bytes:
    """The body of a control frame."""
    return bytes(msgpack.packb([_KIND_OF[type(message)], dump_object(message)], use_bin_type=True))


def decode(data: bytes, limit_bytes: int = LARGE_BYTES) -> Message:
    """Strictly decode a control frame's body.

    Raises ProtocolViolation on anything but one well-formed message within the limits.
    """
    if len(data) > limit_bytes:
        raise ProtocolViolation(f"message of {len(data)} bytes where {limit_bytes} are allowed")
    value = _unpack(data)
    if type(value) is not list or len(value) != 2 or type(value[0]) is not str:
        raise ProtocolViolation("message is not [kind, fields]")
    kind = value[0]
    cls = _MESSAGES.get(kind)
    if cls is None:
        raise ProtocolViolation(f"unknown message kind {kind[:16]!r}")
    if len(data) > CONTROL_BYTES and kind not in LARGE_KINDS:
        raise ProtocolViolation(f"{kind} message of {len(data)} bytes where {CONTROL_BYTES} are allowed")
    message: Message = load_object(cls, value[1], kind)
    return message


def decode_body(kind: str, body: bytes) -> Body:
    """Strictly decode the body of a `Signed`; raises ProtocolViolation."""
    cls = _BODIES.get(kind)
    if cls is None:
        raise ProtocolViolation(f"unknown statement kind {kind[:16]!r}")
    decoded: Body = load_object(cls, _unpack(body), kind)
    return decoded


def unpack_object(cls: type[B], data: bytes) -> B:
    """Strictly decode one object that `pack_object` wrote (files on disk use this)."""
    return load_object(cls, _unpack(data), cls.__name__)


def _unpack(data: bytes) -> Any:
    scan(data)
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=True)
    except (ValueError, UnicodeDecodeError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolViolation(f"message is not msgpack: {error}") from None
