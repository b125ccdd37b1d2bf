"""OLMo 2, 3 and Hybrid, with norms that follow attention and MLP, and OLMoE.

All of them norm the queries and the keys of a token as a whole.
"""

from __future__ import annotations

from dataclasses import replace

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import (
    FULL,
    LINEAR,
    SLIDING,
    attention_biases,
    last_of_each,
    layer_types,
    rope_section,
    rotary_by_kind,
    windows_of,
)
from paged_backend.checkpoint.families.qwen import read_delta
from paged_backend.checkpoint.mixers import DeltaLayout
from paged_backend.checkpoint.moe_reader import read_olmoe
from paged_backend.checkpoint.shape import LayerNorms, QKNormScope, Rotary, Variant

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


def olmo_hybrid(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of an OLMo Hybrid checkpoint: three of four layers have linear attention.

    Norms are before linear attention and the MLP after it, but after attention and its MLP. The
    epsilon of the norm of a head is no key of the file.
    """
    kinds = layer_types(config, _hybrid_kinds(num_layers), known=(FULL, LINEAR))
    num_heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    config = config.with_defaults(linear_num_key_heads=num_heads, linear_num_value_heads=num_heads)
    key_dim = 3 * hidden // (4 * config.integer("linear_num_key_heads"))
    config = config.with_defaults(linear_key_head_dim=key_dim)
    value_dim = 2 * config.integer("linear_key_head_dim")
    config = config.with_defaults(linear_value_head_dim=value_dim)
    max_beta = 2.0 if config.flag("linear_allow_neg_eigval", True) else 1.0
    shape = replace(read_delta(config, DeltaLayout.SEPARATE), max_beta=max_beta, norm_eps=1e-5)
    is_rotary = rope_section(config).value("rope_theta") is not None
    return replace(
        olmo2(config, num_layers),
        layer_norms=tuple(LayerNorms() if kind == LINEAR else _NORMS for kind in kinds),
        rotary=Rotary() if is_rotary else Rotary((None,) * num_layers),
        state_mixers=tuple(shape if kind == LINEAR else None for kind in kinds),
    )


def _hybrid_kinds(num_layers: int) -> tuple[str, ...]:
    """Return the kinds of layers of a file that does not say; one has attention at least."""
    kinds = [FULL if layer % 4 == 3 else LINEAR for layer in range(num_layers)]
    if FULL not in kinds:
        kinds[-1] = FULL
    return tuple(kinds)


def olmoe(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of an OLMoE checkpoint."""
    return Variant(
        biases=attention_biases(config), qk_norm=QKNormScope.TOKEN, moe=read_olmoe(config)
    )
