"""Gemma 2 and 3: norms before and after attention and MLP, and windows in some layers."""

from __future__ import annotations

from dataclasses import replace

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import (
    FULL,
    SLIDING,
    attention_biases,
    last_of_each,
    layer_types,
    rope_section,
    rotary_by_kind,
    windows_of,
)
from paged_backend.checkpoint.shape import Activation, LayerNorms, QKNormScope, Variant

NORMS = LayerNorms(
    attention_input="input_layernorm",
    attention_output="post_attention_layernorm",
    mlp_input="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)


def gemma2(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Gemma 2 checkpoint: every other layer has a window."""
    return _gemma(config, last_of_each(2, num_layers))


def gemma3(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Gemma 3 checkpoint: five of six layers have a window."""
    period = config.integer("sliding_window_pattern", 6)
    kinds = layer_types(config, last_of_each(period, num_layers))
    local_theta = config.number("rope_local_base_freq", 10_000.0)
    older = {
        FULL: rope_section(config, rope_theta=1_000_000.0),
        SLIDING: config.with_only().with_defaults(rope_theta=local_theta),
    }
    return replace(
        _gemma(config, kinds),
        qk_norm=QKNormScope.HEAD,
        rotary=replace(rotary_by_kind(config, kinds, older), within_positions=True),
    )


def _gemma(config: ConfigFile, default: tuple[str, ...]) -> Variant:
    if config.flag("use_bidirectional_attention", False):
        raise config.error("use_bidirectional_attention", "is true, which is not supported")
    return Variant(
        biases=attention_biases(config),
        windows=windows_of(config, layer_types(config, default), default=4096),
        norms=NORMS,
        unit_offset=True,
        activation=Activation.GELU_TANH,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        attention_softcap=config.optional_number("attn_logit_softcapping"),
        logits_softcap=config.optional_number("final_logit_softcapping"),
    )
