"""The state space layer of Mamba, without norms or with those of Jamba or Falcon Mamba."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from paged_backend.checkpoint.mamba import Mamba1Norms, Mamba1Shape
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.models.states import KeptTensor, StateLayer


class Mamba1:
    """A layer's state space; see `models.mixer.Mixer`.

    Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023); Lieber et
    al., "Jamba: A Hybrid Transformer-Mamba Language Model" (2024), for norms with weights; Zuo et
    al., "Falcon Mamba: The First Competitive Attention-free 7B Language Model" (2024), for norms
    without.

    Args:
        shape: sizes.
        index: the layer's number.
        layer_name: the name of the layer in the checkpoint.
        eps: epsilon of the model's norms.
        kernels: the platform.
    """

    kept_tokens = None

    def __init__(
        self, shape: Mamba1Shape, index: int, layer_name: str, eps: float, kernels: Kernels
    ) -> None:
        self.name = shape.name
        self._shape = shape
        self._eps = eps if shape.norm_eps is None else shape.norm_eps
        prefix, dtype, device = f"{layer_name}.{shape.name}", kernels.dtype, kernels.device
        hidden, inner, bias = shape.hidden_size, shape.values_size, shape.bias
        self.in_proj = kernels.linear(LinearSpec(hidden, {"in_proj": 2 * inner}, bias, prefix))
        self.o_proj = kernels.linear(LinearSpec(inner, {"out_proj": hidden}, bias, prefix))
        numbers = {"x_proj": sum(shape.parts)}
        self._x_proj = kernels.linear(
            LinearSpec(inner, numbers, prefix=prefix, full_precision=True)
        )
        self._dt_proj = kernels.linear(
            LinearSpec(shape.rank, {"dt_proj": inner}, prefix=prefix, full_precision=True)
        )
        self._conv = torch.empty(inner, 1, shape.width, dtype=dtype, device=device)
        self._conv_bias = (
            torch.empty(inner, dtype=dtype, device=device) if shape.conv_bias else None
        )
        self._dt_bias, self._d = (torch.empty(inner, device=device) for _ in range(2))
        self._a_log = torch.empty(inner, shape.state_dim, device=device)
        self._norms = {
            name: torch.empty(size, dtype=dtype, device=device)
            for name, size in shape.norm_weights.items()
        }
        self._norm_weights = list(self._norms.values())
        if shape.norms is Mamba1Norms.PLAIN:
            self._norm_weights = [
                torch.ones(size, dtype=dtype, device=device) for size in shape.parts
            ]
        self._rms_norm = kernels.layers.rms_norm
        self.kept_state = StateLayer(
            index,
            (
                KeptTensor((inner, shape.width - 1), dtype),
                KeptTensor((inner, shape.state_dim), torch.float32),
            ),
        )

    @property
    def reader(self) -> LinearMethod:
        """The layer that alone reads the input."""
        return self.in_proj

    @property
    def _linears(self) -> tuple[LinearMethod, ...]:
        return self.in_proj, self._x_proj, self._dt_proj, self.o_proj

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        parameters: dict[str, Parameter] = {
            "conv1d.weight": self._conv,
            "dt_proj.bias": self._dt_bias,
            "A_log": self._a_log,
            "D": self._d,
        }
        for linear in self._linears:
            parameters |= linear.parameters()
        if self._conv_bias is not None:
            parameters["conv1d.bias"] = self._conv_bias
        return parameters | {f"{name}.weight": weight for name, weight in self._norms.items()}

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        for linear in self._linears:
            linear.pack()
        self._conv = self._conv.squeeze(1)
        self._decay = -self._a_log.exp()

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute what `o_proj` reads, [num_tokens, values_size]; see `Mixer.mix`."""
        states, slots = backend.open_states, meta.open_state_slots
        window, pool = states.of(self.kept_state)
        starts = meta.query_start_loc
        values, gate = self.in_proj(x).chunk(2, dim=1)
        values = states.functions.causal_conv(
            values, self._conv, self._conv_bias, window, slots, starts, silu=True
        )
        dt, b, c = self._normed(self._x_proj(values))
        scanned = states.functions.mamba1_scan(
            values,
            self._dt_proj(dt),
            self._decay,
            b,
            c,
            self._d,
            self._dt_bias,
            pool,
            slots,
            starts,
        )
        return (scanned.float() * silu(gate.float())).to(gate.dtype)

    def _normed(self, numbers: Tensor) -> list[Tensor]:
        """Return the row for time steps, B and C, after their norms if they have any."""
        parts = [part.contiguous() for part in torch.split(numbers, list(self._shape.parts), dim=1)]
        if not self._norm_weights:
            return parts
        weights = zip(parts, self._norm_weights, strict=True)
        return [self._rms_norm(part, weight, self._eps) for part, weight in weights]
