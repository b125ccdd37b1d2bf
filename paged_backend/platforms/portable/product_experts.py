"""Experts that are two separate products each, such as experts with int8 weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paged_backend.checkpoint.moe import SwiGLU
from paged_backend.models.experts import ExpertsSpec
from paged_backend.models.linear import LinearProduct
from paged_backend.platforms.portable.experts import squared_relu, weighted_sum


class ProductExperts:
    """Implements `PlatformKernels.product_experts`.

    See also :class:`~paged_backend.models.experts.ExpertsProduct`.

    Args:
        spec: the sizes.
        experts: two products of each expert: that with gate and up, or up only if they are plain,
            and that with down.
        activate: computes an activation [rows, intermediate_size] of rows of gate, then up; for
            experts that are not plain.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        experts: Sequence[tuple[LinearProduct, LinearProduct]],
        *,
        activate: Callable[[Tensor, SwiGLU], Tensor],
    ) -> None:
        self._experts = experts
        self._activate = activate
        self._activation, self._plain = spec.activation, spec.plain

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts, in the order of its ids.

        See `ExpertsProduct.__call__`.
        """
        outputs = x.new_zeros(*expert_ids.shape, x.shape[1])
        for expert in set(expert_ids.flatten().tolist()) - {len(self._experts)}:
            rows, ranks = (expert_ids == expert).nonzero(as_tuple=True)
            gate_up, down = self._experts[expert]
            numbers = gate_up(x.index_select(0, rows))
            activated = (
                squared_relu(numbers) if self._plain else self._activate(numbers, self._activation)
            )
            outputs[rows, ranks] = down(activated)
        return weighted_sum(outputs, expert_weights).to(x.dtype)
