"""Ministral: Mistral with a window in some layers, or with queries that grow with the position."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.factors import QueryGrowth
from paged_backend.checkpoint.families.keys import (
    FULL,
    SLIDING,
    layer_types,
    one_window,
    rope_section,
    windows_of,
)
from paged_backend.checkpoint.limits import MAX_POSITIONS
from paged_backend.checkpoint.shape import Variant


def ministral(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Ministral checkpoint of 2024."""
    kind = FULL if config.value("sliding_window") is None else SLIDING
    kinds = layer_types(config, (kind,) * num_layers)
    return Variant(windows=windows_of(config, kinds))


def ministral3(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Ministral 3 checkpoint."""
    section = rope_section(config)
    rate = section.optional_number("llama_4_scaling_beta")
    growth = None
    if rate is not None:
        key = "original_max_position_embeddings"
        growth = QueryGrowth(rate, section.integer(key, high=MAX_POSITIONS))
    return Variant(windows=one_window(config, num_layers), query_growth=growth)
