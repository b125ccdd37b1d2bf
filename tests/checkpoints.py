"""Tiny checkpoints with random weights, made by transformers: one for each family it covers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}


def _heads(queries: int, keys: int, **others: Any) -> dict[str, Any]:
    return {"num_attention_heads": queries, "num_key_value_heads": keys, **others}


_FAMILIES: dict[str, dict[str, Any]] = {
    "llama2": _heads(4, 4, model_type="llama"),
    "llama3": _heads(8, 2, model_type="llama", head_dim=16, rope_parameters=_LLAMA3_ROPE),
    "llama-linear-bias": _heads(
        4, 2, model_type="llama", rope_parameters=_LINEAR_ROPE, attention_bias=True, mlp_bias=True
    ),
    "mistral": _heads(4, 1, model_type="mistral", sliding_window=24),
    "qwen2": _heads(4, 2, model_type="qwen2"),
    "qwen2-window": _heads(
        4,
        1,
        model_type="qwen2",
        rope_parameters=_YARN_ROPE,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
    ),
    "qwen3": _heads(4, 2, model_type="qwen3", head_dim=32),
    "qwen3-window": _heads(
        4,
        4,
        model_type="qwen3",
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=17,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "smollm": _heads(3, 1, model_type="llama", hidden_size=48, tie_word_embeddings=True),
}
FAMILIES = tuple(_FAMILIES)


def make_checkpoint(
    family: str, folder: Path, *, max_shard_size: str = "50GB", **overrides: Any
) -> PreTrainedModel:
    """Save a checkpoint of a family in `FAMILIES` and return transformers' own float32 model.

    `overrides` replace values of its config.json. The weights depend on nothing but the family
    and the overrides; biases and norms are random too, so that a forgotten one shows.
    """
    config = AutoConfig.for_model(**{**_SIZES, **_FAMILIES[family], **overrides})
    state = torch.get_rng_state()
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
    torch.set_rng_state(state)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model.eval()
