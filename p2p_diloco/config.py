"""Run config (what all peers share; its hash is part of the run id) and peer config (local).

Every default carries its source in the field's description, or says that it is a guess. A TOML file has
two tables, ``[run]`` and ``[peer]``; command-line flags (``--run.inner.steps 50``) override it. Unknown
keys and impossible values are refused with one line that names the key.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from p2p_diloco.errors import ConfigError


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class ModelConfig(_Frozen):
    """A Llama-3-style decoder, built through transformers."""

    vocab_size: int = Field(
        256, ge=2, le=1 << 20, description="Token ids. Source: one per byte value, for byte-level data."
    )
    hidden_size: int = Field(
        128, ge=8, le=1 << 16, description="Width. Guess: small enough for three peers on two cores."
    )
    intermediate_size: int = Field(
        352, ge=8, le=1 << 18, description="MLP width. Source: Llama's 8/3 of the width, rounded."
    )
    layers: int = Field(4, ge=1, le=512, description="Decoder blocks. Guess: fits the CPU demo.")
    heads: int = Field(4, ge=1, le=512, description="Attention heads. Source: 32 or more values a head.")
    kv_heads: int = Field(2, ge=1, le=512, description="Key/value heads. Source: Llama 3 groups queries.")
    max_seq_len: int = Field(
        2048, ge=8, le=1 << 20, description="Longest sequence the positions allow. Guess."
    )
    rope_theta: float = Field(500_000.0, gt=0, description="Rotary base. Source: Llama 3 (arXiv:2407.21783).")
    norm_eps: float = Field(1e-5, gt=0, description="RMSNorm epsilon. Source: Llama 3.")
    tie_embeddings: bool = Field(False, description="Share input and output embeddings. Source: Llama 3 8B.")
    init_std: float = Field(0.02, gt=0, description="Initial weights' deviation. Source: transformers Llama.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Master weights in the trainer. Source: DESIGN 13, fp32 master weights."
    )

    @model_validator(mode="after")
    def _shapes_fit(self) -> ModelConfig:
        if self.hidden_size % self.heads:
            raise ValueError("hidden_size must be a multiple of heads")
        if self.heads % self.kv_heads:
            raise ValueError("heads must be a multiple of kv_heads")
        return self


class InnerConfig(_Frozen):
    """What a peer does between two outer steps."""

    steps: int = Field(
        100, ge=1, le=100_000, description="Inner steps H per epoch. Source: INTELLECT-1 (arXiv:2412.01152)."
    )
    lr: float = Field(1e-3, gt=0, le=1.0, description="Peak AdamW learning rate. Guess for small models.")
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW beta1. Source: INTELLECT-1.")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW beta2. Source: INTELLECT-1.")
    weight_decay: float = Field(0.1, ge=0, description="AdamW decay. Source: INTELLECT-1.")
    clip_norm: float = Field(1.0, gt=0, description="Gradient norm limit. Source: INTELLECT-1.")
    batch_sequences: int = Field(8, ge=1, description="Sequences per inner step and peer. Guess for CPU.")
    micro_batch_sequences: int = Field(
        8, ge=1, description="Sequences per forward pass and rank. Guess for CPU."
    )
    seq_len: int = Field(128, ge=2, description="Tokens per sequence. Guess for CPU.")
    z_loss: float = Field(
        2e-4, ge=0, description="Weight of mean(max logit^2). Source: INTELLECT-1's max-z-loss."
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Forward/backward type. Guess: fp32 for CPUs; use bfloat16 on GPUs."
    )


class OuterConfig(_Frozen):
    """Nesterov SGD over the averaged pseudo-gradient."""

    lr: float = Field(0.7, gt=0, le=10, description="Outer learning rate. Source: DiLoCo (arXiv:2311.08105).")
    momentum: float = Field(0.9, ge=0, lt=1, description="Outer momentum. Source: DiLoCo.")


class CodecConfig(_Frozen):
    """How pseudo-gradients travel."""

    kind: Literal["int8", "fp32"] = Field(
        "int8", description="int8 blockwise absmax, or raw fp32 for exactness tests. Source: DESIGN 9."
    )


class ScheduleConfig(_Frozen):
    """Warm-up, stable, decay over the *global* inner step (epoch * H + step)."""

    warmup_steps: int = Field(20, ge=0, description="Linear warm-up. Guess: some percent of a short run.")
    total_steps: int = Field(
        100_000, ge=1, description="Global step at which the rate reaches its floor. Guess."
    )
    decay_steps: int = Field(
        20_000, ge=0, description="Length of the 1-sqrt decay. Source: WSD uses about 20% (arXiv:2405.18392)."
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Floor of the rate. Source: arXiv:2405.18392.")

    @model_validator(mode="after")
    def _phases_fit(self) -> ScheduleConfig:
        if self.warmup_steps + self.decay_steps > self.total_steps:
            raise ValueError("warmup_steps + decay_steps must not exceed total_steps")
        return self


class SourceConfig(_Frozen):
    """One part of the data mix. `stdlib` needs nothing; `folder` is found by name in `peer.data_paths`."""

    name: str = Field("stdlib", min_length=1, max_length=64, description="Name of the source. Source: ours.")
    kind: Literal["stdlib", "folder"] = Field(
        "stdlib",
        description="stdlib: the source text of Python's standard library; folder: .txt/.py/.jsonl files "
        "under a local path. Source: DESIGN 13.",
    )
    weight: float = Field(1.0, gt=0, description="Share of the mix, relative. Guess: equal parts.")


class DataConfig(_Frozen):
    """The data mix that every peer draws its own share from."""

    sources: tuple[SourceConfig, ...] = Field(
        (SourceConfig(),), min_length=1, max_length=64, description="The mix. Source: DESIGN 13."
    )
    tokenizer: Literal["bytes"] = Field("bytes", description="Byte-level tokens. Source: DESIGN 13.")
    holdout_fraction: float = Field(
        0.02, gt=0, lt=0.5, description="Files held out for evaluation, chosen by hash. Guess."
    )
    eval_sequences: int = Field(32, ge=1, le=4096, description="Held-out sequences per evaluation. Guess.")


class AgreementConfig(_Frozen):
    """Who may convene and how much is a quorum."""

    min_peers: int = Field(
        1, ge=1, le=1024, description="READY peers needed before epoch 1 is convened. Source: DESIGN 8."
    )
    quorum: Literal["majority", "two_thirds"] = Field(
        "majority", description="Share of the last voters that certifies. Source: DESIGN 8."
    )
    max_weight_tokens: int = Field(
        1 << 40, ge=1, description="Cap on one peer's weight (tokens in an epoch). Guess: no real cap."
    )
    epochs: int = Field(0, ge=0, description="Stop after this many epochs; 0 trains on. Source: ours.")


class RunConfig(_Frozen):
    """What all peers must share."""

    name: str = Field("diloco", min_length=1, max_length=64, description="A human name. Source: ours.")
    seed: int = Field(0, ge=0, lt=1 << 63, description="Seed of weights and data order. Source: ours.")
    chunk_values: int = Field(
        0,
        ge=0,
        le=1 << 24,
        description="Values per chunk; 0 chooses 2^20, less for small models. Source: DESIGN 2.",
    )
    model: ModelConfig = Field(default_factory=ModelConfig, description="Model.")
    inner: InnerConfig = Field(default_factory=InnerConfig, description="Inner optimiser.")
    outer: OuterConfig = Field(default_factory=OuterConfig, description="Outer optimiser.")
    codec: CodecConfig = Field(default_factory=CodecConfig, description="Wire codec.")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="Learning rate schedule.")
    data: DataConfig = Field(default_factory=DataConfig, description="Data mix.")
    agreement: AgreementConfig = Field(default_factory=AgreementConfig, description="Epoch agreement.")

    @model_validator(mode="after")
    def _lengths_fit(self) -> RunConfig:
        if self.inner.seq_len > self.model.max_seq_len:
            raise ValueError("inner.seq_len must not exceed model.max_seq_len")
        if self.data.tokenizer == "bytes" and self.model.vocab_size < 256:
            raise ValueError("model.vocab_size must be at least 256 for byte-level tokens")
        return self

    def canonical_bytes(self) -> bytes:
        """The one JSON text of this config (sorted keys, no spaces); the same on every peer."""
        data = self.model_dump(mode="json")
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    def hash(self) -> bytes:
        """SHA-256 of `canonical_bytes`, 32 bytes."""
        return hashlib.sha256(self.canonical_bytes()).digest()


class TimeoutConfig(_Frozen):
    """Deadlines, in seconds. All are local and monotonic; clocks of peers are never compared."""

    handshake_s: float = Field(5.0, gt=0, description="TLS and HELLO. Source: DESIGN 6.")
    dial_s: float = Field(5.0, gt=0, description="One TCP connect. Guess: 3 SYN retries do not help.")
    ping_s: float = Field(5.0, gt=0, description="Silence before a control link pings. Source: DESIGN 6.")
    idle_s: float = Field(20.0, gt=0, description="Silence that closes a control link. Guess: 4 pings.")
    stall_s: float = Field(15.0, gt=0, description="No byte on a lane that owes some. Source: DESIGN 6.")
    view_s: float = Field(10.0, gt=0, description="Wait for a VIEW after a promise; doubles. Guess.")
    vote_s: float = Field(10.0, gt=0, description="Wait for votes after the own vote; doubles. Guess.")
    timeout_cap_s: float = Field(120.0, gt=0, description="Ceiling of the doubling time-outs. Guess.")
    straggler_s: float = Field(
        20.0, ge=0, description="Once half are READY, slower peers stop early after this. Guess."
    )
    request_s: float = Field(15.0, gt=0, description="One state request to a donor. Guess: as stall_s.")
    leave_s: float = Field(5.0, gt=0, description="From Ctrl-C to the end of the process. Source: ours.")


class GossipConfig(_Frozen):
    """SWIM rhythm, in seconds. Sources: SWIM (Das 2002), Lifeguard (arXiv:1707.00788), DESIGN 7."""

    interval_s: float = Field(0.5, gt=0, description="Between gossip rounds. Source: DESIGN 7.")
    fanout: int = Field(4, ge=1, le=64, description="Peers per gossip round. Source: DESIGN 7.")
    probe_s: float = Field(1.0, gt=0, description="Between probes. Source: memberlist's LAN default.")
    probe_timeout_s: float = Field(1.0, gt=0, description="Wait for an ack. Guess: twice a slow WAN trip.")
    indirect_probes: int = Field(3, ge=0, le=16, description="Helpers asked. Source: SWIM's k = 3.")
    suspicion_s: float = Field(5.0, gt=0, description="From suspect to dead. Source: memberlist, about 5.")
    full_exchange_s: float = Field(60.0, gt=0, description="Between full exchanges. Source: DESIGN 7.")


class PeerConfig(_Frozen):
    """What only this machine cares about."""

    initial_peers: tuple[str, ...] = Field(
        (), max_length=64, description="Multiaddrs of running peers; none founds a run. Source: hivemind."
    )
    run_id: str = Field("", max_length=64, description="Join only this run (base32). Source: ours.")
    run_dir: Path = Field(
        Path("runs/peer"), description="Key, chain, vote log, metrics, checkpoints. Source: ours."
    )
    host: str = Field("0.0.0.0", description="Address to listen on. Source: reachable by default.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 takes a free one. Source: ours.")
    dht_port: int = Field(0, ge=0, le=65535, description="The DHT's port; 0 takes a free one. Source: ours.")
    announce: tuple[str, ...] = Field(
        (),
        max_length=8,
        description="host:port addresses to announce instead of the found ones."
        " Source: needed behind port forwarding.",
    )
    lanes: int = Field(2, ge=1, le=64, description="Connections per ring edge. Guess until measured.")
    workers: int = Field(2, ge=1, le=256, description="Numerics threads. Guess: leaves the loop a core.")
    window_chunks: int = Field(
        16, ge=1, le=4096, description="Own chunks under way at once; bounds memory. Guess."
    )
    ranks: int = Field(1, ge=1, le=64, description="Trainer processes (one per GPU). Source: one GPU.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to train. Source: ours.")
    trainer_threads: int = Field(
        0, ge=0, le=1024, description="CPU threads per trainer rank; 0 leaves torch's choice. Source: torch."
    )
    trainer_restarts: int = Field(
        3, ge=0, le=100, description="Trainer crashes forgiven within one run. Guess."
    )
    trainer_seed: int = Field(
        0,
        ge=0,
        description="Seed of weights before the state is fetched; of no effect afterwards."
        " Source: lets tests prove that.",
    )
    data_paths: dict[str, Path] = Field(
        default_factory=dict, description="Local folders of `folder` sources, by name. Source: ours."
    )
    max_connections: int = Field(125, ge=4, le=4096, description="Open links. Source: DESIGN 6.")
    max_pending: int = Field(50, ge=1, le=4096, description="Unfinished handshakes. Source: DESIGN 6.")
    checkpoint_every_epochs: int = Field(
        10, ge=0, description="Write a checkpoint this often, and when leaving; 0 never. Guess."
    )
    checkpoint_keep: int = Field(2, ge=1, le=1000, description="Newest checkpoints kept. Guess.")
    stop_after_epochs: int = Field(
        0, ge=0, description="Leave after the run reached this epoch; 0 stays. Source: ours."
    )
    timeouts: TimeoutConfig = Field(default_factory=TimeoutConfig, description="Deadlines.")
    gossip: GossipConfig = Field(default_factory=GossipConfig, description="Membership rhythm.")


C = TypeVar("C", bound=BaseModel)


def build_config(cls: type[C], data: dict[str, Any], where: str) -> C:
    """Validate ``data`` as ``cls``; raise ConfigError with one line that names the first bad key."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join([where, *(str(part) for part in first["loc"])])
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"unknown key {key}") from None
        shown = repr(first.get("input"))
        value = "" if isinstance(first.get("input"), dict) else f" (got {shown[:80]})"
        raise ConfigError(f"{key}: {first['msg']}{value}") from None


def read_toml(path: Path) -> dict[str, Any]:
    """Read a config file; raise ConfigError if it is missing, not TOML, or has unknown tables."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    for key in data:
        if key not in ("run", "peer"):
            raise ConfigError(f"unknown key {key} in {path}; the tables are [run] and [peer]")
        if not isinstance(data[key], dict):
            raise ConfigError(f"{key} in {path} must be a table")
    return data


def first_difference(ours: RunConfig, theirs: RunConfig) -> str:
    """Name the first key on which two run configs differ, with both values; '' if they are equal."""
    return _difference(ours.model_dump(mode="json"), theirs.model_dump(mode="json"), "run")


def _difference(ours: Any, theirs: Any, where: str) -> str:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(set(ours) | set(theirs)):
            found = _difference(ours.get(key), theirs.get(key), f"{where}.{key}")
            if found:
                return found
        return ""
    return "" if ours == theirs else f"{where} is {ours!r} here and {theirs!r} in the run"
