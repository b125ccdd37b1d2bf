"""Measures the functions of a CPU on states, compared with reading and writing the states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paged_backend.models.states import StateFunctions, StateStep
from paged_backend.platforms.select import select_platform
from paged_backend.tools.bench.processor_time import times_in_turn

HEADER = "function        sequences   rows       MB  compute  scale (ms)  ratio  us per row"

_Call = Callable[[Tensor, StateStep], object]
"""A function of a pool and the rows of each sequence."""


@dataclass(frozen=True, slots=True)
class StateTime:
    """The figures of one function and batch; times are medians of rounds, measured in turn."""

    function: str
    sequences: int
    rows: int  # all sequences together
    megabytes: float  # size of their states
    compute_ms: float  # processor time of all threads
    scale_ms: float  # the same, of multiplying the states in place on one thread
    ratio: float  # the median of the rounds' ratios

    def line(self) -> str:
        """Return the row under `HEADER`."""
        return (
            f"{self.function:14}  {self.sequences:9}  {self.rows:5}  {self.megabytes:7.1f}  "
            f"{self.compute_ms:7.2f}  {self.scale_ms:10.2f}  {self.ratio:5.2f}  "
            f"{self.compute_ms / self.rows * 1e3:10.1f}"
        )


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    state: tuple[int, ...]
    make: Callable[[StateFunctions, int], _Call]  # for a number of rows


def measure_states(batch_sizes: Sequence[int], prompt: int, rounds: int) -> Iterator[StateTime]:
    """Time decodes, and one prompt of some rows, with random numbers.

    The convolution and the gated delta rule have the sizes of a layer of Qwen3-Next-80B-A3B, and
    the selective scan those of NVIDIA-Nemotron-Nano-9B-v2.
    """
    torch.manual_seed(0)
    functions = select_platform("cpu", "float32", torch.float32).state_functions
    assert functions is not None
    for function in _FUNCTIONS:
        for sequences, length in [*((size, 1) for size in batch_sizes), (1, prompt)]:
            pool = torch.randn(sequences + 1, *function.state)
            slots = torch.arange(1, sequences + 1, dtype=torch.int32)[:, None].repeat(1, 2)
            starts = torch.arange(sequences + 1, dtype=torch.int32) * length
            lengths = torch.full((sequences,), length, dtype=torch.int32)
            step = StateStep(slots, starts, lengths, sequences if length == 1 else 0)
            call = function.make(functions, sequences * length)
            states = pool[1:].clone().numpy()
            compute = partial(call, pool, step)
            scale = partial(np.multiply, states, np.float32(1), out=states)
            times = times_in_turn(compute, scale, rounds)
            size = states.nbytes / 1e6
            yield StateTime(function.name, sequences, sequences * length, size, *times)


def _conv(functions: StateFunctions, rows: int) -> _Call:
    x, weight = torch.randn(rows, 8192), torch.randn(8192, 4)
    return lambda *state: functions.causal_conv(x, weight, None, *state, silu=True)


def _delta(functions: StateFunctions, rows: int) -> _Call:
    qkv = torch.randn(rows, 64, 128)  # parts of the same rows, as behind a convolution
    q, k, v = qkv[:, :16], qkv[:, 16:32], qkv[:, 32:]
    g, beta = -torch.rand(rows, 32), torch.rand(rows, 32)
    return lambda *state: functions.gated_delta(q, k, v, g, beta, *state)


def _scan(functions: StateFunctions, rows: int) -> _Call:
    x, dt = torch.randn(rows, 128, 80), torch.randn(rows, 128)
    b, c = torch.randn(rows, 8, 128), torch.randn(rows, 8, 128)
    a, d, dt_bias = -torch.rand(128), torch.rand(128), torch.rand(128)
    return lambda *state: functions.selective_scan(x, dt, a, b, c, d, dt_bias, *state)


_FUNCTIONS = (
    _Function("causal_conv", (8192, 3), _conv),
    _Function("gated_delta", (32, 128, 128), _delta),
    _Function("selective_scan", (128, 80, 128), _scan),
)
