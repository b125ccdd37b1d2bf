"""Mamba-2, Mamba and Falcon Mamba: each layer only has a state, without attention and MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.mamba1 import read_mamba1
from paged_backend.checkpoint.families.mamba2 import read_mamba2
from paged_backend.checkpoint.limits import MAX_INNER_SIZE
from paged_backend.checkpoint.mamba import Mamba1Norms, Mamba1Shape
from paged_backend.checkpoint.mixers import StateMixer
from paged_backend.checkpoint.shape import LayerNorms, ModuleNames, Rotary, Variant

MAX_MODEL_LEN = 2**20
"""The largest number of tokens, where a file has none: states have no limit, but blocks do."""

_MIXER = "mixer"
# The names that other families have, by those of these ones.
_KEYS = {
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "head_dim": "mamba_d_head",
    "layer_norm_epsilon": "rms_norm_eps",
    "n_groups": "mamba_n_groups",
    "num_heads": "mamba_n_heads",
    "state_size": "mamba_d_state",
    "time_step_rank": "mamba_dt_rank",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
}
# Sizes of attention, of which there is none.
_UNUSED: dict[str, Any] = {
    "head_dim": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


def mamba(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Mamba checkpoint."""
    shape = _mamba1(config)
    return _only(replace(shape, norms=Mamba1Norms.NONE), num_layers)


def falcon_mamba(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Falcon Mamba checkpoint."""
    eps = config.number("mixer_rms_eps", 1e-6)
    shape = replace(_mamba1(config), norms=Mamba1Norms.PLAIN, norm_eps=eps)
    return _only(shape, num_layers)


def mamba2(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Mamba-2 checkpoint."""
    return _only(replace(read_mamba2(config), name=_MIXER), num_layers)


def mamba_keys(config: ConfigFile) -> ConfigFile:
    """Return a config.json of one of these families with the usual names of its keys."""
    if "num_attention_heads" in config:  # they are renamed already
        return config
    config = config.renamed(**_KEYS).replaced(**_UNUSED)
    inner = config.integer("mamba_expand", 2, high=MAX_INNER_SIZE) * config.integer("hidden_size")
    return config.with_absent(intermediate_size=inner, max_position_embeddings=MAX_MODEL_LEN)


def _mamba1(config: ConfigFile) -> Mamba1Shape:
    """Read the sizes of a layer of Mamba, of which the file has the number of channels."""
    size = config.integer("intermediate_size", high=MAX_INNER_SIZE)
    return replace(read_mamba1(config, size), name=_MIXER)


def _only(shape: StateMixer, num_layers: int) -> Variant:
    """Return the variant of a model that has layers with this state, and no others."""
    return Variant(
        norms=LayerNorms(attention_input="norm", mlp_input=None),
        names=ModuleNames(final_norm="norm_f"),
        rotary=Rotary((None,) * num_layers),
        state_mixers=(shape,) * num_layers,
        only_mlp=(False,) * num_layers,
    )
