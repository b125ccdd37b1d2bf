"""Short causal convolutions of each channel on the CPU.

`paged_kernels.reference.causal_conv` is the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.models.states import StateStep
from paged_backend.platforms.cpu.kv_formats import to_bfloat16
from paged_backend.platforms.cpu.math import sigmoid
from paged_backend.platforms.cpu.states import (
    aligned,
    check_pool,
    copy,
    fill,
    rows_of,
    sequence_at,
)
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    array_at,
    claim,
    device_function,
    device_variant,
    exact_function,
    floats,
    inlined,
)
from paged_backend.platforms.cpu.tiles import LANES

_CHANNELS, _SEQUENCES = 256, 8  # the size of a piece of work
_USUAL_WIDTH = 4
_ONE = np.float32(1.0)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    step: StateStep,
    *,
    silu: bool,
) -> Tensor:
    """Return the sums of each channel's last inputs, times their weights.

    Args:
        x: [num_tokens, channels] float32 or bfloat16.
        weight: [channels, width]; the last column is for the row itself.
        bias: [channels], added to the sums.
        pool: [num_slots, channels, width - 1], the last inputs of each sequence, oldest first.
            It is changed. It has the dtype of `x`, so that inputs are not rounded.
        step: the rows of each sequence.
        silu: whether to apply SiLU to the results.

    Returns:
        [num_tokens, channels], with the dtype of `x`; sums are in float32.

    Raises:
        ValueError: the pool has another dtype than `x`, or is not contiguous.
    """
    check_pool(pool, x.dtype)
    x, weight = rows_of(x), weight.float().contiguous()
    bias = None if bias is None else bias.float().contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    places = (x, weight, pool, step.slots, step.query_start_loc, out)
    _kernel(x.dtype)(
        *(tensor.data_ptr() for tensor in places),
        0 if bias is None else bias.data_ptr(),
        *(x.stride(0), len(step.slots), *weight.shape, int(silu)),
    )
    return out


@device_function
def _load_float32(number: Any) -> Any:
    return number


@device_function
def _load_bfloat16(number: Any) -> Any:
    return np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)


@device_function
def _store_float32(number: Any, scale: Any) -> Any:
    return number


@exact_function
def _add_products(sums: int, weights: int, inputs: int, size: int) -> None:
    """Add the products of two vectors at addresses to a third one."""
    totals, factors, numbers = floats(sums, size), floats(weights, size), floats(inputs, size)
    for i in range(size):
        totals[i] += factors[i] * numbers[i]


@exact_function
def _apply_silu(sums: int, size: int) -> None:
    totals = floats(sums, size)
    for i in range(size):
        totals[i] *= sigmoid(totals[i])


def _make_convolve(
    name: str, number: Any, load: Callable[..., Any], store: Callable[..., Any]
) -> Any:
    """Return the body of the kernel for inputs and outputs of a numpy type.

    Args:
        name: part of the names of compiled functions; unique to the type.
        number: the type.
        load: a device function that returns the float32 for a number.
        store: a device function that returns the number for a float32, and a scale of 1.
    """
    item = np.dtype(number).itemsize

    @device_variant(name)
    def read(target: int, source: int, size: int, step: int) -> None:
        """Copy every `step`-th number from one address to the other as float32."""
        copies, numbers = floats(target, size), array_at(source, (size, step), number)
        for i in range(size):
            copies[i] = load(numbers[i, 0])

    @device_variant(name)
    def write(target: int, source: int, size: int, step: int) -> None:
        """Copy float32 from one address to every `step`-th number at the other."""
        copies, numbers = array_at(target, (size, step), number), floats(source, size)
        for i in range(size):
            copies[i, 0] = store(numbers[i], _ONE)

    @device_variant(name)
    def read_three(target: int, line: int, source: int, size: int) -> None:
        """Read three numbers of each channel into lines of float32.

        A loop that reads all of them has whole vectors to load, and gathers nothing.
        """
        numbers = array_at(source, (size, 3), number)
        oldest, middle = floats(target, size), floats(target + line, size)
        newest = floats(target + 2 * line, size)
        for i in range(size):
            oldest[i] = load(numbers[i, 0])
            middle[i] = load(numbers[i, 1])
            newest[i] = load(numbers[i, 2])

    @device_variant(name)
    def write_three(target: int, first: int, second: int, third: int, size: int) -> None:
        """Write three numbers of each channel from the addresses of lines."""
        numbers = array_at(target, (size, 3), number)
        oldest, middle, newest = floats(first, size), floats(second, size), floats(third, size)
        for i in range(size):
            numbers[i, 0] = store(oldest[i], _ONE)
            numbers[i, 1] = store(middle[i], _ONE)
            numbers[i, 2] = store(newest[i], _ONE)

    @inlined
    def convolve(arguments: Any) -> None:
        words = numba.carray(arguments, 13)
        x, weight, pool, slots, starts, out, bias = words[1:8]
        x_stride, num_seqs, channels, width, silu = words[8:13]
        # The last inputs of a channel lie in turns: input n is in line n % width.
        memory = np.zeros((2 * width + 1) * _CHANNELS + LANES, np.float32)
        line = _CHANNELS * 4
        sums = aligned(memory)
        weights, window = sums + line, sums + (1 + width) * line
        blocks = (channels + _CHANNELS - 1) // _CHANNELS
        groups = (num_seqs + _SEQUENCES - 1) // _SEQUENCES
        piece = claim(arguments)
        while piece < blocks * groups:
            channel, group = piece % blocks * _CHANNELS, piece // blocks
            size = min(_CHANNELS, channels - channel)
            every = floats(weight + channel * width * 4, (size, width))
            for j in range(width):
                ordered = floats(weights + j * line, size)
                for i in range(size):
                    ordered[i] = every[i, j]
            for seq in range(group * _SEQUENCES, min((group + 1) * _SEQUENCES, num_seqs)):
                first, last, source, target = sequence_at(starts, slots, seq)
                if first == last:
                    continue
                before = pool + (source * channels + channel) * (width - 1) * item
                after = pool + (target * channels + channel) * (width - 1) * item
                if source != 0 and width == _USUAL_WIDTH:
                    read_three(window, line, before, size)
                else:
                    for j in range(width - 1):
                        if source != 0:
                            read(window + j * line, before + j * item, size, width - 1)
                        else:
                            fill(window + j * line, size)
                for row in range(first, last):
                    newest = (width - 1 + row - first) % width
                    read(window + newest * line, x + (row * x_stride + channel) * item, size, 1)
                    if bias != 0:
                        copy(sums, bias + channel * 4, size)
                    else:
                        fill(sums, size)
                    for j in range(width):
                        place = window + (row - first + j) % width * line
                        _add_products(sums, weights + j * line, place, size)
                    if silu != 0:
                        _apply_silu(sums, size)
                    write(out + (row * channels + channel) * item, sums, size, 1)
                if target != 0 and width == _USUAL_WIDTH:
                    oldest = (last - first) % width
                    places = window + oldest * line, window + (oldest + 1) % width * line
                    newest = window + (oldest + 2) % width * line
                    write_three(after, places[0], places[1], newest, size)
                elif target != 0:
                    for j in range(width - 1):
                        place = window + (last - first + j) % width * line
                        write(after + j * item, place, size, width - 1)
            piece = claim(arguments)
        memory[0] = 0  # numba frees an array after its last use, even if its address is in use

    return convolve


_convolve_float32 = _make_convolve("float32", np.float32, _load_float32, _store_float32)
_convolve_bfloat16 = _make_convolve("bfloat16", np.uint16, _load_bfloat16, to_bfloat16)


# numba caches compiled functions on disk only if they are global.
def _convolve_rows(arguments: Any) -> None:
    _convolve_float32(arguments)


def _convolve_bfloat16_rows(arguments: Any) -> None:
    _convolve_bfloat16(arguments)


@cache
def _kernel(dtype: torch.dtype) -> ParallelKernel:
    functions = {torch.float32: _convolve_rows, torch.bfloat16: _convolve_bfloat16_rows}
    return ParallelKernel(functions[dtype])
