"""Granite: Llama with factors on the embeddings, the scores, the residuals and the logits."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import all_biases
from paged_backend.checkpoint.shape import Variant


def granite(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Granite checkpoint."""
    return Variant(
        biases=all_biases(config),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        attention_scale=config.number("attention_multiplier", 1.0),
        logits_scale=1.0 / config.number("logits_scaling", 1.0),
    )
