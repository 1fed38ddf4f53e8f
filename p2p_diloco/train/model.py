"""The Llama-3-style model, built sharded: no rank ever holds all of it."""

from __future__ import annotations

import hashlib
from typing import Any, cast

import torch

# The module itself, not the package's lazy front: that would import much more than is needed.
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from p2p_diloco.config import ModelConfig


def llama_config(config: ModelConfig) -> LlamaConfig:
    """The transformers config of a run's model."""
    options: dict[str, Any] = {"attn_implementation": "sdpa"}
    if hasattr(LlamaConfig(), "rope_parameters"):  # transformers 5
        options["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    else:
        options["rope_theta"] = config.rope_theta
    return LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        initializer_range=config.init_std,
        use_cache=False,
        **options,
    )


def build_on_meta(config: ModelConfig) -> torch.nn.Module:
    """The model without storage, parameters in the run's master dtype."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(config))
    return cast(torch.nn.Module, model.to(getattr(torch, config.dtype)))


def materialise(model: torch.nn.Module, config: ModelConfig, device: torch.device) -> None:
    """Give a (sharded) meta model storage on ``device``; weights are undefined until `initial_values`.

    Buffers have no values either after that, so the rotary frequencies are computed anew.
    """
    model.to_empty(device=device)
    llama = cast(Any, model)
    llama.model.rotary_emb = LlamaRotaryEmbedding(llama_config(config)).to(device)
    if config.tie_embeddings:
        llama.lm_head.weight = llama.model.embed_tokens.weight


def initial_values(name: str, shape: tuple[int, ...], seed: int, std: float) -> torch.Tensor:
    """Initial fp32 values of one whole parameter, on the CPU.

    Norm scales are ones, everything else is normal(0, ``std``) as in transformers' Llama. The generator is
    seeded by (seed, name): values depend neither on the number of ranks nor on the order of parameters.
    """
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"p2p-diloco/init/{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
