"""The state space layer of Mamba-2, which hybrids such as Granite 4 and Zamba 2 have, too."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from paged_backend.checkpoint.mamba import Mamba2Shape
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.models.states import KeptTensor, StateLayer


class Mamba2:
    """A layer's state space; see `models.mixer.Mixer`.

    Dao and Gu, "Transformers are SSMs" (2024).

    Args:
        shape: sizes.
        index: the layer's number.
        layer_name: the name of the layer in the checkpoint.
        eps: epsilon of the norm.
        kernels: the platform.
    """

    kept_tokens = None

    def __init__(
        self, shape: Mamba2Shape, index: int, layer_name: str, eps: float, kernels: Kernels
    ) -> None:
        self.name = shape.name
        self._shape = shape
        prefix, dtype, device = f"{layer_name}.{shape.name}", kernels.dtype, kernels.device
        hidden, values = shape.hidden_size, shape.values_size
        sections = {"in_proj": sum(shape.sections)}
        self.in_proj = kernels.linear(LinearSpec(hidden, sections, shape.in_bias, prefix))
        self.o_proj = kernels.linear(
            LinearSpec(values, {"out_proj": hidden}, shape.out_bias, prefix)
        )
        self._conv = torch.empty(shape.channels, 1, shape.width, dtype=dtype, device=device)
        has_bias = shape.conv_bias
        self._conv_bias = (
            torch.empty(shape.channels, dtype=dtype, device=device) if has_bias else None
        )
        self._heads = {
            name: torch.empty(shape.num_heads, device=device) for name in ("A_log", "D", "dt_bias")
        }
        self._norm = GroupNorm(shape, eps, kernels) if shape.normed else None
        self._factors = _section_factors(shape, kernels)
        self.kept_state = StateLayer(
            index,
            (
                KeptTensor((shape.channels, shape.width - 1), dtype),
                KeptTensor((shape.num_heads, shape.head_dim, shape.state_dim), torch.float32),
            ),
        )

    @property
    def reader(self) -> LinearMethod:
        """The layer that alone reads the input."""
        return self.in_proj

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        parameters = self.in_proj.parameters() | self.o_proj.parameters() | self._heads
        parameters["conv1d.weight"] = self._conv
        if self._conv_bias is not None:
            parameters["conv1d.bias"] = self._conv_bias
        if self._norm is not None:
            parameters["norm.weight"] = self._norm.weight
        return parameters

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self.in_proj.pack()
        self.o_proj.pack()
        self._conv = self._conv.squeeze(1)
        self._decay = -self._heads["A_log"].exp()

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute what `o_proj` reads, [num_tokens, values_size]; see `Mixer.mix`."""
        projected = self.in_proj(x)
        if self._factors is not None:
            projected = projected * self._factors
        gate, channels, dt = torch.split(projected, list(self._shape.sections), dim=1)
        values = self._scan(channels, dt, backend, meta)
        if self._norm is None:
            return values * silu(gate)
        if self._shape.norm_before_gate:
            return self._norm(values) * silu(gate)
        return self._norm((values.float() * silu(gate.float())).to(gate.dtype))

    def _scan(
        self, channels: Tensor, dt: Tensor, backend: AttentionBackend, meta: AttentionMetadata
    ) -> Tensor:
        """Convolve `channels` and compute the selective scan: [num_tokens, values_size]."""
        shape, states, slots = self._shape, backend.open_states, meta.open_state_slots
        window, pool = states.of(self.kept_state)
        starts = meta.query_start_loc
        convolved = states.functions.causal_conv(
            channels, self._conv, self._conv_bias, window, slots, starts, silu=True
        )
        sizes = [shape.values_size, shape.groups_size, shape.groups_size]
        values, b, c = torch.split(convolved, sizes, dim=1)
        scanned = states.functions.selective_scan(
            values.view(len(values), -1, shape.head_dim),
            dt,
            self._decay,
            b.view(len(b), -1, shape.state_dim),
            c.view(len(c), -1, shape.state_dim),
            self._heads["D"],
            self._heads["dt_bias"],
            pool,
            slots,
            starts,
            dt_limits=shape.dt_limits,
        )
        return scanned.view(len(channels), -1)


class GroupNorm:
    """An RMS norm of each of several groups of consecutive numbers of a row.

    Args:
        shape: sizes.
        eps: epsilon of the norm.
        kernels: the platform.

    Attributes:
        weight: [values_size], to be filled.
    """

    def __init__(self, shape: Mamba2Shape, eps: float, kernels: Kernels) -> None:
        size, dtype, device = shape.values_size, kernels.dtype, kernels.device
        eps = eps if shape.norm_eps is None else shape.norm_eps
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._ones = torch.ones(size // shape.num_groups, dtype=dtype, device=device)
        self._is_one, self._eps = shape.num_groups == 1, eps
        self._rms_norm = kernels.token_norm if shape.divided_norm else kernels.layers.rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the norm of rows of `x` [rows, values_size]."""
        if self._is_one:
            return self._rms_norm(x, self.weight, self._eps)
        groups = self._rms_norm(x.reshape(-1, len(self._ones)), self._ones, self._eps)
        return groups.view(len(x), -1) * self.weight


def _section_factors(shape: Mamba2Shape, kernels: Kernels) -> Tensor | None:
    """Return a factor for each output of the first product; None if all are 1."""
    if not shape.factors:
        return None
    gate, values, b, c, dt = shape.factors
    sizes = shape.values_size, shape.values_size, shape.groups_size, shape.groups_size
    numbers = [
        torch.full((size,), factor)
        for size, factor in zip((*sizes, shape.num_heads), (gate, values, b, c, dt), strict=True)
    ]
    return torch.cat(numbers).to(kernels.device, kernels.dtype)
