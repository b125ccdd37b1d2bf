"""Llama 4, its text model: chunks of attention, layers without positions, and experts.

Meta AI, "The Llama 4 herd" (2025); Nakanishi, "Scalable-Softmax Is Superior for Attention" (2025),
for factors on queries that grow with the position.
"""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.context_length import rope_type
from paged_backend.checkpoint.factors import QueryGrowth
from paged_backend.checkpoint.families.keys import (
    CHUNKED,
    FULL,
    attention_biases,
    layer_types,
    rope_section,
    rotated_layers,
)
from paged_backend.checkpoint.limits import MAX_INNER_SIZE, MAX_POSITIONS, MAX_WINDOW
from paged_backend.checkpoint.moe_reader import read_llama4
from paged_backend.checkpoint.shape import ModuleNames, QKNormScope, Rotary, Variant, Windows
from paged_backend.values.validation import shorten
from paged_backend.values.windows import Chunks

# The norm comes after the rotation. It takes away what scales cosines and sines.
_UNSCALED_ROPES = "default", "dynamic", "linear", "llama3"


def llama4(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Llama 4 checkpoint."""
    if config.value("no_rope_layers") == []:
        config = config.replaced(no_rope_layers=None)
    rotated = rotated_layers(config, num_layers)
    section = rope_section(config, rope_theta=500_000.0)
    has_norm = config.flag("use_qk_norm", True)
    if has_norm and rope_type(section) not in _UNSCALED_ROPES:
        known = ", ".join(_UNSCALED_ROPES)
        raise section.error(
            "rope_type",
            f"must be one of {known} with use_qk_norm, got {shorten(rope_type(section))}",
        )
    moe_layers = _moe_layers(config, num_layers)
    return Variant(
        biases=attention_biases(config),
        windows=_windows(config, rotated),
        names=ModuleNames(mlp="feed_forward"),
        qk_norm=QKNormScope.ROTATED_HEAD if has_norm else None,
        rotary=Rotary(tuple(section if turns else None for turns in rotated), interleaved=True),
        query_growth=_query_growth(config),
        moe=read_llama4(config) if any(moe_layers) else None,
        moe_layers=moe_layers if any(moe_layers) else (),
    )


def llama4_keys(config: ConfigFile) -> ConfigFile:
    """Return a config.json of Llama 4 with the usual name for the size of its MLPs.

    The size of its experts gets a name that no file has.
    """
    size = "experts_intermediate_size"
    if size not in config:
        inner = config.integer("intermediate_size", 8192, high=MAX_INNER_SIZE)
        config = config.with_absent(**{size: inner})
    return config.replaced(intermediate_size=config.integer("intermediate_size_mlp", 16_384))


def _windows(config: ConfigFile, rotated: tuple[bool, ...]) -> Windows:
    has_chunks = "attention_chunk_size" not in config
    has_chunks |= config.value("attention_chunk_size") is not None
    default = tuple(CHUNKED if turns and has_chunks else FULL for turns in rotated)
    kinds = layer_types(config, default, (FULL, CHUNKED))
    if CHUNKED not in kinds:
        return ()
    if not has_chunks:
        raise config.error("attention_chunk_size", f"is null, but layer_types has {CHUNKED}")
    chunks = Chunks(config.integer("attention_chunk_size", 8192, high=MAX_WINDOW))
    return tuple(chunks if kind == CHUNKED else None for kind in kinds)


def _query_growth(config: ConfigFile) -> QueryGrowth | None:
    key = "attn_temperature_tuning"
    if type(config.value(key)) is int:  # as older versions of transformers wrote it
        config = config.replaced(**{key: config.value(key) != 0})
    if not config.flag(key, True):
        return None
    period = config.integer("floor_scale", 8192, high=MAX_POSITIONS)
    rate = config.number("attn_scale", 0.1)
    return QueryGrowth(rate, period, first=1, only_unrotated=True)


def _moe_layers(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Read the layers that have experts."""
    numbers = config.value("moe_layers")
    if numbers is None:
        step = config.integer("interleave_moe_layer_step", 1)
        return tuple(layer % step == step - 1 for layer in range(num_layers))
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        raise config.error("moe_layers", f"must be a list of integers, got {shorten(numbers)}")
    return tuple(layer in numbers for layer in range(num_layers))
