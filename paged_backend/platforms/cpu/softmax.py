"""Turns the scores of attention into weights, a whole vector at a time.

The code is emitted: no number is computed by itself, whatever the number of keys, and weights are
rounded to bf16 by the processor's instruction as they are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paged_backend.platforms.cpu.llvm import INT64
from paged_backend.platforms.cpu.math import emit_exp2, emit_maximum, exp2, maximum
from paged_backend.platforms.cpu.threads import array_at, device_variant, floats
from paged_backend.platforms.cpu.tiles import LANES
from paged_backend.platforms.cpu.vectors import (
    FLOATS,
    INTS,
    load,
    opaque,
    reduce_to_one,
    splat,
    store_bfloat16,
    store_float32,
)

LOWEST = np.float32(-1e30)
"""Stands for minus infinity, which fast-math rules out."""

_INT32 = INTS.element


def _make_weigh(name: str, number: Any, store: Callable[..., None]) -> Any:
    """Return `weigh` for weights of a type.

    Args:
        name: part of the name of the compiled function; unique to the type.
        number: the numpy type of the weights.
        store: (builder, vector, address, index), emits that a vector of weights is stored.
    """
    write_weights = _make_write_weights(store)
    size = np.dtype(number).itemsize

    @device_variant(name)
    def weigh(scores: int, sums: int, head_dim: int, state: Any, keys: Any) -> Any:
        """Turn the scores of a row into weights relative to its maximum.

        Args:
            scores: the address of the scores in float32, in whole vectors of LANES. The weights
                replace them. They begin at the same address, and may be narrower.
            sums: the address of the weighted values so far, [head_dim] float32. They are made
                relative to the maximum.
            head_dim: the number of sums.
            state: the row's maximum and the sum of its weights so far, both float32.
            keys: the first one that counts, the one after the last that counts, and their number.
                Weights before and after are 0.

        Returns:
            The new state.
        """
        old, old_total = state
        first, last, num_keys = keys
        whole = (num_keys + LANES - 1) // LANES * LANES
        weights = array_at(scores, whole, number)
        if first >= last:
            for i in range(whole):
                weights[i] = 0
            return state
        begin, end = first // LANES * LANES, (last + LANES - 1) // LANES * LANES
        num_vectors, place = (end - begin) // LANES, scores + begin * 4
        _forget_others(place, 0, first - begin, last - begin)
        _forget_others(place, num_vectors - 1, first - begin, last - begin)
        highest = maximum(old, _largest(place, num_vectors))
        total = write_weights(place, scores + begin * size, num_vectors, highest)
        for i in range(begin):
            weights[i] = 0
        for i in range(end, whole):
            weights[i] = 0
        shrink = exp2(old - highest)  # 1 if the maximum has not changed
        all_sums = floats(sums, head_dim)
        for i in range(head_dim):
            all_sums[i] *= shrink
        return highest, old_total * shrink + total

    return weigh


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _forget_others(context: Any, scores: Any, index: Any, first: Any, last: Any) -> Any:
    """Replace those scores of a vector that are not from `first` to `last` by LOWEST."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, index, *limits = args
        start = builder.mul(index, INT64(LANES))
        lanes = ir.Constant(INTS, list(range(LANES)))
        first, last = (
            splat(builder, builder.trunc(builder.sub(limit, start), _INT32)) for limit in limits
        )
        counts = builder.and_(
            builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, last)
        )
        lowest = ir.Constant(FLOATS, [float(LOWEST)] * LANES)
        loaded = opaque(builder, load(builder, data, index))
        store_float32(builder, builder.select(counts, loaded, lowest), data, index)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _largest(context: Any, scores: Any, num_vectors: Any) -> Any:
    """Return the largest of LANES * num_vectors scores at an address; there is one vector."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data, number = args
        # Two maxima, which do not wait for each other: of the first half, and of the last one.
        half = builder.lshr(builder.add(number, INT64(1)), INT64(1))
        starts = (INT64(0), builder.sub(number, half))
        largest = [cgutils.alloca_once_value(builder, load(builder, data, at)) for at in starts]
        with cgutils.for_range(builder, half) as loop:
            for place, start in zip(largest, starts, strict=True):
                vector = load(builder, data, builder.add(start, loop.index))
                builder.store(emit_maximum(builder, builder.load(place), vector), place)
        both = emit_maximum(builder, *map(builder.load, largest))
        return reduce_to_one(builder, "fmax", both)

    return types.float32(types.int64, types.int64), generate


def _make_write_weights(store: Callable[..., None]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def write_weights(
        context: Any, scores: Any, weights: Any, num_vectors: Any, highest: Any
    ) -> Any:
        """Write 2 to the power of scores less `highest`; returns the sum of these weights."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, target, number, highest = args
            offset = splat(builder, highest)
            total = cgutils.alloca_once_value(builder, ir.Constant(FLOATS, [0.0] * LANES))
            with cgutils.for_range(builder, number) as loop:
                score = load(builder, source, loop.index)
                weight = emit_exp2(builder, builder.fsub(score, offset, flags=("fast",)))
                store(builder, weight, target, loop.index)
                builder.store(builder.fadd(builder.load(total), weight, flags=("fast",)), total)
            return reduce_to_one(builder, "fadd", builder.load(total))

        return types.float32(*[types.int64] * 3, types.float32), generate

    return write_weights


weigh = _make_weigh("float32", np.float32, store_float32)
weigh_bfloat16 = _make_weigh("bfloat16", np.uint16, store_bfloat16)
