"""The experts of a layer, as Triton kernels."""

from __future__ import annotations

import torch
from paged_kernels.experts import experts
from torch import Tensor

from paged_backend.models.experts import ExpertsSpec
from paged_backend.platforms.gpu.step_rows import StepRows
from paged_backend.platforms.portable.experts import TorchExperts


class TritonExperts(TorchExperts):
    """Dense weights; see :class:`~paged_backend.models.experts.ExpertsMethod`.

    Args:
        spec: sizes and variants.
        dtype: dtype of weights and hidden states.
        device: where they are.
        rows: the rows of the step that runs.
    """

    def __init__(
        self, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device, rows: StepRows
    ) -> None:
        super().__init__(spec, dtype, device)
        self._rows = rows

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts, in the order of its ids.

        See `ExpertsMethod.__call__`. The host does not wait for the device.
        """
        activation, slots = self._spec.activation, self._rows.slots
        if slots is not None and len(slots) != len(x):  # a row for each pair of a token and expert
            slots = None
        return experts(
            x.contiguous(),
            self._gate_up,
            self._down,
            expert_ids,
            expert_weights,
            gate_up_bias=self._gate_up_bias,
            down_bias=self._down_bias,
            alpha=activation.alpha,
            limit=activation.limit,
            up_offset=activation.up_offset,
            cubic=activation.cubic,
            has_absent=self._spec.first is not None,
            gated=not self._spec.plain,
            slots=slots,
        )
