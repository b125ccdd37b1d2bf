"""The config of the multi-token prediction (MTP) layer of a checkpoint.

The layer reads the last hidden states of the model, and begins with two norms and a projection.
Some families, such as DeepSeek V3, store it as `model.layers.N`, where N is the number of layers.
Others, such as Qwen3-Next, store it in a separate module. `MtpModel` of transformers supports both
layouts.
"""

from __future__ import annotations

from dataclasses import replace

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.prediction_names import PredictionNames
from paged_backend.checkpoint.stages import Stage


def prediction_layer(config: ModelConfig) -> ModelConfig | None:
    """Return the config of the MTP layer; None if the checkpoint has none or several.

    Its number is the number of layers of the model. It has attention, and experts if any layer of
    the model has some.

    Args:
        config: the model.
    """
    number, variant = config.num_layers, config.variant
    if variant.prediction_layers != 1:
        return None
    if variant.prediction_module is None:
        names = PredictionNames.after_layers(number)
    else:
        names = PredictionNames.in_module(variant.prediction_module)
    return replace(
        config,
        num_layers=number + 1,
        ropes=(*config.ropes, config.ropes[-1]),
        has_output_layer=False,
        stage=Stage(range(number, number + 1), number + 1),
        prediction=names,
        variant=replace(
            variant,
            moe_layers=(*variant.moe_layers, True) if variant.moe_layers else (),
            state_mixers=(*variant.state_mixers, None) if variant.state_mixers else (),
        ),
    )
