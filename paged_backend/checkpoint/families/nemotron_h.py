"""Nemotron-H: each layer is only Mamba-2, attention, an MLP without a gate, or such experts."""

from __future__ import annotations

import math
from dataclasses import replace

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import FULL, LINEAR, layer_types
from paged_backend.checkpoint.families.mamba2 import read_mamba2
from paged_backend.checkpoint.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS
from paged_backend.checkpoint.mamba import Mamba2Shape
from paged_backend.checkpoint.moe_reader import read_nemotron_h
from paged_backend.checkpoint.shape import Biases, LayerNorms, ModuleNames, Rotary, Variant
from paged_backend.values.validation import shorten

_MLP, _EXPERTS = "mlp", "moe"
_LETTERS = {"M": LINEAR, "*": FULL, "-": _MLP, "E": _EXPERTS}
_OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}
_NAMES = ModuleNames(attention="mixer", mlp="mixer", final_norm="norm_f")
# The names that read_mamba2 knows, by those of this family.
_KEYS = {
    "conv_kernel": "mamba_d_conv",
    "layer_norm_epsilon": "rms_norm_eps",
    "layers_block_type": "layer_types",
    "mamba_head_dim": "mamba_d_head",
    "mamba_num_heads": "mamba_n_heads",
    "n_groups": "mamba_n_groups",
    "ssm_state_size": "mamba_d_state",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
}


def nemotron_h(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Nemotron-H checkpoint."""
    kinds = layer_types(config, ("",) * num_layers, known=(FULL, LINEAR, _MLP, _EXPERTS))
    shape = _mamba(config) if LINEAR in kinds else None
    return Variant(
        biases=Biases(mlp=config.flag("mlp_bias", False)),
        norms=LayerNorms(attention_input="norm", mlp_input="norm"),
        names=_NAMES,
        rotary=Rotary((None,) * num_layers),
        state_mixers=tuple(shape if kind == LINEAR else None for kind in kinds),
        moe=read_nemotron_h(config) if _EXPERTS in kinds else None,
        moe_layers=tuple(kind == _EXPERTS for kind in kinds) if _EXPERTS in kinds else (),
        only_mlp=tuple(kind in (_MLP, _EXPERTS) for kind in kinds),
        plain_mlp=True,
    )


def nemotron_h_keys(config: ConfigFile) -> ConfigFile:
    """Return a config.json of Nemotron-H with the usual names of its keys.

    The layers are given as names, or in older files as letters. Their number follows.
    """
    config = config.renamed(**_KEYS)
    kinds = config.value("layer_types")
    if kinds is None:
        pattern = config.text("hybrid_override_pattern", "M*-")
        if not set(pattern) <= set(_LETTERS):
            letters = " ".join(_LETTERS)
            raise config.error(
                "hybrid_override_pattern", f"must have letters of {letters}, got {shorten(pattern)}"
            )
        kinds = [_LETTERS[letter] for letter in pattern]
    if not isinstance(kinds, list) or not 1 <= len(kinds) <= MAX_LAYERS:
        raise config.error("layers_block_type", f"must be a list of 1 to {MAX_LAYERS} strings")
    kinds = [_OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    return config.replaced(layer_types=kinds, num_hidden_layers=len(kinds))


def _mamba(config: ConfigFile) -> Mamba2Shape:
    config.text("mamba_hidden_act", "silu", ("silu", "swish"))
    num_heads = config.integer("mamba_n_heads", high=MAX_HEADS)
    head_dim = config.integer("mamba_d_head", high=MAX_HEAD_DIM)
    shape = read_mamba2(config, num_heads * head_dim)
    least = config.number("time_step_min", 0.001)
    return replace(shape, name="mixer", dt_limits=(least, math.inf))
