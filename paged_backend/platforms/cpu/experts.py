"""The experts of a layer on the CPU, with weights in panels that are read once per batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from paged_backend.checkpoint.moe import SwiGLU
from paged_backend.models.experts import ExpertsSpec
from paged_backend.platforms.cpu import amx_experts, expert_kernels
from paged_backend.platforms.cpu.amx import DEPTH
from paged_backend.platforms.cpu.bf16_kernels import MANY_ROWS
from paged_backend.platforms.cpu.expert_groups import Groups
from paged_backend.platforms.cpu.expert_kernels import ExpertWeights
from paged_backend.platforms.cpu.memory import WEIGHTS
from paged_backend.platforms.cpu.panels import make_panels
from paged_backend.platforms.cpu.tiles import LANES
from paged_backend.platforms.portable.experts import TorchExperts


class CpuExperts(TorchExperts):
    """Weights in panels; see :class:`~paged_backend.models.experts.ExpertsMethod`.

    Only the chosen experts are computed. Hidden states and sums are float32.

    Args:
        spec: the sizes.
        dtype: dtype of the weights. If it is bfloat16, the inputs of products are rounded to it,
            too.
        on_amx: compute on AMX units instead of with vector instructions; the weights are bfloat16.
    """

    def __init__(self, spec: ExpertsSpec, dtype: torch.dtype, *, on_amx: bool = False) -> None:
        super().__init__(spec, dtype, torch.device("cpu"))
        self._on_amx = on_amx
        self._gate_up_panels = self._down_panels = ExpertWeights(torch.empty(0), None)

    def pack(self) -> None:
        """Make the panels, and free the plain weights."""
        super().pack()
        values = 2 if self._gate_up.dtype == torch.bfloat16 else 1
        inputs = DEPTH if self._on_amx else values  # their number is padded to a multiple
        inner = DEPTH if self._on_amx else LANES  # and that of the first outputs

        def panels(weight: Tensor, outputs: int) -> Tensor:
            weight = pad(weight, (0, 0, 0, -len(weight) % outputs))
            return make_panels(weight, -(-weight.shape[1] // inputs) * inputs, values)

        if self._spec.plain:
            first = [panels(weight, inner) for weight in self._gate_up]
            order = _in_order
        else:
            first = [
                take_turns(panels(w[::2], inner), panels(w[1::2], inner)) for w in self._gate_up
            ]
            order = _gate_up_bias
        bias = self._gate_up_bias
        self._gate_up_panels = ExpertWeights(
            WEIGHTS.stack(first), None if bias is None else order(bias.float(), inner)
        )
        self._down_panels = ExpertWeights(
            WEIGHTS.stack([panels(weight, LANES) for weight in self._down]),
            None if self._down_bias is None else _in_order(self._down_bias.float(), LANES),
        )
        del self._gate_up, self._down

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts, in the order of its ids.

        See `ExpertsMethod.__call__`.
        """
        if not len(x):
            return torch.empty_like(x)
        x, ids, weights = x.contiguous(), expert_ids.contiguous(), expert_weights.contiguous()
        if self._on_amx:
            return self._compute_on_amx(x, ids, weights)
        spec = self._spec
        many = None if self._gate_up_panels.panels.dtype == torch.float32 else MANY_ROWS
        groups = Groups.of(ids, spec.num_experts, many)
        activated = expert_kernels.activate(
            *(groups.take_rows(x), self._gate_up_panels, spec.intermediate_size, groups),
            self._activation,
        )
        return expert_kernels.add_experts(
            *(activated, self._down_panels, spec.hidden_size, groups, weights),
            has_absent=spec.first is not None,
        )

    def _compute_on_amx(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        spec, (_, _, pairs, _, values) = self._spec, self._gate_up_panels.panels.shape
        groups = Groups.of(ids, spec.num_experts, None)
        rows = groups.take_rounded(x, pairs * values, amx_experts.SPARE_ROWS)
        activated = amx_experts.activate(rows, self._gate_up_panels, groups, self._activation)
        return amx_experts.add_experts(
            *(activated, self._down_panels, spec.hidden_size, groups, weights),
            has_absent=spec.first is not None,
        )

    @property
    def _activation(self) -> SwiGLU | None:
        return None if self._spec.plain else self._spec.activation


def take_turns(gate: Tensor, up: Tensor) -> Tensor:
    """Return the panels of both tensors [panels, ...], each panel of `gate` before one of `up`."""
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def _gate_up_bias(bias: Tensor, multiple: int) -> Tensor:
    """Bring biases [num_experts, 2 * intermediate_size] into the order of the panels."""
    halves = _padded(bias[:, ::2], multiple), _padded(bias[:, 1::2], multiple)
    return torch.stack(halves, dim=2).flatten(1)


def _in_order(bias: Tensor, multiple: int) -> Tensor:
    """Pad biases [num_experts, outputs] to whole panels."""
    return _padded(bias, multiple).flatten(1)


def _padded(bias: Tensor, multiple: int) -> Tensor:
    """Pad biases [num_experts, outputs] with zeros to [num_experts, panels, 16].

    The number of outputs becomes a multiple of `multiple`, which is one of LANES.
    """
    return pad(bias, (0, -bias.shape[1] % multiple)).view(len(bias), -1, LANES)
