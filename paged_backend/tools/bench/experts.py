"""Measures the experts of a layer on the CPU, compared with reading the weights of those chosen."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.models.experts import ExpertsMethod, ExpertsSpec
from paged_backend.platforms.select import select_platform
from paged_backend.tools.bench.processor_time import times_in_turn

HEADER = " rows  experts       MB  compute  read (ms)  ratio"


@dataclass(frozen=True, slots=True)
class ExpertsSizes:
    """The sizes of a layer, and the option `dtype`."""

    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    intermediate_size: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ExpertsTime:
    """The figures of one batch; times are medians of rounds in which both are measured in turn."""

    rows: int
    chosen: int  # experts
    megabytes: float  # size of their weights
    compute_ms: float  # processor time of all threads
    read_ms: float
    ratio: float  # the median of the rounds' ratios

    def line(self) -> str:
        """Return the row under `HEADER`."""
        return (
            f"{self.rows:5}  {self.chosen:7}  {self.megabytes:7.1f}  {self.compute_ms:7.2f}  "
            f"{self.read_ms:9.2f}  {self.ratio:5.2f}"
        )


def measure_experts(
    sizes: ExpertsSizes, batch_sizes: Sequence[int], rounds: int
) -> Iterator[ExpertsTime]:
    """Time batches of random rows that choose random experts; reading is torch's sum of floats."""
    torch.manual_seed(0)
    experts, item_size = _make_experts(sizes)
    expert_bytes = 3 * sizes.hidden_size * sizes.intermediate_size * item_size
    memory = torch.zeros(sizes.num_experts * expert_bytes // 4)
    for rows in batch_sizes:
        order = torch.rand(rows, sizes.num_experts).argsort(dim=1)
        ids = order[:, : sizes.num_experts_per_tok].int()
        chosen = len(set(ids.flatten().tolist()))
        x = torch.randn(rows, sizes.hidden_size)
        compute = functools.partial(experts, x, ids, torch.rand(ids.shape))
        read = memory[: chosen * expert_bytes // 4].sum
        size = chosen * expert_bytes / 1e6
        yield ExpertsTime(rows, chosen, size, *times_in_turn(compute, read, rounds))


def _make_experts(sizes: ExpertsSizes) -> tuple[ExpertsMethod, int]:
    """Return experts with random weights, and the bytes of a weight."""
    platform = select_platform("cpu", sizes.dtype, torch.float32)
    spec = ExpertsSpec(sizes.num_experts, sizes.hidden_size, sizes.intermediate_size)
    experts = platform.experts(spec)
    for place in experts.parameters().values():
        assert isinstance(place, Tensor)
        place.normal_(0, 0.02)
    experts.pack()
    return experts, platform.linear_dtype.itemsize
