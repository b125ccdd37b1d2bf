"""The experts of a layer on the CPU, with weights in panels that are read once per batch."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.models.experts import ExpertsSpec
from paged_backend.platforms.cpu.bf16_kernels import MANY_ROWS
from paged_backend.platforms.cpu.expert_groups import Groups
from paged_backend.platforms.cpu.expert_kernels import ExpertWeights, activate, add_experts
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
    """

    def __init__(self, spec: ExpertsSpec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype, torch.device("cpu"))
        self._gate_up_panels = self._down_panels = ExpertWeights(torch.empty(0), None)

    def pack(self) -> None:
        """Make the panels, and free the plain weights."""
        super().pack()
        values = 2 if self._gate_up.dtype == torch.bfloat16 else 1

        def panels(weight: Tensor) -> Tensor:
            return make_panels(weight, -(-weight.shape[1] // values) * values, values)

        if self._spec.plain:
            first = torch.stack([panels(weight) for weight in self._gate_up])
            order = _in_order
        else:
            first = torch.stack(
                [take_turns(panels(w[::2]), panels(w[1::2])) for w in self._gate_up]
            )
            order = _gate_up_bias
        bias = self._gate_up_bias
        self._gate_up_panels = ExpertWeights(first, None if bias is None else order(bias.float()))
        self._down_panels = ExpertWeights(
            torch.stack([panels(weight) for weight in self._down]),
            None if self._down_bias is None else _in_order(self._down_bias.float()),
        )
        del self._gate_up, self._down

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts, in the order of its ids.

        See `ExpertsMethod.__call__`.
        """
        if not len(x):
            return torch.empty_like(x)
        spec = self._spec
        inner, panels = spec.intermediate_size, self._gate_up_panels
        many = None if panels.panels.dtype == torch.float32 else MANY_ROWS
        groups = Groups.of(expert_ids.contiguous(), spec.num_experts, many)
        rows = groups.take_rows(x.contiguous())
        activation = None if spec.plain else spec.activation
        activated = activate(rows, panels, inner, groups, activation)
        weights = expert_weights.contiguous()
        has_absent = spec.first is not None
        return add_experts(
            *(activated, self._down_panels, spec.hidden_size, groups, weights),
            has_absent=has_absent,
        )


def take_turns(gate: Tensor, up: Tensor) -> Tensor:
    """Return the panels of both tensors [panels, ...], each panel of `gate` before one of `up`."""
    return torch.stack((gate, up), dim=1).flatten(0, 1)


def _gate_up_bias(bias: Tensor) -> Tensor:
    """Bring biases [num_experts, 2 * intermediate_size] into the order of the panels."""
    return torch.stack((_padded(bias[:, ::2]), _padded(bias[:, 1::2])), dim=2).flatten(1)


def _in_order(bias: Tensor) -> Tensor:
    """Pad biases [num_experts, outputs] to whole panels."""
    return _padded(bias).flatten(1)


def _padded(bias: Tensor) -> Tensor:
    """Pad biases [num_experts, outputs] with zeros to [num_experts, panels, 16]."""
    num_panels = -(-bias.shape[1] // LANES)
    padded = bias.new_zeros(len(bias), num_panels * LANES)
    padded[:, : bias.shape[1]] = bias
    return padded.view(len(bias), num_panels, LANES)
