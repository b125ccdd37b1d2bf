"""The recurrent block of Griffin, as RecurrentGemma has it in place of attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from paged_backend.checkpoint.mixers import RgLruShape
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.models.states import KeptTensor, StateLayer


class RgLru:
    """A layer's recurrent block; see `models.mixer.Mixer`.

    De et al., "Griffin: Mixing Gated Linear Recurrences with Local Attention" (2024), section 2.

    Args:
        shape: sizes.
        index: the layer's number.
        layer_name: the name of the layer in the checkpoint.
        kernels: the platform.
    """

    kept_tokens = None

    def __init__(self, shape: RgLruShape, index: int, layer_name: str, kernels: Kernels) -> None:
        self.name = shape.name
        prefix, dtype, device = f"{layer_name}.{shape.name}", kernels.dtype, kernels.device
        hidden, values = shape.hidden_size, shape.values_size
        parts = {"linear_y": values, "linear_x": values}
        self.in_proj = kernels.linear(LinearSpec(hidden, parts, True, prefix))
        self.o_proj = kernels.linear(LinearSpec(values, {"linear_out": hidden}, True, prefix))
        self._conv = torch.empty(values, 1, shape.width, dtype=dtype, device=device)
        self._conv_bias = torch.empty(values, dtype=dtype, device=device)
        self._recurrent = torch.empty(values, device=device)
        self._input_gate = _Gate(shape, kernels)
        self._recurrent_gate = _Gate(shape, kernels)
        self.kept_state = StateLayer(
            index,
            (
                KeptTensor((values, shape.width - 1), dtype),
                KeptTensor((values,), torch.float32),
            ),
        )

    @property
    def reader(self) -> LinearMethod:
        """The layer that alone reads the input."""
        return self.in_proj

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        parameters = self.in_proj.parameters() | self.o_proj.parameters()
        gates = {"input_gate": self._input_gate, "recurrent_gate": self._recurrent_gate}
        for name, gate in gates.items():
            parameters[f"rg_lru.{name}_weight"] = gate.weight
            parameters[f"rg_lru.{name}_bias"] = gate.bias
        return parameters | {
            "conv_1d.weight": self._conv,
            "conv_1d.bias": self._conv_bias,
            "rg_lru.recurrent_param": self._recurrent,
        }

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self.in_proj.pack()
        self.o_proj.pack()
        self._conv = self._conv.squeeze(1)

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute what `o_proj` reads, [num_tokens, values_size]; see `Mixer.mix`."""
        states, step = backend.open_states, meta.state_step
        window, pool = states.of(self.kept_state)
        factor, values = self.in_proj(x).chunk(2, dim=1)
        values = states.functions.causal_conv(
            values, self._conv, self._conv_bias, window, step, silu=False
        )
        recurrent = states.functions.rg_lru(
            values,
            self._input_gate(values),
            self._recurrent_gate(values),
            self._recurrent,
            pool,
            step,
        )
        return recurrent * gelu(factor, approximate="tanh")


class _Gate:
    """A linear layer with a product for each block of a row.

    Args:
        shape: sizes.
        kernels: the platform.

    Attributes:
        weight: [num_blocks, block_size, block_size], to be filled.
        bias: [num_blocks, block_size], to be filled.
    """

    def __init__(self, shape: RgLruShape, kernels: Kernels) -> None:
        sizes = shape.num_blocks, shape.block_size
        self.weight = torch.empty(*sizes, sizes[1], dtype=kernels.dtype, device=kernels.device)
        self.bias = torch.empty(sizes, dtype=kernels.dtype, device=kernels.device)
        self._multiply_heads = kernels.layers.multiply_heads

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the gates [rows, values_size], before the sigmoid, for `x` of the same shape."""
        heads = x.view(len(x), *self.bias.shape)
        out = torch.empty_like(heads)
        self._multiply_heads(out, heads, self.weight)
        return (out + self.bias).view(x.shape)
