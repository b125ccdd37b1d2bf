"""Bidirectional attention over whole prompts on the CPU, compiled by numba.

The work is divided into parts: some consecutive queries of one prompt, with one query head. A part
reads the keys in chunks with a running softmax. Its place in the prompt alone decides where chunks
begin, so the numbers of a token do not depend on the other prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.models.packed_attention import PackedPrompts
from paged_backend.platforms.cpu.attention_tiles import CHUNK, Scratch
from paged_backend.platforms.cpu.softmax import LOWEST, weigh
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim,
    device_function,
    float_bits,
    float_of,
    floats,
    inlined,
    longs,
)
from paged_backend.platforms.cpu.tiles import LANES, Float32, make_multiply

_QUERIES = 48  # queries of a part: they share the work of transposing keys
_NO_WINDOW = 2**30
_NUM_ARGUMENTS = 18
_SUPPORTED_MULTIPLE = 8  # divisor of the size of a head
_multiply = make_multiply(Float32())


class CpuPrompts:
    """The prompts of one step, in float32; see `models.attention_step.AttentionStep`.

    Args:
        lengths: the number of tokens of each prompt.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._starts = np.array([0, *accumulate(lengths)], np.int64)

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """See `AttentionStep.attend`; a window reaches as far to both sides."""
        _, num_heads, num_tokens, head_dim = q.shape
        if head_dim % _SUPPORTED_MULTIPLE:
            return PackedPrompts(self._lengths, q.device).attend(module, q, k, v, options)
        out = torch.empty(1, num_tokens, num_heads, head_dim)
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        scale = options.get("scaling") or head_dim**-0.5
        _attend()(
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), self._starts.ctypes.data),
            *(len(self._lengths), num_heads, k.shape[1], head_dim),
            *(stride for x in (q, k, v) for stride in x.stride()[1:3]),
            float_bits(scale * math.log2(math.e)),
            options.get("sliding_window") or _NO_WINDOW,
        )
        return out


class _Rows(NamedTuple):
    """Rows of `head_dim` floats in memory: one for each head of each token."""

    address: Any
    head_stride: Any  # in floats
    token_stride: Any


class _KernelArguments(NamedTuple):
    """The arguments of the kernel."""

    queries: _Rows
    keys: _Rows
    values: _Rows
    out: _Rows
    num_heads: Any
    num_kv_heads: Any
    head_dim: Any
    scale: Any  # factor on the scores, for powers of 2
    window: Any


@device_function
def _address(rows: _Rows, head: int, token: int) -> Any:
    """Return the address of the row of a head of a token."""
    return rows.address + (head * rows.head_stride + token * rows.token_stride) * 4


@device_function
def _load(step: _KernelArguments, scratch: Scratch, rows: int, first: int, head: int) -> None:
    """Gather and scale the queries of one work item of a thread, and reset its sums."""
    for row in range(rows):
        query = floats(_address(step.queries, head, first + row), step.head_dim)
        for i in range(step.head_dim):
            scratch.queries[row, i] = query[i] * step.scale
            scratch.sums[row, i] = 0.0
        scratch.maxima[row] = LOWEST
        scratch.totals[row] = 0.0


@device_function
def _transpose(step: _KernelArguments, head: int, base: int, num_keys: int, panels: Any) -> None:
    """Copy keys to panels [chunk / LANES, head_dim, LANES]; the last one is filled with zeros."""
    for key in range(num_keys):
        source = floats(_address(step.keys, head, base + key), step.head_dim)
        panel, lane = key // LANES, key % LANES
        for i in range(step.head_dim):
            panels[panel, i, lane] = source[i]
    for key in range(num_keys, _whole_panels(num_keys)):
        for i in range(step.head_dim):
            panels[key // LANES, i, key % LANES] = 0.0


@device_function
def _whole_panels(num_keys: int) -> Any:
    return (num_keys + LANES - 1) // LANES * LANES


@device_function
def _store(step: _KernelArguments, scratch: Scratch, rows: int, first: int, head: int) -> None:
    for row in range(rows):
        out = floats(_address(step.out, head, first + row), step.head_dim)
        inverse = np.float32(1.0) / scratch.totals[row]
        for i in range(step.head_dim):
            out[i] = scratch.sums[row, i] * inverse


@inlined
def _attend_part(
    step: _KernelArguments,
    scratch: Scratch,
    panels: Any,
    start: int,
    end: int,
    first: int,
    head: int,
) -> None:
    """Attend the queries from `first` on with a head, in the prompt from `start` to `end`."""
    rows, kv_head = min(_QUERIES, end - first), head // (step.num_heads // step.num_kv_heads)
    _load(step, scratch, rows, first, head)
    queries, scores, sums = (
        np.int64(scratch.queries.ctypes.data),
        np.int64(scratch.scores.ctypes.data),
        np.int64(scratch.sums.ctypes.data),
    )
    last = min(end, first + rows + step.window - 1)
    for base in range(max(start, first - step.window + 1), last, CHUNK):
        num_keys = min(CHUNK, last - base)
        _transpose(step, kv_head, base, num_keys, panels)
        _multiply(
            *(rows, _whole_panels(num_keys), queries, step.head_dim),
            *(np.int64(panels.ctypes.data), LANES, LANES * step.head_dim),
            *(scores, CHUNK, step.head_dim, np.int64(0), np.int64(0)),
        )
        for row in range(rows):
            here = first + row - base
            begin = min(max(0, here - step.window + 1), num_keys)
            scratch.maxima[row], scratch.totals[row] = weigh(
                *(scores + row * CHUNK * 4, sums + row * step.head_dim * 4, step.head_dim),
                (scratch.maxima[row], scratch.totals[row]),
                (begin, min(here + step.window, num_keys), num_keys),
            )
        _multiply(
            *(rows, step.head_dim, scores, CHUNK),
            *(_address(step.values, kv_head, base), step.values.token_stride, LANES),
            *(sums, step.head_dim, num_keys, sums, step.head_dim),
        )
    _store(step, scratch, rows, first, head)


def _attend_prompts(arguments: Any) -> None:
    """Attend one part after the other."""
    words = numba.carray(arguments, _NUM_ARGUMENTS)
    starts, num_heads, head_dim = longs(words[5], words[6] + 1), words[7], words[9]
    step = _KernelArguments(
        _Rows(words[1], words[10], words[11]),
        _Rows(words[2], words[12], words[13]),
        _Rows(words[3], words[14], words[15]),
        _Rows(words[4], head_dim, num_heads * head_dim),
        num_heads,
        words[8],
        head_dim,
        float_of(words[16]),
        words[17],
    )
    scratch = Scratch(
        np.empty((_QUERIES, head_dim), np.float32),
        np.empty((_QUERIES, CHUNK), np.float32),
        np.empty((_QUERIES, head_dim), np.float32),
        np.empty(_QUERIES, np.float32),
        np.empty(_QUERIES, np.float32),
        np.empty((0, 0), np.uint16),
        np.empty(0, np.uint16),
        np.empty(0, np.int64),
    )
    panels = np.empty((CHUNK // LANES, head_dim, LANES), np.float32)
    claimed = claim(arguments)
    part = 0
    for prompt in range(words[6]):
        start, end = starts[prompt], starts[prompt + 1]
        for first in range(start, end, _QUERIES):
            for head in range(num_heads):
                if part == claimed:
                    _attend_part(step, scratch, panels, start, end, first, head)
                    claimed = claim(arguments)
                part += 1


_attend = cache(partial(ParallelKernel, _attend_prompts))
