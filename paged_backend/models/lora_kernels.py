"""Linear layers that add the low-rank products of adapters (LoRA).

Models do not know of it: `LoraKernels` gives them such layers in place of those of the platform.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from torch import Tensor

from paged_backend.checkpoint.shape import Activation, ModelShape
from paged_backend.checkpoint.stages import layer_of
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.adapter_slots import AdapterSlots
from paged_backend.models.division import Division
from paged_backend.models.embedding import EmbeddingMethod
from paged_backend.models.experts import ExpertsMethod, ExpertsSpec
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import GatedMethod, LinearMethod, LinearProduct, LinearSpec
from paged_backend.models.low_rank import LowRankFactory, LowRankProduct
from paged_backend.models.rank_kernels import SummedLinear
from paged_backend.models.step_context import AdapterRows, StepContext

_OUTPUTS = frozenset({"o_proj", "out_proj", "linear_out"})


@dataclass(frozen=True, slots=True)
class LastMixing:
    """The last modules of a model that mix tokens. Behind them, only some rows are computed.

    Attributes:
        layer: the number of their layer.
        modules: their names in the layer.
    """

    layer: int
    modules: frozenset[str]

    @classmethod
    def of(cls, shape: ModelShape) -> LastMixing:
        """Return those of a model."""
        variant, layers = shape.variant, range(shape.num_layers)
        layer = max(n for n in layers if variant.has_attention(n) or variant.state_mixer_of(n))
        mixer = variant.state_mixer_of(layer)
        names = {variant.names.attention} if variant.has_attention(layer) else set()
        return cls(layer, frozenset(names if mixer is None else {*names, mixer.name}))

    def is_before(self, spec: LinearSpec) -> bool:
        """Return whether a linear layer of a module has only the rows behind these modules."""
        module = f"{spec.prefix}."
        number = layer_of(module)
        if number is None or number != self.layer:
            return number is not None and number > self.layer
        name = module.split(".")[3]
        return name not in self.modules or not _OUTPUTS.isdisjoint(spec.parts)


class LoraKernels:
    """The kernels of a platform, with adapters on the linear layers of mixers and MLPs.

    Small layers in full precision, experts, routers, the embedding and the output layer have none.
    See :class:`~paged_backend.models.layers.Kernels`.

    Args:
        kernels: the platform, or its quantized layers.
        low_rank: makes the product of a layer's adapters.
        slots: holds the adapters; the layers are added to it.
        last_mixing: the modules behind which only some rows of the step are computed; None if all
            rows are.
        division: the ranks among which the layers are divided; None for one rank.
    """

    def __init__(
        self,
        kernels: Kernels,
        low_rank: LowRankFactory,
        slots: AdapterSlots,
        last_mixing: LastMixing | None,
        division: Division | None = None,
    ) -> None:
        self.device = kernels.device
        self.dtype = kernels.dtype
        self.layers = kernels.layers
        self.prompt_attention = kernels.prompt_attention
        self.token_norm = kernels.token_norm
        self._kernels = kernels
        self._low_rank = low_rank
        self._slots = slots
        self._last_mixing = last_mixing
        self._division = division

    def linear(self, spec: LinearSpec) -> LinearMethod:
        """Allocate a linear layer."""
        if spec.full_precision or not spec.prefix:
            return self._kernels.linear(spec)
        base = self._kernels.linear(spec)
        spec = replace(spec, gated=isinstance(base, GatedMethod))
        product = self._low_rank(spec, self._slots.num_slots, self._slots.max_rank)
        self._slots.add_layer(replace(spec, division=self._division), product)
        context = self._slots.context
        is_behind = self._last_mixing is not None and self._last_mixing.is_before(spec)
        rows = context.needed_rows if is_behind else context.rows
        if isinstance(base, SummedLinear):
            return SummedLoraLinear(base, product, context, rows)
        if isinstance(base, GatedMethod):
            return GatedLoraLinear(base, product, context, rows)
        return LoraLinear(base, product, context, rows)

    def embedding(self, vocab_size: int, hidden_size: int) -> EmbeddingMethod:
        """Allocate the embedding of tokens."""
        return self._kernels.embedding(vocab_size, hidden_size)

    def experts(self, spec: ExpertsSpec) -> ExpertsMethod:
        """Allocate the experts of a layer."""
        return self._kernels.experts(spec)


MethodT = TypeVar("MethodT", bound=LinearMethod)


class _Adapted(Generic[MethodT]):
    """A layer with adapters.

    Args:
        base: the layer without adapters.
        product: the products of the adapters.
        context: whether the present step has adapters.
        rows: the adapters of the layer's rows, a part of the context.
    """

    def __init__(
        self, base: MethodT, product: LowRankProduct, context: StepContext, rows: AdapterRows
    ) -> None:
        self.base = base
        self._product = product
        self._context = context
        self._rows = rows

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        return self.base.parameters()

    def pack(self) -> None:
        """Bring the filled weight into the form that the kernels read."""
        self.base.pack()

    def rows(self, index: Tensor) -> Tensor:
        """Refuse: neither the embedding nor the output layer has adapters."""
        raise TypeError("a layer with adapters is not an embedding")


class LoraLinear(_Adapted[LinearMethod]):
    """A layer, and the products of the adapters of its rows; see `models.linear.LinearMethod`."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the output [rows, outputs] for `x` [rows, inputs]."""
        out = self.base(x)
        if self._context.has_adapters:
            self._product.add_to(out, x, self._rows)
        return out

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` [rows, outputs] in place."""
        if not self._context.has_adapters:
            self.base.add_to(out, x)
        elif out.is_contiguous():
            self.base.add_to(out, x)
            self._product.add_to(out, x, self._rows)
        else:
            out += self(x)


class SummedLoraLinear(_Adapted[SummedLinear]):
    """A layer that is divided along its inputs, with adapters that are divided as it is.

    The sum over the ranks adds up the adapters' parts, too. See `models.linear.LinearMethod`.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the output [rows, outputs] for this rank's inputs `x` [rows, inputs]."""
        if not self._context.has_adapters:
            return self.base(x)
        return self.base.with_more(x, lambda out: self._product.add_to(out, x, self._rows))

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` [rows, outputs] in place."""
        out += self(x)


class GatedLoraLinear(_Adapted[GatedMethod]):
    """Gate and up with adapters and an activation; see `models.linear.GatedMethod`.

    The sums of the product begin with what the adapters add, so that the kernel is the same with
    adapters and without, and gives the rows without adapters the same bits in every step.
    """

    def __call__(self, x: Tensor) -> Tensor:
        """Refuse: the layer is only called with an activation."""
        raise TypeError("a gated layer with adapters has no output without its activation")

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Refuse: the layer is only called with an activation."""
        raise TypeError("a gated layer with adapters has no output without its activation")

    def initial_sums(self, rows: int) -> Tensor:
        """Return the bias of each row, or zeros: [rows, outputs] float32."""
        return self.base.initial_sums(rows)

    def gated(self, x: Tensor, activation: Activation, sums: Tensor | None = None) -> Tensor:
        """Compute act(gate) * up [rows, outputs / 2]; see `GatedMethod.gated`."""
        if self._context.has_adapters:
            sums = self.initial_sums(len(x)) if sums is None else sums
            self._product.add_to(sums, x, self._rows)
        return self.base.gated(x, activation, sums)


def without_adapters(layer: LinearProduct | None) -> LinearProduct | None:
    """Return the platform's layer within a layer that may have adapters."""
    return layer.base if isinstance(layer, _Adapted) else layer
