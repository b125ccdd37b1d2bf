"""LFM2 of Liquid AI: short convolutions in most layers, attention in the others."""

from __future__ import annotations

from dataclasses import replace

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import CONVOLUTION, FULL, layer_types
from paged_backend.checkpoint.limits import MAX_INNER_SIZE
from paged_backend.checkpoint.mixers import ShortConvShape
from paged_backend.checkpoint.moe_reader import read_lfm2_moe
from paged_backend.checkpoint.shape import LayerNorms, ModuleNames, QKNormScope, Variant
from paged_backend.values.validation import shorten

_NORMS = LayerNorms(attention_input="operator_norm", mlp_input="ffn_norm")
_NAMES = ModuleNames(
    output="out_proj",
    q_norm="q_layernorm",
    k_norm="k_layernorm",
    mlp="feed_forward",
    gate="w1",
    up="w3",
    down="w2",
    final_norm="embedding_norm",
)


def lfm2(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of an LFM2 checkpoint."""
    shape = ShortConvShape(
        hidden_size=config.integer("hidden_size"),
        width=config.integer("conv_L_cache", 3, low=2),
        bias=config.flag("conv_bias", False),
    )
    kinds = layer_types(config, _kinds(config, num_layers), known=(FULL, CONVOLUTION))
    return Variant(
        norms=_NORMS,
        names=_NAMES,
        qk_norm=QKNormScope.HEAD,
        state_mixers=tuple(shape if kind == CONVOLUTION else None for kind in kinds),
    )


def lfm2_moe(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of an LFM2 checkpoint with experts in all layers after the first ones."""
    num_dense = config.integer("num_dense_layers", 2, low=0)
    moe_layers = tuple(layer >= num_dense for layer in range(num_layers))
    return replace(
        lfm2(config, num_layers),
        moe=read_lfm2_moe(config) if any(moe_layers) else None,
        moe_layers=moe_layers if any(moe_layers) else (),
    )


def lfm2_moe_keys(config: ConfigFile) -> ConfigFile:
    """Return a config.json of LFM2 with experts with the usual names of its keys."""
    return config.renamed(norm_eps="rms_norm_eps", tie_embedding="tie_word_embeddings")


def lfm2_keys(config: ConfigFile) -> ConfigFile:
    """Return a config.json of LFM2 with the usual names of its keys, and the size of its MLPs.

    The file has the size before the MLP got a third projection, which made all of them smaller.
    """
    config = lfm2_moe_keys(config).renamed(block_ff_dim="intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return config
    inner = config.integer("intermediate_size", high=MAX_INNER_SIZE) * 2 // 3
    factor = config.with_absent(block_ffn_dim_multiplier=1.0).optional_number(
        "block_ffn_dim_multiplier"
    )
    if factor is not None:
        multiple = config.integer("block_multiple_of", 256, high=MAX_INNER_SIZE)
        inner = -(-int(factor * inner) // multiple) * multiple
    return config.replaced(intermediate_size=inner, block_auto_adjust_ff_dim=False)


def _kinds(config: ConfigFile, num_layers: int) -> tuple[str, ...]:
    """Read which layers have attention from the key of older files; all have it by default."""
    layers = config.value("full_attn_idxs")
    if layers is None:
        return (FULL,) * num_layers
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise config.error("full_attn_idxs", f"must be a list of integers, got {shorten(layers)}")
    return tuple(FULL if layer in layers else CONVOLUTION for layer in range(num_layers))
