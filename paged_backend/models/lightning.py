"""Lightning attention: linear attention with a fixed decay for each head, as MiniMax has it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from paged_backend.checkpoint.mixers import LightningShape
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.delta import sections_first
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.models.states import KeptTensor, StateLayer


class LightningAttention:
    """A layer's linear attention; see `models.mixer.Mixer`.

    MiniMax, "MiniMax-01: Scaling Foundation Models with Lightning Attention" (2025), section 2.2.

    Args:
        shape: sizes.
        index: the layer's number.
        layer_name: the name of the layer in the checkpoint.
        kernels: the platform.
    """

    reader: LinearMethod | None = None
    """Two layers read the input."""
    kept_tokens = None

    def __init__(
        self, shape: LightningShape, index: int, layer_name: str, kernels: Kernels
    ) -> None:
        self.name = shape.name
        self._shape = shape
        prefix, dtype, device = f"{layer_name}.{shape.name}", kernels.dtype, kernels.device
        hidden, values, heads, dim = (
            shape.hidden_size,
            shape.values_size,
            shape.num_heads,
            shape.head_dim,
        )
        # The checkpoint has queries, keys and values of a head together.
        order = {"qkv_proj": sections_first(heads, (dim, dim, dim))}
        self._qkv_proj = kernels.linear(
            LinearSpec(hidden, {"qkv_proj": 3 * values}, prefix=prefix, row_order=order)
        )
        self._gate_proj = kernels.linear(LinearSpec(hidden, {"output_gate": values}, prefix=prefix))
        self.o_proj = kernels.linear(LinearSpec(values, {"out_proj": hidden}, prefix=prefix))
        self._norm = torch.empty(values, dtype=dtype, device=device)
        self._rms_norm = kernels.layers.rms_norm
        self._slopes = torch.tensor(shape.slopes(index), dtype=torch.float32, device=device)
        self.kept_state = StateLayer(index, (KeptTensor((heads, dim, dim), torch.float32),))

    @property
    def _linears(self) -> tuple[LinearMethod, ...]:
        return self._qkv_proj, self._gate_proj, self.o_proj

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        parameters: dict[str, Parameter] = {"norm.weight": self._norm}
        for linear in self._linears:
            parameters |= linear.parameters()
        return parameters

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        for linear in self._linears:
            linear.pack()

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute what `o_proj` reads, [num_tokens, values_size]; see `Mixer.mix`."""
        states, heads = backend.open_states, (len(x), -1, self._shape.head_dim)
        (pool,) = states.of(self.kept_state)
        q, k, v = (part.view(heads) for part in silu(self._qkv_proj(x)).chunk(3, dim=1))
        attended = states.functions.linear_attention(q, k, v, self._slopes, pool, meta.state_step)
        normed = self._rms_norm(attended.view(len(x), -1), self._norm, self._shape.norm_eps)
        return normed * self._gate_proj(x).sigmoid()
