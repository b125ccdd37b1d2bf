"""Granite: Llama with factors on the embeddings, the scores, the residuals and the logits.

Granite 4 has Mamba-2 in place of attention in most layers.
"""

from __future__ import annotations

from dataclasses import replace

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import LINEAR, all_biases, attention_biases
from paged_backend.checkpoint.families.mamba2 import hybrid_kinds, read_mamba2
from paged_backend.checkpoint.limits import MAX_INNER_SIZE
from paged_backend.checkpoint.moe_reader import read_granite
from paged_backend.checkpoint.shape import ModuleNames, Rotary, Variant

_HYBRID_NAMES = ModuleNames(mlp="shared_mlp", gate_up="input_linear", down="output_linear")


def granite(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Granite checkpoint."""
    return Variant(
        biases=all_biases(config),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        logits_scale=1.0 / config.number("logits_scaling", 1.0),
    )


def granite_hybrid(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Granite 4 checkpoint."""
    kinds = hybrid_kinds(config, (LINEAR,) * num_layers)
    shape = read_mamba2(config) if LINEAR in kinds else None
    is_rotary = config.text("position_embedding_type", "nope", ("rope", "nope")) == "rope"
    return replace(
        granite(config, num_layers),
        biases=attention_biases(config),
        names=_HYBRID_NAMES,
        rotary=Rotary() if is_rotary else Rotary((None,) * num_layers),
        fused_gate_up=True,
        moe=read_granite(config),
        state_mixers=tuple(shape if kind == LINEAR else None for kind in kinds),
    )


def granite_hybrid_keys(config: ConfigFile) -> ConfigFile:
    """Return a config.json of Granite 4 with the usual name for the size of its MLPs.

    The size of its experts gets a name that no file has.
    """
    size = "experts_intermediate_size"
    if size not in config:
        inner = config.integer("intermediate_size", 11_008, high=MAX_INNER_SIZE)
        config = config.with_absent(**{size: inner})
    return config.replaced(intermediate_size=config.integer("shared_intermediate_size", 1024))
