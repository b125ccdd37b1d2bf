"""RecurrentGemma: recurrent blocks in most layers, attention with a window in the others."""

from __future__ import annotations

import math
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import rotary_dim
from paged_backend.checkpoint.limits import MAX_INNER_SIZE, MAX_WINDOW
from paged_backend.checkpoint.mixers import RgLruShape
from paged_backend.checkpoint.shape import (
    Activation,
    Biases,
    LayerNorms,
    ModuleNames,
    Rotary,
    Variant,
)
from paged_backend.values.validation import shorten

_RECURRENT, _ATTENTION = "recurrent", "attention"
_NORMS = LayerNorms(attention_input="temporal_pre_norm", mlp_input="channel_pre_norm")
_NAMES = ModuleNames(attention="temporal_block", mlp="mlp_block", final_norm="final_norm")
_BOTH = "intermediate_size_of_both"


def recurrent_gemma(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a RecurrentGemma checkpoint."""
    hidden, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    shape = RgLruShape(
        hidden_size=hidden,
        values_size=config.integer("lru_width", hidden, high=MAX_INNER_SIZE),
        num_blocks=num_heads,
        width=config.integer("conv1d_width", 4, low=2),
    )
    if shape.values_size % num_heads:
        raise config.error("lru_width", f"must be a multiple of num_attention_heads ({num_heads})")
    kinds = _kinds(config, num_layers)
    window = config.integer("attention_window_size", 2048, high=MAX_WINDOW)
    return Variant(
        biases=Biases(qkv=config.flag("attention_bias", False), output=True, mlp=True),
        windows=tuple(window if kind == _ATTENTION else None for kind in kinds),
        norms=_NORMS,
        names=_NAMES,
        unit_offset=True,
        activation=Activation.GELU_TANH,
        rotary=Rotary(dim=rotary_dim(config, hidden // num_heads, default=0.5)),
        embedding_scale=_in_bfloat16(hidden**0.5),
        logits_softcap=config.number("logits_soft_cap", 30.0),
        state_mixers=tuple(shape if kind == _RECURRENT else None for kind in kinds),
    )


def recurrent_gemma_keys(config: ConfigFile) -> ConfigFile:
    """Return a config.json of RecurrentGemma with the size of one part of its MLPs.

    The file has the size of gate and up together.
    """
    both = config.value(_BOTH) or config.integer("intermediate_size", high=MAX_INNER_SIZE)
    return config.replaced(**{_BOTH: both, "intermediate_size": both // 2})


def _in_bfloat16(number: float) -> float:
    """Return a number with the 8 bits that bfloat16 has, as models are trained with it."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def _kinds(config: ConfigFile, num_layers: int) -> tuple[str, ...]:
    """Read the kind of each layer: some kinds in turns."""
    turn: Any = config.value("block_types") or [_RECURRENT, _RECURRENT, _ATTENTION]
    if not isinstance(turn, list) or not all(kind in (_RECURRENT, _ATTENTION) for kind in turn):
        raise config.error(
            "block_types", f"must be a list of {_RECURRENT} and {_ATTENTION}, got {shorten(turn)}"
        )
    return tuple(turn[layer % len(turn)] for layer in range(num_layers))
