"""OLMo 2 and 3, with norms that follow attention and MLP, and OLMoE.

All of them norm the queries and the keys of a token as a whole.
"""

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
from paged_backend.checkpoint.moe_reader import read_olmoe
from paged_backend.checkpoint.shape import LayerNorms, QKNormScope, Variant

_NORMS = LayerNorms(
    attention_input=None,
    attention_output="post_attention_layernorm",
    mlp_input=None,
    mlp_output="post_feedforward_layernorm",
)
_OLMO3_THETA = 500_000.0


def olmo2(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of an OLMo 2 checkpoint."""
    return Variant(biases=attention_biases(config), norms=_NORMS, qk_norm=QKNormScope.TOKEN)


def olmo3(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of an OLMo 3 checkpoint: three of four layers have a window."""
    kinds = layer_types(config, last_of_each(4, num_layers))
    older = {
        FULL: rope_section(config, rope_theta=_OLMO3_THETA),
        SLIDING: config.with_only("rope_theta").with_defaults(rope_theta=_OLMO3_THETA),
    }
    return replace(
        olmo2(config, num_layers),
        windows=windows_of(config, kinds, default=4096),
        rotary=rotary_by_kind(config, kinds, older),
    )


def olmoe(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of an OLMoE checkpoint."""
    return Variant(
        biases=attention_biases(config), qk_norm=QKNormScope.TOKEN, moe=read_olmoe(config)
    )
