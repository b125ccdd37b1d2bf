"""Reads the sizes of a decoder from its config.json, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.context_length import (
    PROPORTIONAL,
    context_length,
    default_length,
    rope_type,
)
from paged_backend.checkpoint.families.defaults import with_family_defaults
from paged_backend.checkpoint.families.keys import rope_section
from paged_backend.checkpoint.limits import MAX_EXPERTS_OF_MODEL, MAX_POSITIONS
from paged_backend.checkpoint.registry import (
    ARCHITECTURES,
    Architecture,
    find_architecture,
    has_classifier,
    has_output_layer,
)
from paged_backend.checkpoint.shape import ModelShape, Variant
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

DTYPES = ("float32", "bfloat16", "float16")

# Settings that few families implement, each with the values that mean "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "is_encoder_decoder": (None, False),
    "is_causal": (None, True),
}


def read_shape(config: ConfigFile) -> ModelShape:
    """Read the sizes in a config.json.

    Raises:
        ConfigError: a key is missing or wrong, or the model is not supported.
    """
    name = find_architecture(config)
    config = with_family_defaults(config, name)
    architecture = ARCHITECTURES[name]
    for key, off in _OFF.items():
        if key not in architecture.own_keys and config.value(key) not in off:
            raise _unsupported(config, key)
    if not architecture.activation.is_computed(config):
        raise _unsupported(config, architecture.activation.key)
    num_heads = config.integer("num_attention_heads")
    num_layers = config.integer("num_hidden_layers")
    variant = architecture.variant(config, num_layers)
    _check_experts(config, variant, num_layers)
    layers = range(num_layers)
    if not any(variant.has_attention(n) or variant.state_mixer_of(n) for n in layers):
        raise config.error("num_hidden_layers", "layers have neither attention nor a state")
    longest, latent = _context_length(config, variant), variant.latent
    return ModelShape(
        architecture=name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=1 if latent else _num_kv_heads(config, num_heads),
        head_dim=latent.rotary_dim if latent else _head_dim(config, architecture, num_heads),
        max_position_embeddings=longest,
        default_max_model_len=default_length(_rope_sections(config, variant), longest),
        tied_embeddings=config.flag("tie_word_embeddings", architecture.tied_embeddings),
        has_output_layer=has_output_layer(config),
        has_classifier=has_classifier(config),
        variant=variant,
    )


def computes(config: ConfigFile) -> bool:
    """Return False for settings of a supported architecture that only transformers implements.

    They are activations of the MLP, and rotary embeddings of a part of each head, in families whose
    checkpoints usually have neither.

    Raises:
        ConfigError: a key is missing or wrong, or the model is not supported.
    """
    name = find_architecture(config)
    config = with_family_defaults(config, name)
    architecture = ARCHITECTURES[name]
    if not architecture.activation.is_computed(config):
        return False
    rotary = architecture.variant(config, config.integer("num_hidden_layers")).rotary
    sections = rotary.sections or [rope_section(config)]
    parts = (
        section.value("partial_rotary_factor")
        for section in sections
        if section is not None and rope_type(section) != PROPORTIONAL
    )
    return rotary.dim is not None or all(part in (None, 1) for part in parts)


def _unsupported(config: ConfigFile, key: str) -> ConfigError:
    return config.error(key, f"is {shorten(config.value(key))}, which is not supported")


def read_max_positions(config: ConfigFile) -> int:
    """Read ``max_position_embeddings`` as it stands in the file, whatever scaling there is."""
    return config.integer("max_position_embeddings", high=MAX_POSITIONS)


def _context_length(config: ConfigFile, variant: Variant) -> int:
    max_positions = read_max_positions(config)
    if variant.rotary.within_positions:
        return max_positions
    return context_length(_rope_sections(config, variant), max_positions)


def _rope_sections(config: ConfigFile, variant: Variant) -> Sequence[ConfigFile | None]:
    return variant.rotary.sections or [rope_section(config)]


def _check_experts(config: ConfigFile, variant: Variant, num_layers: int) -> None:
    """Check the number of experts in all layers, for each of which something is made."""
    count = 0 if variant.moe is None else variant.moe.num_experts * num_layers
    if count > MAX_EXPERTS_OF_MODEL:
        raise config.error(
            "num_hidden_layers",
            f"and the number of experts give {count} experts; at most {MAX_EXPERTS_OF_MODEL} are "
            "supported",
        )


def read_dtype(config: ConfigFile) -> str:
    """Read the name of the checkpoint's dtype, one of `DTYPES`."""
    key = "dtype" if "dtype" in config else "torch_dtype"
    return config.text(key, "float32", DTYPES)


def _head_dim(config: ConfigFile, architecture: Architecture, num_heads: int) -> int:
    hidden_size = config.integer("hidden_size")
    default = architecture.head_dim
    if default is None:
        if config.value("head_dim") is None and hidden_size % num_heads:
            raise config.error(
                "num_attention_heads", f"({num_heads}) must divide hidden_size ({hidden_size})"
            )
        default = hidden_size // num_heads
    head_dim = config.integer("head_dim", default)
    if head_dim % 2:
        raise config.error("head_dim", f"must be even, got {head_dim}")
    return head_dim


def _num_kv_heads(config: ConfigFile, num_heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads",
            f"({num_kv_heads}) must divide num_attention_heads ({num_heads})",
        )
    return num_kv_heads
