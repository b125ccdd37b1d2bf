"""The experts of a layer with int8 weights on a CPU; inputs are rounded to int8 row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paged_backend.checkpoint.moe import SwiGLU
from paged_backend.models.experts import ExpertsProduct, ExpertsSpec
from paged_backend.models.linear import LinearProduct
from paged_backend.platforms.cpu import layers
from paged_backend.platforms.cpu.amx import ROWS, TILE_CONFIG
from paged_backend.platforms.cpu.expert_groups import Groups
from paged_backend.platforms.cpu.expert_kernels import add_ranks
from paged_backend.platforms.cpu.int8_expert_kernels import expert_kernels
from paged_backend.platforms.cpu.int8_linear import CpuInt8Linear
from paged_backend.platforms.portable.product_experts import ProductExperts


def product_experts(
    spec: ExpertsSpec, experts: Sequence[tuple[LinearProduct, LinearProduct]]
) -> ExpertsProduct:
    """Make experts of two products each; see `PlatformKernels.product_experts`.

    Products that are divided among ranks are computed expert by expert, as ranks exchange the
    largest values of rows before each of them.
    """
    first, second = ([pair[i] for pair in experts] for i in range(2))
    gate_up = [product for product in first if isinstance(product, CpuInt8Linear)]
    down = [product for product in second if isinstance(product, CpuInt8Linear)]
    if len(gate_up) == len(down) == len(experts):
        return Int8Experts(spec, gate_up, down)
    return ProductExperts(spec, experts, activate=layers.activate)


class _Rounded(NamedTuple):
    """Rounded rows of all pairs, sorted by expert."""

    values: Tensor  # [num_pairs and spare rows, depth]
    scales: Tensor  # [num_pairs] float32


class _Weights:
    """The weights of one projection of all experts.

    Args:
        products: one of each expert, of one shape.
    """

    def __init__(self, products: Sequence[CpuInt8Linear]) -> None:
        self._products = products  # which own the memory
        self.columns, self.depth = products[0].padded_shape
        self._zeros = torch.zeros(self.columns)
        addresses = [product.addresses(self._zeros) for product in products]
        self.addresses = torch.tensor(addresses, dtype=torch.int64)


class Int8Experts:
    """Computes all experts of a step together; see `ExpertsProduct`.

    Each result is the same as that of `ProductExperts` with the same products.

    Args:
        spec: the sizes.
        gate_up: the products with gate and up, or with up only if the experts are plain.
        down: the second products.
    """

    def __init__(
        self, spec: ExpertsSpec, gate_up: Sequence[CpuInt8Linear], down: Sequence[CpuInt8Linear]
    ) -> None:
        instructions = gate_up[0].instructions
        self._kernels, self._dtype = expert_kernels(instructions), instructions.dtype
        self._gate_up, self._down = _Weights(gate_up), _Weights(down)
        self._num_experts, self._has_absent = len(gate_up), spec.first is not None
        self._is_plain = spec.plain
        self._activation = layers.activation_bits(SwiGLU() if spec.plain else spec.activation)

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts, in the order of its ids.

        See `ExpertsProduct.__call__`.
        """
        if not len(x):
            return torch.empty_like(x)
        x, ids, weights = x.contiguous(), expert_ids.contiguous(), expert_weights.contiguous()
        groups = Groups.of(ids, self._num_experts, None)
        num_pairs = len(groups.pairs)
        numbers = torch.empty(num_pairs, self._gate_up.columns)
        self._multiply(self._quantized(x, groups), self._gate_up, groups, numbers, 0)
        outputs = torch.empty(num_pairs, self._down.columns)
        if self._has_absent:
            outputs.zero_()
        activated = self._activated(numbers)
        self._multiply(activated, self._down, groups, outputs, weights.data_ptr())
        return add_ranks(outputs, *weights.shape)

    def _quantized(self, x: Tensor, groups: Groups) -> _Rounded:
        """Round the row of each pair."""
        num_pairs, depth = len(groups.pairs), self._gate_up.depth
        rounded = self._empty(num_pairs, depth)
        self._kernels.quantize()(
            *(groups.pairs.data_ptr(), x.data_ptr(), *(part.data_ptr() for part in rounded)),
            *(num_pairs, depth, x.shape[1], groups.top_k),
        )
        return rounded

    def _activated(self, numbers: Tensor) -> _Rounded:
        """Round the activation of each pair."""
        num_pairs, columns = numbers.shape
        depth, inner = self._down.depth, columns if self._is_plain else columns // 2
        rounded = self._empty(num_pairs, depth)
        self._kernels.activate()(
            *(numbers.data_ptr(), *(part.data_ptr() for part in rounded)),
            *(num_pairs, depth, inner, int(self._is_plain), *self._activation),
        )
        return rounded

    def _empty(self, num_pairs: int, depth: int) -> _Rounded:
        spare_rows = ROWS - 1  # AMX reads whole tiles
        values = torch.empty(num_pairs + spare_rows, depth, dtype=self._dtype)
        return _Rounded(values, torch.empty(num_pairs))

    def _multiply(
        self, rows: _Rounded, weights: _Weights, groups: Groups, out: Tensor, weights_at: int
    ) -> None:
        """Store the products of all pairs; see `ExpertKernels.multiply`."""
        self._kernels.multiply()(
            *(rows.values.data_ptr(), rows.scales.data_ptr(), weights.addresses.data_ptr()),
            *(groups.bounds.data_ptr(), groups.counts.data_ptr(), weights.depth),
            *(TILE_CONFIG.ctypes.data, out.data_ptr(), *out.shape),
            *(groups.pairs.data_ptr(), weights_at),
        )
