"""Jamba: Mamba in most layers, attention without positions in the others, experts in some."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.limits import MAX_EXPERTS, MAX_HEAD_DIM, MAX_INNER_SIZE
from paged_backend.checkpoint.mixers import Mamba1Shape
from paged_backend.checkpoint.moe_reader import read_jamba
from paged_backend.checkpoint.shape import LayerNorms, ModuleNames, Rotary, Variant


def jamba(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Jamba checkpoint."""
    has_attention = _each(config, "attn_layer", num_layers, period=8, offset=4)
    moe_layers = _each(config, "expert_layer", num_layers, period=2, offset=1)
    has_experts = config.integer("num_experts", high=MAX_EXPERTS) > 1 and any(moe_layers)
    shape = _mamba(config)
    return Variant(
        norms=LayerNorms(mlp_input="pre_ff_layernorm"),
        names=ModuleNames(mlp="feed_forward", final_norm="final_layernorm"),
        rotary=Rotary((None,) * num_layers),
        state_mixers=tuple(None if attention else shape for attention in has_attention),
        moe=read_jamba(config) if has_experts else None,
        moe_layers=moe_layers if has_experts else (),
    )


def _mamba(config: ConfigFile) -> Mamba1Shape:
    hidden = config.integer("hidden_size")
    if config.value("mamba_dt_rank") == "auto":
        config = config.replaced(mamba_dt_rank=None)
    return Mamba1Shape(
        hidden_size=hidden,
        values_size=config.integer("mamba_expand", 2, high=MAX_INNER_SIZE) * hidden,
        state_dim=config.integer("mamba_d_state", 16, high=MAX_HEAD_DIM),
        rank=config.integer("mamba_dt_rank", -(-hidden // 16), high=MAX_INNER_SIZE),
        width=config.integer("mamba_d_conv", 4, low=2),
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
    )


def _each(
    config: ConfigFile, key: str, num_layers: int, *, period: int, offset: int
) -> tuple[bool, ...]:
    """Read which layers are of a kind: one of each period, with an offset."""
    period = config.integer(f"{key}_period", period)
    offset = config.integer(f"{key}_offset", offset, low=0, high=period - 1)
    return tuple(layer % period == offset for layer in range(num_layers))
