"""Experts with weights that are quantized in the checkpoint, or while they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from paged_backend.checkpoint.moe import ExpertLayout, ExpertNames
from paged_backend.checkpoint.shares import Share
from paged_backend.checkpoint.stored_tensor import Parameter, StoredTensor, StoredType
from paged_backend.models.experts import ExpertsMethod, ExpertsProduct, ExpertsSpec
from paged_backend.models.layers import PlatformKernels
from paged_backend.models.linear import LinearProduct
from paged_backend.models.shared_peak import divided_product
from paged_backend.models.stored_weight import StoredWeight
from paged_backend.quantization.formats import FormatError, WeightFormat
from paged_backend.quantization.forms import WeightForm
from paged_backend.quantization.mxfp4 import Mxfp4Format
from paged_backend.quantization.weight import stacked
from paged_backend.values.errors import ConfigError

_INT8 = WeightForm.W8A8_INT8

FormatOf = Callable[[str], WeightFormat | None]
"""Returns the format of the linear layer with a name; None if it is not quantized."""


def quantized_experts(
    spec: ExpertsSpec, format_of: FormatOf, kernels: PlatformKernels
) -> ExpertsMethod:
    """Allocate the experts of a quantized checkpoint.

    Raises:
        ConfigError: one tensor holds all experts, in a format of separate weights.
    """
    if spec.names.is_fused:
        return _fused_experts(spec, format_of(spec.prefix), kernels)
    names = [f"{spec.prefix}.{e}.{part}" for e in spec.numbers for part in _parts(spec)]
    if all(format_of(name) is None for name in names):
        return kernels.experts(spec)
    return QuantizedExperts(spec, format_of, kernels)


def _fused_experts(
    spec: ExpertsSpec, weight_format: WeightFormat | None, kernels: PlatformKernels
) -> ExpertsMethod:
    if weight_format is None:
        return kernels.experts(spec)
    if isinstance(weight_format, Mxfp4Format) and spec.names.layout is ExpertLayout.TURNS:
        return Mxfp4Experts(spec, weight_format, kernels)
    raise ConfigError(
        f"quantization_config: the experts {spec.prefix} must be in MXFP4, as in gpt-oss, or not "
        "quantized, as one tensor holds all of them"
    )


def experts_quantized_online(
    spec: ExpertsSpec, weight_format: WeightFormat, kernels: PlatformKernels
) -> ExpertsMethod:
    """Allocate experts with weights that are quantized as they are loaded."""
    if not spec.names.is_fused:
        return QuantizedExperts(spec, lambda name: weight_format, kernels)
    separate = replace(spec, names=ExpertNames())
    return FusedExperts(spec, QuantizedExperts(separate, lambda name: weight_format, kernels))


class QuantizedExperts:
    """Experts that read weight formats; see :class:`~paged_backend.models.experts.ExpertsMethod`.

    They are computed in int8 if all formats round activations to int8 and the platform can do so.
    Otherwise, weights are dequantized when they are packed.

    Args:
        spec: the sizes; the checkpoint's tensors are not fused.
        format_of: returns the format of a projection of an expert.
        kernels: the platform.
    """

    def __init__(self, spec: ExpertsSpec, format_of: FormatOf, kernels: PlatformKernels) -> None:
        self._spec = spec
        self._kernels = kernels
        self._experts: ExpertsProduct
        self._stored: dict[str, StoredWeight] = {}
        self._as_int8 = kernels.product_experts is not None and _INT8 in kernels.weight_forms
        for expert in spec.numbers:
            for part, (outputs, inputs) in _parts(spec).items():
                name = f"{spec.prefix}.{expert}.{part}"
                weight_format = format_of(name)
                stored = StoredWeight(
                    name, weight_format, outputs, inputs, bias=spec.bias, division=spec.division
                )
                forms = stored.encoding.forms([outputs], inputs) if weight_format else ()
                self._as_int8 &= _INT8 in forms
                self._stored[f"{expert}.{part}"] = stored

    def parameters(self) -> dict[str, Parameter]:
        """Return the places of the stored tensors, by checkpoint name; invalid after `pack`."""
        return {
            f"{name}.{suffix}": place
            for name, stored in self._stored.items()
            for suffix, place in stored.parameters().items()
        }

    def pack(self) -> None:
        """Read the weights, bring them into the kernels' form, and free the stored ones.

        Raises:
            ConfigError: a stored tensor holds values that are wrong.
        """
        self._experts = self._int8_experts() if self._as_int8 else self._dequantized()
        self._stored.clear()

    def _int8_experts(self) -> ExpertsProduct:
        assert self._kernels.product_experts is not None
        names = self._spec.names
        pairs = [
            (self._product(expert, *self._spec.input_parts), self._product(expert, names.down))
            for expert in self._spec.numbers
        ]
        return self._kernels.product_experts(self._spec, pairs)

    def _product(self, expert: int, *parts: str) -> LinearProduct:
        stored = [self._stored.pop(f"{expert}.{part}") for part in parts]
        weight = stacked([part.read() for part in stored])
        assert weight is not None, "int8 weights have no groups of inputs"
        biases = [bias for part in stored if (bias := part.bias()) is not None]
        bias = torch.cat(biases) if biases else None
        division = self._spec.division
        group = None
        if division is not None and division.divides_inputs(
            f"{self._spec.prefix}.{expert}.{parts[0]}"
        ):
            group = division.group
        return divided_product(_INT8, weight, bias, self._kernels, group)

    def _dequantized(self) -> ExpertsProduct:
        experts = self._kernels.experts(self._spec)
        places = experts.parameters()
        for name in list(self._stored):
            stored = self._stored.pop(name)
            for suffix, value in {"weight": stored.dense(), "bias": stored.bias()}.items():
                if value is not None:
                    place = places[f"{name}.{suffix}"]
                    assert isinstance(place, Tensor)
                    place.copy_(value)
        experts.pack()
        return experts

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts; see `ExpertsMethod`."""
        return self._experts(x, expert_ids, expert_weights)


