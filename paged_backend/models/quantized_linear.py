"""Linear layers with weights that are quantized in the checkpoint, or while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.layers import PlatformKernels
from paged_backend.models.linear import LinearMethod, LinearProduct, LinearSpec
from paged_backend.models.shared_peak import SharedPeakProduct, divided_product
from paged_backend.models.stored_weight import StoredWeight
from paged_backend.quantization.formats import Quantization, WeightFormat
from paged_backend.quantization.forms import WeightForm
from paged_backend.quantization.weight import QuantizedWeight, stacked


class QuantizedLinear:
    """A layer that reads a weight format; see :class:`~paged_backend.models.linear.LinearMethod`.

    The weight is kept in the best of its forms that the platform's kernels multiply. If there is
    none, it is dequantized when it is packed, part by part.

    Attributes:
        form: form of the packed weight; None if it is dequantized.
        sums_ranks: whether the packed layer adds up the parts of all ranks itself.
    """

    def __init__(
        self, spec: LinearSpec, weight_format: WeightFormat, kernels: PlatformKernels
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._product: LinearProduct
        self.sums_ranks = False
        self._stored = {
            name: StoredWeight(
                spec.full_name(name),
                weight_format,
                size,
                spec.inputs,
                bias=spec.bias,
                division=spec.division,
            )
            for name, size in spec.parts.items()
        }
        encoding = next(iter(self._stored.values())).encoding
        forms = encoding.forms(list(spec.parts.values()), spec.inputs)
        if spec.row_order:  # blocks of rows do not survive it
            forms = tuple(form for form in forms if form is not WeightForm.W8A8_FP8_BLOCKS)
        self.form = next((form for form in forms if form in kernels.weight_forms), None)

    def parameters(self) -> dict[str, Parameter]:
        """Return the places of the stored tensors, by checkpoint name; invalid after `pack`."""
        return {
            f"{name}.{suffix}": place
            for name, stored in self._stored.items()
            for suffix, place in stored.parameters().items()
        }

    def pack(self) -> None:
        """Read the weight of each part, bring it into the kernels' form, and free the stored one.

        Raises:
            ConfigError: a stored tensor holds values that are wrong.
        """
        product = None if self.form is None else self._keep(self.form)
        if product is None:
            self.form = None
            product = self._dequantized()
        self._product = product
        self._stored.clear()
        del self._kernels

    def _keep(self, form: WeightForm) -> LinearProduct | None:
        """Bring the weight of all parts into a form; None if their groups of inputs forbid it."""
        stored = self._stored.items()
        weight = stacked([self._ordered(name, part) for name, part in stored])
        if weight is None:
            return None
        biases = [bias for name, part in stored if (bias := self._bias(name, part)) is not None]
        bias = torch.cat(biases) if biases else None
        group = None
        if self._spec.divides_inputs and self._spec.division is not None:
            group = self._spec.division.group
        product = divided_product(form, weight, bias, self._kernels, group)
        if group is not None and isinstance(product, SharedPeakProduct):
            exact = product.summed(bias)
            self.sums_ranks = exact is not None
            return exact or product
        return product

    def _dequantized(self) -> LinearProduct:
        """Fill a dense layer, part by part, and free the stored tensors of each."""
        method = self._kernels.linear(replace(self._spec, row_order={}, gated=False))
        parameters = method.parameters()
        for name in self._spec.parts:
            stored = self._stored.pop(name)
            values = {
                "weight": self._ordered(name, stored).dequantize(),
                "bias": self._bias(name, stored),
            }
            for suffix, value in values.items():
                if value is not None:
                    place = parameters[f"{name}.{suffix}"]
                    assert isinstance(place, Tensor)
                    place.copy_(value)
        method.pack()
        return method

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer's output [rows, outputs] for `x` [rows, inputs]."""
        return self._product(x)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        self._product.add_to(out, x)

    def rows(self, index: Tensor) -> Tensor:
        """Look up the weight's rows at `index` [count] int64, for a tied input embedding."""
        return self._product.rows(index)

    def _ordered(self, name: str, stored: StoredWeight) -> QuantizedWeight:
        weight, order = stored.read(), self._spec.row_order.get(name)
        return weight if order is None else weight.with_rows(order)

    def _bias(self, name: str, stored: StoredWeight) -> Tensor | None:
        bias, order = stored.bias(), self._spec.row_order.get(name)
        return bias if bias is None or order is None else bias[order]


class MixedFormatLinear:
    """A fused layer with parts in different formats, which are separate products.

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
    spec: LinearSpec, quantization: Quantization, kernels: PlatformKernels
) -> LinearMethod:
    """Allocate a layer of a quantized checkpoint; parts that have one format are one product."""
    formats = {name: quantization.format_of(spec.full_name(name)) for name in spec.parts}

    def make(part: LinearSpec, weight_format: WeightFormat | None) -> LinearMethod:
        if weight_format is None:
            return kernels.linear(part)
        return QuantizedLinear(part, weight_format, kernels)

    if len(set(formats.values())) == 1:
        return make(spec, *set(formats.values()))
    parts = [replace(spec, parts={name: spec.parts[name]}, gated=False) for name in formats]
    return MixedFormatLinear(
        [make(part, formats[name]) for part, name in zip(parts, formats, strict=True)]
    )
