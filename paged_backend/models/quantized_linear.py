"""Linear layers with weights that are quantized in the checkpoint, or while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paged_backend.checkpoint.stored_tensor import Parameter, StoredTensor, StoredType
from paged_backend.errors import ConfigError
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.quantization.formats import FormatError, Quantization, WeightFormat
from paged_backend.quantization.weight import QuantizedWeight


class QuantizedLinear:
    """A layer that reads a weight format; see :class:`~paged_backend.models.linear.LinearMethod`.

    Weights in int8 with a scale for each output are multiplied as such if the format rounds
    activations to int8. All others are dequantized when they are packed, part by part.
    """

    def __init__(self, spec: LinearSpec, weight_format: WeightFormat, kernels: Kernels) -> None:
        self._spec = spec
        self._format = weight_format
        self._kernels = kernels
        self._method: LinearMethod
        self._stored: dict[str, dict[str, StoredTensor]] = {}
        for name, size in spec.parts.items():
            kinds = weight_format.tensors(size, spec.inputs)
            # Some writers of GPTQ store biases of zero for layers that have none.
            kinds["bias"] = StoredType((size,), optional=not spec.bias)
            self._stored[name] = {suffix: StoredTensor(kind) for suffix, kind in kinds.items()}

    def parameters(self) -> dict[str, Parameter]:
        """Return the places of the stored tensors, by checkpoint name; invalid after `pack`."""
        return {
            f"{name}.{suffix}": place
            for name, places in self._stored.items()
            for suffix, place in places.items()
        }

    def pack(self) -> None:
        """Read the weight of each part, bring it into the kernels' form, and free the stored one.

        Raises:
            ConfigError: a stored tensor holds values that are wrong.
        """
        as_int8 = self._format.int8_activations
        self._method = (self._kernels.int8_linear if as_int8 else self._kernels.linear)(self._spec)
        places = self._method.parameters()
        for name in self._spec.parts:
            stored = self._stored.pop(name)
            weight = self._read(name, stored)
            values = {"weight": weight.values if as_int8 else weight.dequantize()}
            if as_int8:
                values["weight_scale"] = _channel_scales(weight)
            if self._spec.bias:
                values["bias"] = stored["bias"].value
            else:
                _check_no_bias(stored["bias"])
            for suffix, value in values.items():
                place = places[f"{name}.{suffix}"]
                assert isinstance(place, Tensor)
                place.copy_(value)
        self._method.pack()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""
        return self._method(x)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        self._method.add_to(out, x)

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        return self._method.rows(index)

    def _read(self, name: str, stored: dict[str, StoredTensor]) -> QuantizedWeight:
        tensors = {suffix: place.value for suffix, place in stored.items() if place.filled}
        for suffix in tensors:
            if "scale" in suffix:
                stored[suffix].check_scale()
        try:
            return self._format.read(tensors, self._spec.parts[name], self._spec.inputs)
        except FormatError as error:
            path = ".".join(filter(None, (self._spec.prefix, name)))
            raise ConfigError(f"the checkpoint's tensor {path}.{error}") from error


class SplitLinear:
    """A fused layer whose parts have different formats, and are separate products.

    See :class:`~paged_backend.models.linear.LinearMethod`.
    """

    def __init__(self, parts: Sequence[LinearMethod]) -> None:
        self._parts = parts

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        return {name: place for part in self._parts for name, place in part.parameters().items()}

    def pack(self) -> None:
        """Bring the filled weights into the form that the kernels read."""
        for part in self._parts:
            part.pack()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""
        return torch.cat([part(x) for part in self._parts], dim=1)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        out += self(x)

    def rows(self, index: Tensor) -> Tensor:
        """Refuse: layers that are looked up have one part."""
        raise TypeError("a layer of several parts is not an embedding")


def quantized_linear(
    spec: LinearSpec, quantization: Quantization, kernels: Kernels
) -> LinearMethod:
    """Allocate a layer of a quantized checkpoint; parts that have one format are one product."""
    formats = {name: quantization.format_of(spec.full_name(name)) for name in spec.parts}

    def make(part: LinearSpec, weight_format: WeightFormat | None) -> LinearMethod:
        if weight_format is None:
            return kernels.linear(part)
        return QuantizedLinear(part, weight_format, kernels)

    if len(set(formats.values())) == 1:
        return make(spec, *set(formats.values()))
    return SplitLinear(
        [make(replace(spec, parts={name: spec.parts[name]}), formats[name]) for name in formats]
    )


def _channel_scales(weight: QuantizedWeight) -> Tensor:
    scales = weight.channel_scales()
    assert scales is not None, "formats with int8 activations have a scale for each output"
    return scales


def _check_no_bias(place: StoredTensor) -> None:
    if place.filled and bool(place.value.any()):
        raise ConfigError(f"{place.origin} has no place in this architecture, and is not zero")
