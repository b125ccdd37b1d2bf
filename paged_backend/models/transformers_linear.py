"""Linear layers of transformers' models that are computed by a platform's kernels.

Layers that read the same rows, such as query, key and value layers, become one product.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from paged_backend.checkpoint.shares import Shares
from paged_backend.checkpoint.stored_tensor import StoredTensor
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod, LinearSpec

LINEAR_CLASSES = nn.Linear, Conv1D


class SharedProduct:
    """Computes layers that a model calls one after the other with the same tensor.

    Args:
        method: computes all of them.
        sizes: the output size of each layer.
    """

    def __init__(self, method: LinearMethod, sizes: Sequence[int]) -> None:
        self._method = method
        self._sizes = list(sizes)
        self._input: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}  # outputs that their layers have not taken

    def take(self, x: Tensor, index: int) -> Tensor:
        """Return the output [rows, size] of layer `index` for `x` [..., inputs].

        An output is taken once, so a layer that is called again computes it again.
        """
        if x is not self._input or index not in self._waiting:
            outputs = self._method(x.reshape(-1, x.shape[-1]))
            self._input = x
            self._waiting = dict(enumerate(torch.split(outputs, self._sizes, dim=-1)))
        output = self._waiting.pop(index)
        if not self._waiting:
            self._input = None
        return output


class KernelLinear(nn.Module):
    """Computes a linear layer, which may be one of several in a product."""

    def __init__(self, product: SharedProduct, index: int) -> None:
        super().__init__()
        self._product = product
        self._index = index

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer's output [..., outputs] for `x` [..., inputs]."""
        output = self._product.take(x, self._index)
        return output.view(*x.shape[:-1], output.shape[-1])


class CalledLayers:
    """The linear layers that a model has called, in groups that can be one product."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, nn.Module, int]] = []  # with the number of the input
        self._read: set[str] = set()
        self._num_inputs = 0
        self._input: Tensor | None = None
        self._copy = torch.empty(0)

    def add(self, name: str, layer: nn.Module, x: Tensor) -> None:
        """Add the call of a layer with the input `x`."""
        if x is not self._input or not torch.equal(x, self._copy):  # it may be changed in place
            self._input, self._copy = x, x.clone()
            self._num_inputs += 1
        self._calls.append((name, layer, self._num_inputs))

    def exclude(self, name: str) -> None:
        """Exclude a layer if the model reads its weight by itself: it cannot be replaced."""
        self._read.add(name)

    def groups(self) -> list[tuple[str, ...]]:
        """Return the names of the layers of each product, in the order of their calls."""
        found: defaultdict[str, set[tuple[str, ...]]] = defaultdict(set)  # by layer
        for group in self._runs():
            for name in group:
                found[name].add(group)
        seen = {group for groups in found.values() for group in groups}
        together = {group for group in seen if all(found[name] == {group} for name in group)}
        return sorted(together | {(name,) for name in found if not found[name] & together})

    def _runs(self) -> Iterator[tuple[str, ...]]:
        """Yield the names of calls in a row that agree in all that a product needs."""
        names: list[str] = []
        before: tuple[Any, ...] = ()
        for name, layer, number in self._calls:
            kind = (number, name.rpartition(".")[0], type(layer), layer.bias is None)
            if names and (kind != before or name in names):
                yield tuple(names)
                names = []
            before = kind
            if name not in self._read:
                names.append(name)
        if names:
            yield tuple(names)


@contextmanager
def watch_linear_layers(model: nn.Module) -> Iterator[CalledLayers]:
    """Collect the linear layers that a model calls, within the `with` block."""
    called = CalledLayers()
    layers = {n: layer for n, layer in model.named_modules() if type(layer) in LINEAR_CLASSES}
    for name, layer in layers.items():
        layer.__class__ = _watched(type(layer), name, called)
    try:
        yield called
    finally:
        for layer in layers.values():
            layer.__class__ = type(layer).__base__


def _watched(base: type[nn.Module], name: str, called: CalledLayers) -> type[nn.Module]:
    """Return a subclass that reports calls of the layer, and other reads of its weight."""
    inside = False

    class Watched(base):  # type: ignore[misc,valid-type]  # the base class is known at run time only
        def __getattr__(self, attribute: str) -> Any:
            if attribute in ("weight", "bias") and not inside:
                called.exclude(name)
            return super().__getattr__(attribute)

        def forward(self, x: Tensor) -> Any:
            nonlocal inside
            called.add(name, self, x)
            inside = True
            try:
                return super().forward(x)
            finally:
                inside = False

    return Watched


def replace_linear_layers(
    model: nn.Module,
    groups: Iterable[Sequence[str]],
    kernels: Kernels,
    shares: Shares | None = None,
) -> None:
    """Replace layers of a model.

    Args:
        model: the model.
        groups: names of the layers of each product, from :meth:`CalledLayers.groups`.
        kernels: the platform.
        shares: what this rank has of their weights and biases; None for one rank.
    """
    for names in groups:
        prefix = names[0].rpartition(".")[0]
        parent = model.get_submodule(prefix)
        layers = {name.rpartition(".")[2]: model.get_submodule(name) for name in names}
        tensors: dict[str, Tensor] = {}
        for part, layer in layers.items():
            for kind, tensor in _tensors(layer):
                share = (shares or {}).get(f"{prefix}.{part}.{kind}")
                tensors[f"{part}.{kind}"] = tensor if share is None else share.take(tensor)
        sizes = {part: len(tensors[f"{part}.weight"]) for part in layers}
        product = SharedProduct(_pack(prefix, sizes, tensors, kernels), list(sizes.values()))
        for index, part in enumerate(layers):
            setattr(parent, part, KernelLinear(product, index))


def _tensors(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weight [outputs, inputs] of a layer, and its bias if it has one."""
    weight: Tensor = layer.weight.detach()
    yield "weight", weight.t() if isinstance(layer, Conv1D) else weight
    if layer.bias is not None:
        yield "bias", layer.bias.detach()


def _pack(
    prefix: str, sizes: dict[str, int], tensors: dict[str, Tensor], kernels: Kernels
) -> LinearMethod:
    """Make the product of layers.

    Args:
        prefix: the module that holds the layers.
        sizes: the output size of each layer.
        tensors: weights and biases by ``layer.weight`` and ``layer.bias``.
        kernels: the platform.
    """
    first = next(iter(sizes))
    inputs, has_bias = tensors[f"{first}.weight"].shape[1], f"{first}.bias" in tensors
    method = kernels.linear(LinearSpec(inputs, sizes, has_bias, prefix))
    for name, place in method.parameters().items():
        value = tensors.get(name)
        if isinstance(place, StoredTensor):
            if value is not None:
                place.fill(value, f"the model's {prefix}.{name}")
        elif value is not None:
            with torch.no_grad():
                place.copy_(value)
    method.pack()
    return method
