"""Linear attention by the gated delta rule: Qwen3-Next, Qwen3.5 and OLMo Hybrid."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.checkpoint.mixers import DeltaLayout, DeltaShape
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.layers import Kernels, NormWeights
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.models.states import KeptTensor, StateLayer


class GatedDelta:
    """A layer's linear attention; see `models.mixer.Mixer`.

    Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024).

    Args:
        shape: sizes.
        index: the layer's number.
        layer_name: the name of the layer in the checkpoint.
        eps: epsilon of the norm.
        kernels: the platform.
    """

    reader: LinearMethod | None = None
    """Two layers read the input."""
    kept_tokens = None

    def __init__(
        self, shape: DeltaShape, index: int, layer_name: str, eps: float, kernels: Kernels
    ) -> None:
        self.name = shape.name
        self._shape, self._eps = shape, shape.norm_eps or eps
        hidden, prefix, device = shape.hidden_size, f"{layer_name}.{shape.name}", kernels.device
        large, small = _row_orders(shape)
        self._in_proj = kernels.linear(
            LinearSpec(hidden, shape.large_parts, prefix=prefix, row_order=large)
        )
        self._small_proj = kernels.linear(
            LinearSpec(
                hidden, shape.small_parts, prefix=prefix, row_order=small, full_precision=True
            )
        )
        self.o_proj = kernels.linear(
            LinearSpec(shape.values_size, {shape.output: hidden}, prefix=prefix)
        )
        self._conv = torch.empty(shape.channels, 1, shape.width, dtype=kernels.dtype, device=device)
        self._a_log = torch.empty(shape.num_value_heads, device=device)
        self._dt_bias = torch.empty(shape.num_value_heads, device=device)
        self._norms = NormWeights(kernels, unit_offset=False)
        self._norm = self._norms.empty(shape.value_dim)
        self._rms_norm, self._multiply_silu = kernels.layers.rms_norm, kernels.layers.multiply_silu
        self.kept_state = StateLayer(
            index,
            (
                KeptTensor((shape.channels, shape.width - 1), kernels.dtype),
                KeptTensor((shape.num_value_heads, shape.key_dim, shape.value_dim), torch.float32),
            ),
        )

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        linears = self._in_proj, self._small_proj, self.o_proj
        parameters: dict[str, Parameter] = {}
        for linear in linears:
            parameters |= linear.parameters()
        sizes = self._shape.convolutions
        for name, part in zip(sizes, torch.split(self._conv, list(sizes.values())), strict=True):
            parameters[f"{name}.weight"] = part
        return parameters | {
            "A_log": self._a_log,
            "dt_bias": self._dt_bias,
            f"{self._shape.norm}.weight": self._norm,
        }

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        for linear in (self._in_proj, self._small_proj, self.o_proj):
            linear.pack()
        self._conv = self._conv.squeeze(1)
        self._decay = -self._a_log.exp()

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute what `o_proj` reads, [num_tokens, values_size]; see `Mixer.mix`."""
        shape, states, step = self._shape, backend.open_states, meta.state_step
        window, pool = states.of(self.kept_state)
        large, small = self._in_proj(x), self._small_proj(x).float()
        convolved, gate = large[:, : shape.channels], large[:, shape.channels :]
        convolved = states.functions.causal_conv(
            convolved, self._conv, None, window, step, silu=True
        )
        sizes = [shape.keys_size, shape.keys_size, shape.values_size]
        q, k, v = torch.split(convolved, sizes, dim=1)
        gates = *small.chunk(2, dim=1), self._decay, self._dt_bias
        g, beta = states.functions.delta_gates(*gates)
        attended = states.functions.gated_delta(
            q.view(len(q), -1, shape.key_dim),
            k.view(len(k), -1, shape.key_dim),
            v.view(len(v), -1, shape.value_dim),
            g,
            beta if shape.max_beta == 1 else beta * shape.max_beta,
            pool,
            step,
        )
        normed = self._rms_norm(attended.view(-1, shape.value_dim), self._norm, self._eps)
        out = normed.view(len(x), -1)
        self._multiply_silu(out, gate)
        return out


def _row_orders(shape: DeltaShape) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the rows of fused weights in the order of the sections: queries, keys, values ...

    A fused weight has, for each key head, its rows of all sections.
    """
    if shape.layout is not DeltaLayout.FUSED:
        return {}, {}
    values = shape.values_size // shape.num_key_heads
    large = sections_first(shape.num_key_heads, (shape.key_dim, shape.key_dim, values, values))
    repeats = shape.num_value_heads // shape.num_key_heads
    small = sections_first(shape.num_key_heads, (repeats, repeats))
    return {"in_proj_qkvz": large}, {"in_proj_ba": small}


def sections_first(num_heads: int, sizes: tuple[int, ...]) -> Tensor:
    """Return the order that puts each section of all heads together.

    Args:
        num_heads: heads, each with rows of all sections.
        sizes: rows of each section of a head.

    Returns:
        [num_heads * sum(sizes)] int64, the numbers of rows.
    """
    rows = torch.arange(num_heads * sum(sizes)).view(num_heads, -1)
    return torch.cat([part.flatten() for part in torch.split(rows, list(sizes), dim=1)])
