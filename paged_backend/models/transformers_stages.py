"""The stages of a model that transformers computes, by transformers' own plan.

The plan says that the model has a list of layers, each of which reads the hidden states of the one
before. A stage passes hidden states through in place of the layers that other stages have, receives
them before its first layer and sends them after its last one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paged_backend.checkpoint.stages import OPTION, Stage
from paged_backend.models.division import Group
from paged_backend.values.errors import option_error

_LAYERS = "layers"


class _Passed(nn.Module):
    """Takes the place of a layer that another stage has."""

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the hidden states."""
        return hidden_states


class _Absent(nn.Module):
    """Takes the place of an embedding or an output layer that another stage has.

    Args:
        size: numbers of a row of its output.
        dtype: dtype of the output.
    """

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._size, self._dtype = size, dtype

    def forward(self, x: Tensor) -> Tensor:
        """Return zeros [1, rows, size] for `x`, which is [1, rows] or [1, rows, any]."""
        return x.new_zeros(*x.shape[:2], self._size, dtype=self._dtype)


def check_plan(model: Any, pipeline: Group) -> None:
    """Check that transformers has a plan for the stages of a model.

    Raises:
        ConfigError: it has none.
    """
    config = model.config.get_text_config(decoder=True)
    plan = getattr(config, "base_model_pp_plan", None) or {}
    layers = getattr(model.base_model, _LAYERS, None)
    if _LAYERS not in plan or not isinstance(layers, nn.ModuleList):
        raise option_error(
            OPTION,
            f"can only be 1 for {type(model).__name__}, for which transformers has no plan of "
            f"stages; got {pipeline.size}",
        )


def keep_stage(model: Any, stage: Stage, pipeline: Group) -> None:
    """Take the layers of other stages out of a model, and connect its stage to the others.

    Args:
        model: a model of transformers that `check_plan` accepts. It returns logits in the last
            stage, and memory of the same shape in other stages.
        stage: the stage of this rank.
        pipeline: the ranks of all stages, in order.
    """
    layers = getattr(model.base_model, _LAYERS)
    config = model.config.get_text_config(decoder=True)
    for index in range(stage.num_layers):
        if index not in stage.layers:
            layers[index] = _Passed()
    if not stage.is_first:
        model.set_input_embeddings(_Absent(config.hidden_size, model.dtype))
        layers[stage.layers.start].register_forward_pre_hook(_receive_from(pipeline))
    if not stage.is_last:
        model.set_output_embeddings(_Absent(config.vocab_size, model.dtype))
        layers[stage.layers.stop - 1].register_forward_hook(_send_to(pipeline))


def _receive_from(pipeline: Group) -> Any:
    def receive(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden = torch.empty_like(args[0], memory_format=torch.contiguous_format)
        pipeline.receive(hidden, pipeline.rank - 1)
        return hidden, *args[1:]

    return receive


def _send_to(pipeline: Group) -> Any:
    def send(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        pipeline.send(output.contiguous(), pipeline.rank + 1)

    return send
