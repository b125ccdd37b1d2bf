"""A short convolution between two gates, as LFM2 has it in place of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.checkpoint.mixers import ShortConvShape
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.models.states import KeptTensor, StateLayer


class ShortConv:
    """A layer's convolution; see `models.mixer.Mixer`.

    Args:
        shape: sizes.
        index: the layer's number.
        layer_name: the name of the layer in the checkpoint.
        kernels: the platform.
    """

    kept_tokens = None

    def __init__(
        self, shape: ShortConvShape, index: int, layer_name: str, kernels: Kernels
    ) -> None:
        self.name = shape.name
        hidden, values = shape.hidden_size, shape.values_size
        bias, prefix = shape.bias, f"{layer_name}.{shape.name}"
        self.in_proj = kernels.linear(LinearSpec(hidden, {"in_proj": 3 * values}, bias, prefix))
        self.o_proj = kernels.linear(LinearSpec(values, {"out_proj": hidden}, bias, prefix))
        dtype, device = kernels.dtype, kernels.device
        self._weight = torch.empty(values, 1, shape.width, dtype=dtype, device=device)
        self._bias = torch.empty(values, dtype=dtype, device=device) if bias else None
        self.kept_state = StateLayer(index, (KeptTensor((values, shape.width - 1), dtype),))

    @property
    def reader(self) -> LinearMethod:
        """The layer that alone reads the input."""
        return self.in_proj

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        parameters = self.in_proj.parameters() | self.o_proj.parameters()
        parameters["conv.weight"] = self._weight
        return parameters if self._bias is None else parameters | {"conv.bias": self._bias}

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self.in_proj.pack()
        self.o_proj.pack()
        self._weight = self._weight.squeeze(1)

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute what `o_proj` reads, [num_tokens, values_size]; see `Mixer.mix`."""
        states = backend.open_states
        before, after, values = self.in_proj(x).chunk(3, dim=1)
        (pool,) = states.of(self.kept_state)
        return after * states.functions.causal_conv(
            before * values,
            self._weight,
            self._bias,
            pool,
            meta.state_step,
            silu=False,
        )