class FusedExperts:
    """Divides tensors that hold all experts (`ExpertNames.is_fused`) among quantized experts."""

    def __init__(self, spec: ExpertsSpec, experts: QuantizedExperts) -> None:
        count, inner, hidden = _whole_sizes(spec)
        shapes = {"gate_up_proj": (count, hidden, 2 * inner), "down_proj": (count, inner, hidden)}
        self._layout = spec.names.layout
        if not self._layout.inputs_first:
            shapes = {name: (shape[0], shape[2], shape[1]) for name, shape in shapes.items()}
        biases = {"gate_up_proj_bias": (count, 2 * inner), "down_proj_bias": (count, hidden)}
        stored = {**shapes, **(biases if spec.bias else {})}
        self._stored = {name: StoredTensor(StoredType(shape)) for name, shape in stored.items()}
        self._experts = experts
        self._numbers = spec.numbers

    def parameters(self) -> dict[str, Parameter]:
        """Return the places of the stored tensors, by checkpoint name; invalid after `pack`."""
        return {**self._stored}

    def pack(self) -> None:
        """Quantize the weights of each expert, and free the stored ones."""
        places = self._experts.parameters()
        for name in list(self._stored):
            stored = self._stored.pop(name)
            for expert in self._numbers:
                tensor = stored.value[expert]
                if self._layout.inputs_first and not name.endswith("bias"):
                    tensor = tensor.t()
                parts = _separated(name, tensor, has_halves=self._layout.has_halves)
                for target, value in parts.items():
                    place = places[f"{expert}.{target}"]
                    assert isinstance(place, StoredTensor)
                    place.fill(value, stored.origin)
        self._experts.pack()

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts; see `ExpertsMethod`."""
        return self._experts(x, expert_ids, expert_weights)


class Mxfp4Experts:
    """The experts of gpt-oss, which are dequantized when they are packed.

    See :class:`~paged_backend.models.experts.ExpertsMethod`.
    """

    def __init__(
        self, spec: ExpertsSpec, weight_format: Mxfp4Format, kernels: PlatformKernels
    ) -> None:
        count, inner, hidden = _whole_sizes(spec)
        self._spec = spec
        self._format = weight_format
        self._sizes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        self._experts = kernels.experts(spec)
        self._stored = {
            f"{name}_{suffix}": StoredTensor(replace(kind, shape=(count, *kind.shape)))
            for name, sizes in self._sizes.items()
            for suffix, kind in weight_format.tensors(*sizes).items()
        }

    def parameters(self) -> dict[str, Parameter]:
        """Return the places of the stored tensors, by checkpoint name; invalid after `pack`."""
        own = self._experts.parameters()
        return {**self._stored, **{n: place for n, place in own.items() if n not in self._sizes}}

    def pack(self) -> None:
        """Dequantize the weights of each expert, and free the stored ones.

        Raises:
            ConfigError: a scale is not a number.
        """
        places = self._experts.parameters()
        for name, sizes in self._sizes.items():
            place = places[name]
            assert isinstance(place, Tensor)
            blocks, scales = (self._stored.pop(f"{name}_{kind}") for kind in ("blocks", "scales"))
            share = _share_of(self._spec, name)
            for expert, target in zip(self._spec.numbers, place, strict=True):
                stored = {"blocks": blocks.value[expert], "scales": scales.value[expert]}
                try:
                    weight = self._format.read(stored, *sizes).dequantize().t()
                except FormatError as error:
                    raise ConfigError(f"{scales.origin}: {error}") from error
                if share is not None and share.dim != 0:
                    weight = share.take(weight[None])[0]
                target.copy_(weight)
        self._experts.pack()

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts; see `ExpertsMethod`."""
        return self._experts(x, expert_ids, expert_weights)


def _share_of(spec: ExpertsSpec, name: str) -> Share | None:
    """Return the share of a tensor that holds a projection of all experts."""
    return None if spec.division is None else spec.division.shares.get(f"{spec.prefix}.{name}")


def _whole_sizes(spec: ExpertsSpec) -> tuple[int, ...]:
    """Return the number of experts, their intermediate size and hidden size in fused tensors."""
    share = _share_of(spec, "down_proj")
    if share is None:
        return spec.num_experts, spec.intermediate_size, spec.hidden_size
    count, first, last = share.whole
    return share.whole if spec.names.layout.inputs_first else (count, last, first)


def _parts(spec: ExpertsSpec) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of the projections of an expert, by name."""
    hidden, inner, names = spec.hidden_size, spec.intermediate_size, spec.names
    return {**dict.fromkeys(spec.input_parts, (inner, hidden)), names.down: (hidden, inner)}


def _separated(name: str, tensor: Tensor, *, has_halves: bool) -> dict[str, Tensor]:
    """Return the separate tensors that a fused tensor of one expert stands for, by name.

    Args:
        name: the name of the fused tensor.
        tensor: the expert's part of it, [outputs, inputs] or [outputs].
        has_halves: whether gate comes before up, or both are in turns.
    """
    kind = "bias" if name.endswith("bias") else "weight"
    if name.startswith("down"):
        return {f"down_proj.{kind}": tensor}
    gate, up = tensor.chunk(2) if has_halves else (tensor[::2], tensor[1::2])
    return {f"gate_proj.{kind}": gate, f"up_proj.{kind}": up}
