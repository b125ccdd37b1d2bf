"""Stages: parts of a model that several ranks compute one after another.

A stage has some of the layers, the first one also the embedding, and the last one also the final
norm and the output layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paged_backend.checkpoint.tensor_names import usual_name
from paged_backend.values.errors import option_error

OPTION = "pipeline_parallel_size"

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Stage:
    """The part of a model that a rank computes.

    Attributes:
        layers: the numbers of its layers.
        num_layers: the number of layers of the whole model.
    """

    layers: range
    num_layers: int

    @property
    def is_first(self) -> bool:
        """True for the stage with the embedding."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """True for the stage with the final norm and the output layer."""
        return self.layers.stop == self.num_layers

    def has(self, name: str) -> bool:
        """Return whether a tensor belongs to this stage, by its name in the checkpoint."""
        layer = layer_of(name)
        if layer is not None:
            return layer in self.layers
        name = usual_name(name)
        return self.is_first if name.startswith("model.embed_tokens.") else self.is_last


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a tensor belongs to; None if it belongs to no layer."""
    layer = _LAYER.match(usual_name(name))
    return None if layer is None else int(layer[1])


def stage_of(num_layers: int, number: int, num_stages: int) -> Stage:
    """Return a stage of a model.

    All stages have the same number of layers if it divides. Otherwise the stages before the last
    one have a layer more, because the last one also has the output layer. vLLM does the same.

    Args:
        num_layers: the number of layers of the model.
        number: the number of the stage, counted from 0.
        num_stages: the number of stages.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if num_stages > num_layers:
        raise option_error(
            OPTION,
            f"must be at most {num_layers}, the number of the model's layers; got {num_stages}",
        )
    size, others = divmod(num_layers, num_stages)
    first_larger = num_stages - 1 - others
    starts = [
        stage * size + min(max(0, stage - first_larger), others) for stage in (number, number + 1)
    ]
    return Stage(range(*starts), num_layers)


def problem_of_stages(
    attention_layers: Sequence[int], num_layers: int, num_stages: int
) -> str | None:
    """Return why a model cannot have some number of stages; None if it can.

    A stage without attention would have no KV cache, which only a model without any can do.

    Args:
        attention_layers: the numbers of the layers with attention.
        num_layers: the number of all layers.
        num_stages: the number of stages.

    Raises:
        ConfigError: there are more stages than layers.
    """
    for number in range(num_stages):
        layers = stage_of(num_layers, number, num_stages).layers
        if attention_layers and not any(layer in layers for layer in attention_layers):
            return (
                "must be so small that each stage has a layer with attention; of "
                f"{num_stages} stages, number {number + 1} has the layers {layers.start} to "
                f"{layers.stop - 1}, none of which has attention"
            )
    return None
