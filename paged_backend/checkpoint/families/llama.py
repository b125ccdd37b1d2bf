"""Llama, Mistral and Mixtral."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import all_biases, one_window
from paged_backend.checkpoint.moe_reader import read_mixtral
from paged_backend.checkpoint.shape import Variant


def llama(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Llama checkpoint."""
    return Variant(biases=all_biases(config))


def mistral(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Mistral checkpoint; a missing window means Mistral 7B's."""
    return Variant(windows=one_window(config, num_layers, default=4096))


def mixtral(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Mixtral checkpoint."""
    return Variant(windows=one_window(config, num_layers), moe=read_mixtral(config))
