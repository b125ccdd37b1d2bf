"""Kimi Linear: gated delta rules in most layers, latent attention in others, and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.deepseek import after_dense, read_latent, sparse_layers
from paged_backend.checkpoint.families.keys import FULL, LINEAR, attention_biases, layer_types
from paged_backend.checkpoint.limits import MAX_HEAD_DIM, MAX_HEADS
from paged_backend.checkpoint.mixers import KimiDeltaShape
from paged_backend.checkpoint.moe import KIMI_NAMES
from paged_backend.checkpoint.moe_reader import read_deepseek_v3
from paged_backend.checkpoint.shape import Biases, Rotary, Variant

# The names that other families have, by those of this one.
_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
_SIZES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def kimi_linear(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Kimi Linear checkpoint; no layer has a rotary embedding."""
    latent, biases = read_latent(config), attention_biases(config)
    kinds = _kinds(config, num_layers)
    by_name = config.value("mlp_layer_types") is not None
    moe_layers = (sparse_layers if by_name else after_dense)(config, num_layers)
    shape = KimiDeltaShape(
        hidden_size=config.integer("hidden_size"),
        num_heads=config.integer("linear_num_heads", 32, high=MAX_HEADS),
        head_dim=config.integer("linear_head_dim", 128, high=MAX_HEAD_DIM),
        width=config.integer("linear_conv_kernel_dim", 4, low=2),
    )
    moe = replace(read_deepseek_v3(config), names=KIMI_NAMES)
    return Variant(
        biases=Biases(qkv=biases.qkv, output=biases.output),
        rotary=Rotary((None,) * num_layers),
        latent=latent,
        attention_scale=latent.query_dim**-0.5,
        moe=moe if any(moe_layers) else None,
        moe_layers=moe_layers if any(moe_layers) else (),
        state_mixers=tuple(shape if kind == LINEAR else None for kind in kinds),
    )


def kimi_linear_keys(config: ConfigFile) -> ConfigFile:
    """Return a config.json of Kimi Linear with the usual names of its keys.

    Older files have sizes and numbers of layers, from 1 on, in ``linear_attn_config``.
    """
    config = config.renamed(**_KEYS)
    section = config.section("linear_attn_config")
    if section is None:
        return config
    sizes = {name: section.value(key) for key, name in _SIZES.items() if key in section}
    return config.with_absent(**sizes)


def _kinds(config: ConfigFile, num_layers: int) -> tuple[str, ...]:
    section = config.section("linear_attn_config")
    default = tuple(FULL if n and n % 4 == 0 else LINEAR for n in range(num_layers))
    if section is None or config.value("layer_types") is not None:
        return layer_types(config, default, known=(FULL, LINEAR))
    full: Any = section.value("full_attn_layers")
    state: Any = section.value("kda_layers")
    lists = [each if isinstance(each, list) else [] for each in (full, state)]
    numbers = [number for each in lists for number in each if type(number) is int]
    if sorted(numbers) != list(range(1, num_layers + 1)):
        problem = f"must have each layer from 1 to {num_layers} in one list"
        raise section.error("full_attn_layers", f"and kda_layers {problem}")
    return tuple(FULL if n in lists[0] else LINEAR for n in range(1, num_layers + 1))
