"""The inner loop of selective scans: a row changes lines of a state, and sums each up.

A line is changed, and summed up, in the same order whatever the number of lines at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paged_backend.platforms.cpu.llvm import INT64, call_one, shared_function
from paged_backend.platforms.cpu.math import emit_exp2, exp2
from paged_backend.platforms.cpu.states import copy
from paged_backend.platforms.cpu.threads import device_variant, exact_function, floats
from paged_backend.platforms.cpu.tiles import LANES
from paged_backend.platforms.cpu.vectors import (
    FLOATS,
    copies,
    fma,
    load,
    reduce_to_one,
    splat,
    store_float32,
)

LOG2E = np.float32(math.log2(math.e))
_LINES = 4  # lines that are changed at once
_FLOAT = FLOATS.element


@exact_function
def _decay_alike(
    size: int, state: int, time: Any, added: Any, rates: int, b: int, c: int, out: int
) -> None:
    """Let a row change the last numbers of a line, which decay alike, and add them to its sum."""
    numbers, factors, weights = floats(state, size), floats(b, size), floats(c, size)
    decay = exp2(time)
    total = np.float32(0.0)
    for i in range(size):
        numbers[i] = decay * numbers[i] + added * factors[i]
        total += numbers[i] * weights[i]
    floats(out, 1)[0] += total


@exact_function
def _decay_each(
    size: int, state: int, time: Any, added: Any, rates: int, b: int, c: int, out: int
) -> None:
    """Do the same for numbers that decay by their rates."""
    numbers, of_numbers = floats(state, size), floats(rates, size)
    factors, weights = floats(b, size), floats(c, size)
    total = np.float32(0.0)
    for i in range(size):
        numbers[i] = exp2(time * of_numbers[i]) * numbers[i] + added * factors[i]
        total += numbers[i] * weights[i]
    floats(out, 1)[0] += total


def make_scan(name: str, *, one_decay: bool) -> Any:
    """Return the device function ``scan``, by which a row changes lines of a state.

    Args:
        name: part of the names of compiled functions; unique to the scan.
        one_decay: all numbers decay alike, not each by its rate.

    scan(lines, size, source, target, times, rates, inputs, b, c, out) computes S' = decays S +
    inputs b^T for lines S [lines, size] at `source`, stores them at `target`, which may be
    `source`, and stores the sums S' c at `out`. Decays are 2 to the power of `times` [lines] for
    each line, multiplied with `rates` [lines, size]; if there is one decay, `times` has the power
    for all, and `rates` is not read. No power is positive. `inputs` and `out` are [lines], `b` and
    `c` [size]. All arrays are contiguous float32, given by their addresses.
    """
    scan_vectors = _make_scan_vectors(one_decay)

    scan_rest = _decay_alike if one_decay else _decay_each

    @device_variant(name)
    def scan(
        lines: int,
        size: int,
        source: int,
        target: int,
        times: int,
        rates: int,
        inputs: int,
        b: int,
        c: int,
        out: int,
    ) -> None:
        vectors, line, step = size // LANES, 0, size * 4
        while line < lines:
            count = _LINES if lines - line >= _LINES else 1
            here, at = line * step, line * 4
            time = times if one_decay else times + at
            scan_vectors(
                *(count, vectors, step, source + here, target + here),
                *(time, rates + here, inputs + at, b, c, out + at),
            )
            line += count
        rest, first = size - vectors * LANES, vectors * LANES * 4
        if rest > 0:
            for line in range(lines):
                here, at = line * step + first, line * 4
                time = times if one_decay else times + at
                copy(target + here, source + here, rest)
                scan_rest(
                    *(rest, target + here, floats(time, 1)[0], floats(inputs + at, 1)[0]),
                    *(rates + here, b + first, c + first, out + at),
                )

    return scan


def _make_scan_vectors(one_decay: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def scan_vectors(
        context: Any,
        lines: Any,
        vectors: Any,
        step: Any,
        source: Any,
        target: Any,
        times: Any,
        rates: Any,
        inputs: Any,
        b: Any,
        c: Any,
        out: Any,
    ) -> Any:
        """Change the vectors of one or `_LINES` lines, which are `step` bytes apart."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            functions = {
                lines: _scan_function(builder.module, lines, one_decay) for lines in (1, _LINES)
            }
            call_one(builder, args[0], functions, args[1:])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), generate

    return scan_vectors


def _scan_function(module: Any, lines: int, one_decay: bool) -> Any:
    return shared_function(
        module,
        f"paged_state_scan_{lines}_{one_decay}",
        10,
        lambda builder, args: _emit_scan(builder, lines, one_decay, args),
    )


def _emit_scan(builder: Any, lines: int, one_decay: bool, args: Sequence[Any]) -> None:
    vectors, step, source, target, times, rates, inputs, b, c, out = args
    places = [builder.mul(step, INT64(line)) for line in range(lines)]
    sums = [cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [0.0] * LANES)) for _ in places]
    added = [copies(builder, inputs, INT64(line)) for line in range(lines)]
    powers = [copies(builder, times, INT64(0 if one_decay else line)) for line in range(lines)]
    if one_decay:
        time = builder.load(builder.inttoptr(times, _FLOAT.as_pointer()), align=4)
        powers = [splat(builder, emit_exp2(builder, time))] * lines
    with cgutils.for_range(builder, vectors) as loop:
        factor, weight = (load(builder, vector, loop.index) for vector in (b, c))
        for place, total, number, power in zip(places, sums, added, powers, strict=True):
            decay = power
            if not one_decay:
                rate = load(builder, builder.add(rates, place), loop.index)
                decay = emit_exp2(builder, builder.fmul(power, rate))
            before = load(builder, builder.add(source, place), loop.index)
            state = fma(builder, number, factor, builder.fmul(decay, before))
            store_float32(builder, state, builder.add(target, place), loop.index)
            builder.store(fma(builder, state, weight, builder.load(total)), total)
    for line, total in enumerate(sums):
        result = reduce_to_one(builder, "fadd", builder.load(total))
        place = builder.gep(builder.inttoptr(out, _FLOAT.as_pointer()), [INT64(line)])
        builder.store(result, place, align=4)
