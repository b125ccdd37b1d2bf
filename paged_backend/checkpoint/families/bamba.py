"""Bamba and Falcon-H1: Mamba-2 in place of attention in most layers, or beside it in all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import (
    FULL,
    LINEAR,
    all_biases,
    rotary_dim,
)
from paged_backend.checkpoint.families.mamba2 import read_mamba2
from paged_backend.checkpoint.limits import MAX_INNER_SIZE
from paged_backend.checkpoint.mamba import Mamba2Shape
from paged_backend.checkpoint.shape import (
    LayerFactors,
    LayerNorms,
    ModuleNames,
    Rotary,
    Variant,
)
from paged_backend.values.validation import shorten

_NORMS = LayerNorms(mlp_input="pre_ff_layernorm")
_NAMES = ModuleNames(mlp="feed_forward", final_norm="final_layernorm")


def bamba(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Bamba checkpoint."""
    indices = _numbers(config, "attn_layer_indices", ())
    kinds = tuple(FULL if layer in indices else LINEAR for layer in range(num_layers))
    shape = read_mamba2(config) if LINEAR in kinds else None
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", head_dim)
    return Variant(
        biases=all_biases(config),
        norms=_NORMS,
        names=_NAMES,
        rotary=Rotary(dim=rotary_dim(config, head_dim, default=0.5)),
        state_mixers=tuple(shape if kind == LINEAR else None for kind in kinds),
    )


def falcon_h1(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Falcon-H1 checkpoint; the factors on keys are factors on scores."""
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", head_dim)
    gate, output = _numbers(config, "mlp_multipliers", (1.0, 1.0))
    return Variant(
        biases=all_biases(config),
        norms=_NORMS,
        names=_NAMES,
        embedding_scale=config.number("embedding_multiplier", 1.0),
        attention_scale=head_dim**-0.5 * config.number("key_multiplier", 1.0),
        logits_scale=config.number("lm_head_multiplier", 1.0),
        state_mixers=(_falcon_mamba(config),) * num_layers,
        parallel_mixers=True,
        factors=LayerFactors(
            attention_input=config.number("attention_in_multiplier", 1.0),
            attention_output=config.number("attention_out_multiplier", 1.0),
            state_input=config.number("ssm_in_multiplier", 1.0),
            state_output=config.number("ssm_out_multiplier", 1.0),
            mlp_gate=gate,
            mlp_output=output,
        ),
    )


def _falcon_mamba(config: ConfigFile) -> Mamba2Shape:
    size = None
    if config.value("mamba_d_ssm") is not None:
        size = config.integer("mamba_d_ssm", high=MAX_INNER_SIZE)
    return replace(
        read_mamba2(config, size),
        out_bias=config.flag("projectors_bias", False),
        normed=config.flag("mamba_rms_norm", False),
        norm_before_gate=config.flag("mamba_norm_before_gate", True),
        factors=_numbers(config, "ssm_multipliers", (1.0,) * 5),
    )


def _numbers(config: ConfigFile, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
    """Read a list of numbers with the length of the default; of any length if that is empty."""
    numbers: Any = config.value(key)
    if numbers is None:
        return default
    is_list = isinstance(numbers, list) and len(numbers) in (len(default) or len(numbers),)
    if not is_list or not all(type(number) in (int, float) for number in numbers):
        count = f"{len(default)} " if default else ""
        raise config.error(key, f"must be a list of {count}numbers, got {shorten(numbers)}")
    return tuple(numbers)
