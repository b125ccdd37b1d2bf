"""The layer of a checkpoint that predicts one more token, as a model of its own.

DeepSeek V3 and others store it after the last layer, with the number of this place. It reads the
last hidden states of the model, and begins with two norms and a projection. The layout is that of
transformers' `MtpModel` and its conversions.
"""

from __future__ import annotations

from dataclasses import replace

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.stages import Stage


def prediction_layer(config: ModelConfig) -> ModelConfig | None:
    """Return the config of the layer that predicts one more token; None if there is no such layer.

    Its number is the number of layers of the model. It always has experts if other layers have.

    Args:
        config: the model.
    """
    number, variant = config.num_layers, config.variant
    if variant.prediction_layers != 1:
        return None
    moe_layers = (*variant.moe_layers, True) if variant.moe_layers else ()
    norm = f"layers.{number}.shared_head.norm"
    return replace(
        config,
        num_layers=number + 1,
        ropes=(*config.ropes, config.ropes[-1]),
        has_output_layer=False,
        stage=Stage(range(number, number + 1), number + 1),
        predicts=True,
        variant=replace(
            variant, moe_layers=moe_layers, names=replace(variant.names, final_norm=norm)
        ),
    )
