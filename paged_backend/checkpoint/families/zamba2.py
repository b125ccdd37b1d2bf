"""Zamba 2: Mamba-2 in all layers, before which some layers use blocks of attention and an MLP."""

from __future__ import annotations

from dataclasses import replace

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import LINEAR, layer_types
from paged_backend.checkpoint.families.mamba2 import read_mamba2
from paged_backend.checkpoint.limits import MAX_HEADS, MAX_INNER_SIZE, MAX_LAYERS
from paged_backend.checkpoint.shape import LayerNorms, ModuleNames, Rotary, Variant
from paged_backend.checkpoint.shared_blocks import SharedBlocks

_HYBRID = "hybrid"
_OLDER_KINDS = {"mamba": LINEAR}
_NORM_EPS = 1e-5  # Mamba-2 has this epsilon, whatever the file says
# The names that read_mamba2 knows, by those of this family.
_KEYS = {
    "add_bias_linear": "mamba_proj_bias",
    "mamba_ngroups": "mamba_n_groups",
    "n_mamba_heads": "mamba_n_heads",
}


def zamba2(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Zamba 2 checkpoint."""
    if config.flag("use_long_context", False):
        raise config.error("use_long_context", "is true, which is not supported")
    if not config.flag("tie_word_embeddings", True):  # transformers then has no shared blocks
        raise config.error("tie_word_embeddings", "can only be true for a model with shared blocks")
    kinds = layer_types(config, _default_kinds(num_layers), known=(LINEAR, _HYBRID))
    least = config.number("time_step_min", 0.001), float("inf")
    shape = replace(read_mamba2(config), dt_limits=least, norm_eps=_NORM_EPS, conv_bias=True)
    shapes = {LINEAR: shape, _HYBRID: replace(shape, name="mamba_decoder.mamba")}
    norms = LayerNorms(attention_input="input_layernorm", mlp_input=None)
    before = {
        LINEAR: norms,
        _HYBRID: replace(norms, attention_input=f"mamba_decoder.{norms.names[0]}"),
    }
    has_positions = config.flag("use_mem_rope", False)
    return Variant(
        layer_norms=tuple(before[kind] for kind in kinds),
        names=ModuleNames(final_norm="final_layernorm"),
        rotary=Rotary() if has_positions else Rotary((None,) * num_layers),
        attention_scale=(config.integer("head_dim") / 2) ** -0.5,
        state_mixers=tuple(shapes[kind] for kind in kinds),
        only_mlp=(False,) * num_layers,
        shared_blocks=_blocks(config, kinds),
    )


def zamba2_keys(config: ConfigFile) -> ConfigFile:
    """Return a config.json of Zamba 2 with the usual names of its keys.

    Attention reads rows of twice the hidden size, which its heads divide.
    """
    config = config.renamed(**_KEYS)
    kinds = config.value("layers_block_type") or config.value("layer_types")
    if isinstance(kinds, list):
        kinds = [_OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads", 32)
    if 2 * hidden % heads:
        raise config.error("num_attention_heads", f"({heads}) must divide {2 * hidden}")
    inner = config.integer("intermediate_size", 4 * hidden, high=MAX_INNER_SIZE)
    return config.replaced(
        layer_types=kinds,
        head_dim=2 * hidden // heads,
        intermediate_size=inner,
        num_attention_heads=heads,
    )


def _blocks(config: ConfigFile, kinds: tuple[str, ...]) -> SharedBlocks:
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    has_adapters = config.flag("use_shared_attention_adapter", False)
    if has_adapters and config.integer("num_key_value_heads", heads) != heads:
        raise config.error(
            "num_key_value_heads", f"must be {heads} if use_shared_attention_adapter is true"
        )
    return SharedBlocks(
        layers=tuple(layer for layer, kind in enumerate(kinds) if kind == _HYBRID),
        num_blocks=config.integer("num_mem_blocks", 1, high=MAX_LAYERS),
        rank=config.integer("adapter_rank", 128, high=MAX_INNER_SIZE),
        attention_adapters=has_adapters,
        bias=config.flag("mamba_proj_bias", False),
    )


def _default_kinds(num_layers: int) -> tuple[str, ...]:
    """Return the kinds of layers of the models with 54 layers."""
    hybrids = {*range(6, 43, 6), 47, 51}
    return tuple(_HYBRID if layer in hybrids else LINEAR for layer in range(num_layers))
