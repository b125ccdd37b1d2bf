"""The inner loop of linear attention: a row changes columns of a state, and reads them.

A state is a matrix of keys and values. Its columns do not depend on each other, so the result is
the same, to the last bit, for any number of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from paged_backend.platforms.cpu.llvm import INT64, call_one, shared_function
from paged_backend.platforms.cpu.tiles import HAS_AVX512
from paged_backend.platforms.cpu.vectors import (
    FLOATS,
    copies,
    fma,
    load,
    reduce_to_one,
    store_float32,
)

MOST_PANELS = 8 if HAS_AVX512 else 2
"""Panels of LANES columns of which the sums fit in the registers; a power of two."""

_FLOAT = FLOATS.element
_ZEROS = ir.Constant(FLOATS, [0.0] * FLOATS.count)


def make_step(*, corrects: bool) -> Any:
    """Return the device function ``step`` for one row and some panels of a state.

    Args:
        corrects: a row adds what its value lacks, not the value itself.

    step(panels, source, target, stride, num_keys, decays, keys, queries, recalls, values, beta,
    out) computes S' = decays S + keys values^T for columns of the state S at `source`, stores it
    at `target`, which may be `source`, and stores S'^T queries at `out`. If it corrects, values
    become beta (values - S^T recalls) before. `panels` is a power of two up to `MOST_PANELS`.
    `stride` counts the floats from a key to the next one. `decays`, `keys`, `queries` and
    `recalls` are addresses of num_keys float32, `values` and `out` of one for each column, and
    `beta` is the address of a float32.
    """

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def step(
        context: Any,
        panels: Any,
        source: Any,
        target: Any,
        stride: Any,
        num_keys: Any,
        decays: Any,
        keys: Any,
        queries: Any,
        recalls: Any,
        values: Any,
        beta: Any,
        out: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            functions = {}
            panels = MOST_PANELS
            while panels:
                functions[panels] = _step_function(builder.module, panels, corrects)
                panels //= 2
            call_one(builder, args[0], functions, args[1:])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), generate

    return step


def _step_function(module: Any, panels: int, corrects: bool) -> Any:
    return shared_function(
        module,
        f"paged_state_step_{panels}_{corrects}",
        11,
        lambda builder, args: _emit_step(builder, panels, corrects, args),
    )


def _emit_step(builder: Any, panels: int, corrects: bool, args: Sequence[Any]) -> None:
    source, target, stride, num_keys, decays, keys, queries, recalls, values, beta, out = args
    stride = builder.mul(stride, INT64(4))
    added = [load(builder, values, INT64(panel)) for panel in range(panels)]
    if corrects:
        factor = copies(builder, beta, INT64(0))
        recalled = _emit_recall(builder, panels, (source, stride, num_keys, recalls))
        added = [
            builder.fmul(factor, builder.fsub(value, known))
            for value, known in zip(added, recalled, strict=True)
        ]
    sums = [cgutils.alloca_once_value(builder, _ZEROS) for _ in range(panels)]
    with cgutils.for_range(builder, num_keys) as loop:
        offset = builder.mul(loop.index, stride)
        before, after = builder.add(source, offset), builder.add(target, offset)
        decay, key, query = (
            copies(builder, numbers, loop.index) for numbers in (decays, keys, queries)
        )
        for panel, (value, total) in enumerate(zip(added, sums, strict=True)):
            kept = builder.fmul(decay, load(builder, before, INT64(panel)))
            state = fma(builder, key, value, kept)
            store_float32(builder, state, after, INT64(panel))
            builder.store(fma(builder, query, state, builder.load(total)), total)
    for panel, total in enumerate(sums):
        store_float32(builder, builder.load(total), out, INT64(panel))


def _emit_recall(builder: Any, panels: int, args: tuple[Any, Any, Any, Any]) -> list[Any]:
    """Emit S^T recalls: for each column, the sum over even keys, plus the one over odd keys.

    A sum waits for the one before it, and the processor works on the other ones meanwhile.
    """
    source, stride, num_keys, recalls = args
    halves = [[cgutils.alloca_once_value(builder, _ZEROS) for _ in range(panels)] for _ in range(2)]

    def add(key: Any, sums: list[Any]) -> None:
        place, factor = (
            builder.add(source, builder.mul(key, stride)),
            copies(builder, recalls, key),
        )
        for panel, total in enumerate(sums):
            state = load(builder, place, INT64(panel))
            builder.store(fma(builder, factor, state, builder.load(total)), total)

    pairs = builder.lshr(num_keys, INT64(1))
    with cgutils.for_range(builder, pairs) as loop:
        even = builder.shl(loop.index, INT64(1))
        for parity, sums in enumerate(halves):
            add(builder.add(even, INT64(parity)), sums)
    with builder.if_then(builder.trunc(num_keys, ir.IntType(1))):
        add(builder.sub(num_keys, INT64(1)), halves[0])
    return [
        builder.fadd(builder.load(even), builder.load(odd))
        for even, odd in zip(*halves, strict=True)
    ]


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def sum_of_squares(context: Any, numbers: Any, size: Any) -> Any:
    """Return the sum of the squares of `size` float32 at an address, in one order for each size."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        result = cgutils.alloca_once(builder, _FLOAT)
        function = shared_function(builder.module, "paged_sum_of_squares", 3, _emit_sum_of_squares)
        builder.call(function, [*args, builder.ptrtoint(result, INT64)])
        return builder.load(result)

    return types.float32(types.int64, types.int64), generate


def _emit_sum_of_squares(builder: Any, args: Sequence[Any]) -> None:
    numbers, size, out = args
    whole = builder.udiv(size, INT64(FLOATS.count))
    sums = cgutils.alloca_once_value(builder, _ZEROS)
    with cgutils.for_range(builder, whole) as loop:
        vector = load(builder, numbers, loop.index)
        builder.store(fma(builder, vector, vector, builder.load(sums)), sums)
    result = builder.inttoptr(out, _FLOAT.as_pointer())
    builder.store(reduce_to_one(builder, "fadd", builder.load(sums)), result)
    with cgutils.for_range_slice(
        builder, builder.mul(whole, INT64(FLOATS.count)), size, INT64(1)
    ) as (index, _):
        place = builder.gep(builder.inttoptr(numbers, _FLOAT.as_pointer()), [index])
        number = builder.load(place, align=4)
        total = builder.fadd(builder.load(result), builder.fmul(number, number))
        builder.store(total, result)
