"""Linear attention on the CPU: heads with a state of keys and values, for each sequence.

A piece of work is one head of one sequence. Its rows are prepared a few at a time, and these change
some columns of the state, then the next ones, so that columns stay in the nearest cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np
from torch import Tensor

from paged_backend.platforms.cpu.state_panels import MOST_PANELS
from paged_backend.platforms.cpu.states import (
    aligned,
    begin,
    check_pool,
    copy,
    part_of,
    prefetch,
    sequence_at,
)
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim,
    device_function,
    device_variant,
    inlined,
)
from paged_backend.platforms.cpu.tiles import LANES

_CHUNK = 64  # rows that are prepared at once
_PROMPT_PANELS = min(MOST_PANELS, 4)  # 64 columns of 128 keys fit in a first-level cache
_NUM_ARGUMENTS = 21


class Heads(NamedTuple):
    """The arguments of a kernel: addresses, floats from a row to the next one, and sizes."""

    q: Any  # [num_tokens, key_heads, key_dim]
    k: Any  # the same
    v: Any  # [num_tokens, heads, value_dim]
    decays: Any  # logarithms: [num_tokens, heads, decays_of_head], or [heads]
    beta: Any  # [num_tokens, heads]
    pool: Any  # [num_slots, heads, key_dim, value_dim]
    slots: Any  # see `states`
    query_start_loc: Any
    out: Any  # [num_tokens, heads, value_dim], contiguous
    q_stride: Any
    k_stride: Any
    v_stride: Any
    decay_stride: Any  # 0 for [heads]
    beta_stride: Any
    num_seqs: Any
    key_heads: Any
    heads: Any
    key_dim: Any
    value_dim: Any
    decays_of_head: Any  # 1, or key_dim


class Scratch(NamedTuple):
    """The addresses of a thread's memory, all of it float32."""

    prepared: Any  # [rows, 4, key_dim]: decays, keys, queries and recalls; see `state_panels`
    state: Any  # [key_dim, value_dim], which takes the place of slot 0
    columns: Any  # [key_dim, width], some columns of a state
    values: Any  # [rows, LANES], the values of the last columns, if they are fewer than LANES
    sums: Any  # [rows, LANES], their results


def run(
    kernel: ParallelKernel, inputs: tuple[Tensor, ...], state: tuple[Tensor, ...], out: Tensor
) -> None:
    """Run a kernel.

    Args:
        kernel: made of `make_attend`.
        inputs: q, k, v, decays and beta; see `Heads`.
        state: pool, slots and query_start_loc; see `states`.
        out: results of all rows.
    """
    pool, slots, _ = state
    check_pool(pool)
    _, heads, key_dim, value_dim = pool.shape
    decays = inputs[3]
    strides = (tensor.stride(0) if tensor.dim() > 1 else 0 for tensor in inputs)
    kernel(
        *(tensor.data_ptr() for tensor in (*inputs, *state, out)),
        *strides,
        *(len(slots), inputs[1].shape[1], heads, key_dim, value_dim),
        key_dim if decays.dim() == 3 else 1,
    )


@device_function
def _unpack(arguments: Any) -> Heads:
    words = numba.carray(arguments, _NUM_ARGUMENTS)
    q, k, v, decays, beta, pool, slots, query_start_loc, out = words[1:10]
    q_stride, k_stride, v_stride, decay_stride, beta_stride = words[10:15]
    num_seqs, key_heads, heads, key_dim, value_dim, decays_of_head = words[15:21]
    return Heads(
        *(q, k, v, decays, beta, pool, slots, query_start_loc, out),
        *(q_stride, k_stride, v_stride, decay_stride, beta_stride),
        *(num_seqs, key_heads, heads, key_dim, value_dim, decays_of_head),
    )


@device_function
def _memory_of(heads: Heads) -> Any:
    """Return a thread's memory. Numbers between columns and LANES are computed with, but unused."""
    of_columns = heads.key_dim * (4 * _CHUNK + heads.value_dim + _PROMPT_PANELS * LANES)
    return np.zeros(of_columns + (2 * _CHUNK + 1) * LANES, np.float32)


@device_function
def _divide(heads: Heads, columns: int) -> Scratch:
    """Divide a thread's memory into its parts, of which the address is given."""
    values = columns + heads.key_dim * _PROMPT_PANELS * LANES * 4
    sums = values + _CHUNK * LANES * 4
    prepared = sums + _CHUNK * LANES * 4
    state = prepared + 4 * _CHUNK * heads.key_dim * 4
    return Scratch(prepared, state, columns, values, sums)


@device_function
def _prefetch_row(heads: Heads, row: int, head: int) -> None:
    """Begin to load the values and the results of a row, which are far from those of others."""
    size = heads.value_dim
    prefetch(heads.v + (row * heads.v_stride + head * size) * 4, size)
    prefetch(heads.out + (row * heads.heads + head) * size * 4, size)


