"""Linear attention by the gated delta rule with a decay for each channel: Kimi Linear."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.checkpoint.mixers import KimiDeltaShape
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.models.states import KeptTensor, StateLayer

_CONVOLUTIONS = "q_conv1d", "k_conv1d", "v_conv1d"


class KimiDelta:
    """A layer's linear attention; see `models.mixer.Mixer`.

    Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025), section 4.

    Args:
        shape: sizes.
        index: the layer's number.
        layer_name: the name of the layer in the checkpoint.
        eps: epsilon of the norm of a head.
        kernels: the platform.
    """

    reader: LinearMethod | None = None
    """Two layers read the input."""
    kept_tokens = None

    def __init__(
        self, shape: KimiDeltaShape, index: int, layer_name: str, eps: float, kernels: Kernels
    ) -> None:
        self.name = shape.name
        self._shape, self._eps = shape, eps
        prefix, dtype, device = f"{layer_name}.{shape.name}", kernels.dtype, kernels.device
        hidden, values, size = shape.hidden_size, shape.values_size, shape.head_dim
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), values)
        self._in_proj = kernels.linear(LinearSpec(hidden, parts, prefix=prefix))
        self._small_proj = kernels.linear(
            LinearSpec(hidden, shape.small_parts, prefix=prefix, full_precision=True)
        )
        self._decay_proj, self._gate_proj = (
            kernels.linear(LinearSpec(size, {name: values}, prefix=prefix, full_precision=True))
            for name in ("f_b_proj", "g_b_proj")
        )
        self.o_proj = kernels.linear(LinearSpec(values, {"o_proj": hidden}, prefix=prefix))
        self._conv = torch.empty(shape.channels, 1, shape.width, dtype=dtype, device=device)
        self._a_log = torch.empty(1, 1, shape.num_heads, 1, device=device)
        self._dt_bias = torch.empty(values, device=device)
        self._norm = torch.empty(size, dtype=dtype, device=device)
        self._rms_norm = kernels.layers.rms_norm
        self.kept_state = StateLayer(
            index,
            (
                KeptTensor((shape.channels, shape.width - 1), dtype),
                KeptTensor((shape.num_heads, size, size), torch.float32),
            ),
        )

    @property
    def _linears(self) -> tuple[LinearMethod, ...]:
        return self._in_proj, self._small_proj, self._decay_proj, self._gate_proj, self.o_proj

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        parameters: dict[str, Parameter] = {
            "A_log": self._a_log,
            "dt_bias": self._dt_bias,
            "o_norm.weight": self._norm,
        }
        for linear in self._linears:
            parameters |= linear.parameters()
        for name, part in zip(_CONVOLUTIONS, self._conv.chunk(3), strict=True):
            parameters[f"{name}.weight"] = part
        return parameters

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        for linear in self._linears:
            linear.pack()
        self._conv = self._conv.squeeze(1)
        self._decay = -self._a_log.flatten().exp().repeat_interleave(self._shape.head_dim)

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute what `o_proj` reads, [num_tokens, values_size]; see `Mixer.mix`."""
        states, step = backend.open_states, meta.state_step
        window, pool = states.of(self.kept_state)
        functions = states.functions
        convolved = functions.causal_conv(
            self._in_proj(x), self._conv, None, window, step, silu=True
        )
        sizes = list(self._shape.small_parts.values())
        shares, for_decay, for_gate = torch.split(self._small_proj(x), sizes, dim=1)
        rates = self._decay_proj(for_decay.contiguous()).float()
        numbers = torch.cat((shares, self._gate_proj(for_gate.contiguous())), dim=1).float()
        g, gates = functions.delta_gates(numbers, rates, self._decay, self._dt_bias)
        beta, gate = gates[:, : shares.shape[1]].contiguous(), gates[:, shares.shape[1] :]
        heads = len(x), -1, self._shape.head_dim
        q, k, v = (part.view(heads) for part in convolved.chunk(3, dim=1))
        g = g.contiguous().view(heads)
        attended = functions.gated_delta(q, k, v, g, beta, pool, step)
        normed = self._rms_norm(attended.view(-1, heads[2]), self._norm, self._eps)
        return (normed.view(len(x), -1) * gate).to(normed.dtype)
