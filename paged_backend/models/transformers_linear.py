"""Linear layers of transformers' models that are computed by a platform's kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from paged_backend.checkpoint.stored_tensor import StoredTensor
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod, LinearSpec

_CLASSES = nn.Linear, Conv1D


class KernelLinear(nn.Module):
    """Computes a linear layer by a `LinearMethod`."""

    def __init__(self, method: LinearMethod, outputs: int) -> None:
        super().__init__()
        self._method = method
        self._outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer's output [..., outputs] for `x` [..., inputs]."""
        return self._method(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._outputs)


@contextmanager
def watch_linear_layers(model: nn.Module) -> Iterator[set[str]]:
    """Collect the names of the linear layers that a model calls, within the `with` block.

    Layers whose weight the model reads by itself are left out: they cannot be replaced.
    """
    called: set[str] = set()
    layers = {n: layer for n, layer in model.named_modules() if type(layer) in _CLASSES}
    for name, layer in layers.items():
        layer.__class__ = _watched(type(layer), name, called)
    try:
        yield called
    finally:
        for layer in layers.values():
            layer.__class__ = type(layer).__base__


def _watched(base: type[nn.Module], name: str, called: set[str]) -> type[nn.Module]:
    """Return a subclass that adds a name when the layer is called, and removes it for good."""
    state = {"inside": False, "read": False}

    class Watched(base):  # type: ignore[misc,valid-type]  # a base that is a value
        def __getattr__(self, attribute: str) -> Any:
            if attribute in ("weight", "bias") and not state["inside"]:
                state["read"] = True
                called.discard(name)
            return super().__getattr__(attribute)

        def forward(self, x: Tensor) -> Any:
            if not state["read"]:
                called.add(name)
            state["inside"] = True
            try:
                return super().forward(x)
            finally:
                state["inside"] = False

    return Watched


def replace_linear_layers(model: nn.Module, names: Iterable[str], kernels: Kernels) -> None:
    """Replace layers of a model.

    Args:
        model: the model.
        names: from `called_linear_layers`.
        kernels: the platform.
    """
    for name in names:
        parent, _, child = name.rpartition(".")
        layer = model.get_submodule(name)
        assert isinstance(layer, _CLASSES)
        setattr(model.get_submodule(parent), child, _kernel_linear(name, layer, kernels))


def _kernel_linear(name: str, layer: Any, kernels: Kernels) -> KernelLinear:
    weight = layer.weight.detach()
    if isinstance(layer, Conv1D):
        weight = weight.t()
    outputs, inputs = weight.shape
    prefix, _, part = name.rpartition(".")
    method = kernels.linear(LinearSpec(inputs, {part: outputs}, layer.bias is not None, prefix))
    values = {"weight": weight, "bias": layer.bias}
    for place_name, place in method.parameters().items():
        value = values[place_name.rpartition(".")[2]]
        if isinstance(place, StoredTensor):
            if value is not None:
                place.fill(value.detach(), f"the model's {name}")
        else:
            with torch.no_grad():
                place.copy_(value)
    method.pack()
    return KernelLinear(method, outputs)