def make_attend(name: str, prepare: Callable[..., None], step: Callable[..., None]) -> Any:
    """Return the body of a kernel.

    Args:
        name: part of the names of compiled functions; unique to the attention.
        prepare: a device function (heads, row, head, prepared) that computes what `step` reads
            of a row at an address: [4, key_dim], its decays, keys, queries and recalls.
        step: made by `state_panels.make_step`.
    """

    @device_variant(name)
    def change(
        heads: Heads,
        scratch: Scratch,
        rows: Any,
        head: int,
        panels: int,
        columns: Any,
        results: Any,
    ) -> None:
        """Let prepared rows change some columns of a state, and read them.

        Args:
            heads: arguments of the kernel.
            scratch: memory of the thread.
            rows: the first one, and their number.
            head: number of the head.
            panels: number of panels of columns.
            columns: their address before and after, and the floats from a key to the next one.
            results: the addresses of values and results, and the floats from a row to the next
                one of both.
        """
        before, after, stride = columns
        values, out, value_stride, out_stride = results
        size = heads.key_dim * 4
        source, prepared = before, scratch.prepared
        for i in range(rows[1]):
            beta = heads.beta + ((rows[0] + i) * heads.beta_stride + head) * 4
            step(
                *(panels, source, after, stride, heads.key_dim),
                *(prepared, prepared + size, prepared + 2 * size, prepared + 3 * size),
                *(values + i * value_stride * 4, beta, out + i * out_stride * 4),
            )
            source = after
            prepared += 4 * size

    @device_variant(name)
    def change_copied(
        heads: Heads, scratch: Scratch, rows: Any, head: int, panels: int, places: Any, results: Any
    ) -> None:
        """Do the same in scratch memory, where the columns are next to each other.

        Rows of a state are a power of two long, so its columns share few places of a cache.
        """
        before, after, column = places
        place, width = scratch.columns, panels * LANES
        size, number = heads.value_dim, min(width, heads.value_dim - column)
        for key in range(heads.key_dim):
            copy(place + key * width * 4, before + (key * size + column) * 4, number)
        change(heads, scratch, rows, head, panels, (place, place, width), results)
        for key in range(heads.key_dim):
            copy(after + (key * size + column) * 4, place + key * width * 4, number)

    @device_variant(name)
    def change_last(
        heads: Heads, scratch: Scratch, rows: Any, head: int, places: Any, results: Any
    ) -> None:
        """Do the same for the last columns, which are fewer than LANES."""
        values, out, value_stride, out_stride = results
        number = heads.value_dim - places[2]
        for i in range(rows[1]):
            copy(scratch.values + i * LANES * 4, values + i * value_stride * 4, number)
        in_scratch = scratch.values, scratch.sums, LANES, LANES
        change_copied(heads, scratch, rows, head, 1, places, in_scratch)
        for i in range(rows[1]):
            copy(out + i * out_stride * 4, scratch.sums + i * LANES * 4, number)

    @device_variant(name)
    def change_all(heads: Heads, scratch: Scratch, rows: Any, head: int, places: Any) -> None:
        """Let prepared rows change a state, from one place to another, and read it."""
        size = heads.value_dim
        values = heads.v + (rows[0] * heads.v_stride + head * size) * 4
        out = heads.out + (rows[0] * heads.heads + head) * size * 4
        panels = MOST_PANELS if rows[1] == 1 else _PROMPT_PANELS
        column = 0
        while column < size:
            before, after, here = places[0], places[1], column * 4
            results = values + here, out + here, heads.v_stride, heads.heads * size
            while panels > 1 and panels * LANES > size - column:
                panels //= 2
            if size - column < LANES:
                change_last(heads, scratch, rows, head, (before, after, column), results)
            elif rows[1] == 1:
                columns = before + here, after + here, size
                change(heads, scratch, rows, head, panels, columns, results)
            else:
                places_here = before, after, column
                change_copied(heads, scratch, rows, head, panels, places_here, results)
            column += panels * LANES

    @inlined
    def attend(arguments: Any) -> None:
        heads = _unpack(arguments)
        memory = _memory_of(heads)
        scratch = _divide(heads, aligned(memory))
        size = heads.key_dim * heads.value_dim
        piece = claim(arguments)
        while piece < heads.num_seqs * heads.heads:
            seq, head = piece // heads.heads, piece % heads.heads
            first, last, source, target = sequence_at(heads.query_start_loc, heads.slots, seq)
            after = scratch.state
            if target != 0:
                after = part_of(heads.pool, target, heads.heads, head, size)
            before = part_of(heads.pool, source, heads.heads, head, size)
            if first < last:
                before = begin(before, after, size, source)
            while first < last:
                count = min(_CHUNK, last - first)
                for i in range(count):
                    _prefetch_row(heads, first + i, head)
                    prepare(heads, first + i, head, scratch.prepared + i * heads.key_dim * 16)
                change_all(heads, scratch, (first, count), head, (before, after))
                before = after
                first += count
            piece = claim(arguments)
        memory[0] = 0  # numba frees an array after its last use, even if its address is in use

    return attend
