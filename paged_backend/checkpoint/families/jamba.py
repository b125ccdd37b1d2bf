"""Jamba: Mamba in most layers, attention without positions in the others, experts in some."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.mamba1 import read_mamba1
from paged_backend.checkpoint.limits import MAX_EXPERTS
from paged_backend.checkpoint.moe_reader import read_jamba
from paged_backend.checkpoint.shape import LayerNorms, ModuleNames, Rotary, Variant


def jamba(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Jamba checkpoint."""
    has_attention = _each(config, "attn_layer", num_layers, period=8, offset=4)
    moe_layers = _each(config, "expert_layer", num_layers, period=2, offset=1)
    has_experts = config.integer("num_experts", high=MAX_EXPERTS) > 1 and any(moe_layers)
    shape = read_mamba1(config)
    return Variant(
        norms=LayerNorms(mlp_input="pre_ff_layernorm"),
        names=ModuleNames(mlp="feed_forward", final_norm="final_layernorm"),
        rotary=Rotary((None,) * num_layers),
        state_mixers=tuple(None if attention else shape for attention in has_attention),
        moe=read_jamba(config) if has_experts else None,
        moe_layers=moe_layers if has_experts else (),
    )


def _each(
    config: ConfigFile, key: str, num_layers: int, *, period: int, offset: int
) -> tuple[bool, ...]:
    """Read which layers are of a kind: one of each period, with an offset."""
    period = config.integer(f"{key}_period", period)
    offset = config.integer(f"{key}_offset", offset, low=0, high=period - 1)
    return tuple(layer % period == offset for layer in range(num_layers))
