"""The inner loop of all CPU kernels: a small matrix product in vector registers.

numba compiles it for the instructions of the machine (AVX2, AVX-512), so no C compiler is needed.
Every result is the sum over the depth in order, one multiply-add after the other, regardless of
the other rows. So the numbers of a token do not depend on its batch. All operands are made of words
of 32 bits: a float32, or several small integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple, Protocol

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba.core import cgutils, types
from numba.extending import intrinsic

from paged_backend.platforms.cpu.llvm import INT64, call_one, shared_function
from paged_backend.platforms.cpu.threads import device_function, device_variant

LANES = 16  # columns of a panel
_NARROW_LANES = 8
# A tile has at most 24 sums of 16 floats in the 32 registers of AVX-512, and 6 sums of two
# registers each in the 16 registers of AVX2. The rest holds the operands.
HAS_AVX512 = bool(get_host_cpu_features().get("avx512f"))
_SUMS = 24 if HAS_AVX512 else 6
_ROWS = 12 if HAS_AVX512 else 6  # rows of a full tile
# With more tiles of rows, sums take longer than reading B, and prefetches would only delay them.
_MAX_STREAMED = 4
_LEAST_OF_MANY = _MAX_STREAMED * _ROWS // (_MAX_STREAMED + 1)  # rows of a tile, if there are more
_MANY = 8  # added to the panels of such tiles, for the number of their function
_NUM_ARGUMENTS = 13  # arguments of the function of a tile
_NARROW_ROWS = 4  # narrow tiles are rare: few sizes of them are compiled
# Words from a loaded word of a weight to the one that is prefetched. The processor's own prefetches
# end with a page.
_PREFETCH_WORDS = 512
_READ, _ALL_CACHES, _DATA = (ir.IntType(32)(flag) for flag in (0, 3, 1))  # flags of a prefetch
_FLOAT = ir.FloatType()


class Arithmetic(Protocol):
    """The numbers of a product: how a word of A and the words of B are multiplied and added.

    Attributes:
        name: part of the names of the compiled functions; unique to the arithmetic.
        word: the type of a word of A and of C.
    """

    @property
    def name(self) -> str: ...

    @property
    def word(self) -> Any: ...

    def load(self, builder: Any, address: Any, lanes: int) -> Any:
        """Emit the load of the words of B for a number of columns, one after the other."""
        ...

    def multiply_add(self, builder: Any, total: Any, a: Any, b: Any) -> Any:
        """Emit total + a * b for vectors of sums, of copies of a word of A, and of loaded words."""
        ...


class _Kind(NamedTuple):
    """A kind of product."""

    arithmetic: Arithmetic
    streams: bool

    @property
    def name(self) -> str:
        """A part of the names of compiled functions."""
        return f"{self.arithmetic.name}_stream" if self.streams else self.arithmetic.name


class Float32:
    """Products of float32 values with float32 sums; see `Arithmetic`."""

    name = "f32"
    word = _FLOAT

    def load(self, builder: Any, address: Any, lanes: int) -> Any:
        """See `Arithmetic.load`."""
        kind = ir.VectorType(_FLOAT, lanes).as_pointer()
        return builder.load(builder.bitcast(address, kind), align=4)

    def multiply_add(self, builder: Any, total: Any, a: Any, b: Any) -> Any:
        """See `Arithmetic.multiply_add`."""
        vector = total.type
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{vector.count}f32"
        )
        return builder.call(fma, [a, b, total])


def _computed_now(builder: Any, value: Any) -> Any:
    """Return a vector that is computed before anything that is emitted later is loaded.

    LLVM would load the words of all rows first, for which there are too few registers, and spill
    them. An empty piece of assembly that reads and writes the vector keeps the order.
    """
    if not HAS_AVX512:
        return value
    signature = ir.FunctionType(value.type, [value.type])
    return builder.asm(signature, "", "=v,0,~{memory}", [value], side_effect=True)


def emit_prefetch(builder: Any, address: Any) -> None:
    """Emit the prefetch of the cache line at an address, which need not exist."""
    pointer, flag = ir.IntType(8).as_pointer(), _READ.type
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag]),
        "llvm.prefetch.p0",
    )
    builder.call(function, [builder.bitcast(address, pointer), _READ, _ALL_CACHES, _DATA])


def _emit_tile(builder: Any, kind: _Kind, rows: int, lanes: int, panels: int, args: Any) -> None:
    """Emit C = A @ B, plus what the sums begin with; they are in registers over the depth.

    If B streams, each step of the depth prefetches a word of each panel: before step `switch` one
    that comes soon, and from then on one of the panels at `ahead`; see `_prefetches`.
    """
    arithmetic, word = kind.arithmetic, kind.arithmetic.word
    vector = ir.VectorType(word, lanes)
    splat_mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    a, a_stride, b, b_stride, panel_stride, c, c_stride, depth, *others = args
    initial, initial_stride, ahead, ahead_step, switch = others
    has_initial = builder.icmp_signed("!=", initial, INT64(0))
    a, b, c, initial, ahead = (
        builder.inttoptr(address, word.as_pointer()) for address in (a, b, c, initial, ahead)
    )

    def at(base: Any, stride: Any, index: Any) -> Any:
        return builder.gep(base, [builder.mul(stride, index)])

    def vector_at(base: Any, stride: Any, index: Any) -> Any:
        return builder.bitcast(at(base, stride, index), vector.as_pointer())

    a_rows = [at(a, a_stride, INT64(row)) for row in range(rows)]
    b_panels = [at(b, panel_stride, INT64(panel)) for panel in range(panels)]
    near = builder.gep(b, [INT64(_PREFETCH_WORDS)])

    def parts(base: Any, stride: Any) -> Iterator[Any]:
        """Yield the addresses of the vectors of a matrix."""
        for row in range(rows):
            for panel in range(panels):
                yield vector_at(builder.gep(base, [INT64(panel * lanes)]), stride, INT64(row))

    zeros = ir.Constant(vector, [0] * lanes)
    sums = [[cgutils.alloca_once_value(builder, zeros) for _ in range(panels)] for _ in range(rows)]
    totals = [*chain.from_iterable(sums)]
    with builder.if_then(has_initial):
        for total, part in zip(totals, parts(initial, initial_stride), strict=True):
            builder.store(builder.load(part, align=4), total)
    with cgutils.for_range(builder, depth) as loop:
        b_places = [at(base, b_stride, loop.index) for base in b_panels]
        if kind.streams:
            is_near = builder.icmp_signed("<", loop.index, switch)
            first = at(builder.select(is_near, near, ahead), ahead_step, loop.index)
            for panel in range(panels):
                emit_prefetch(builder, at(first, panel_stride, INT64(panel)))
        b_rows = [arithmetic.load(builder, place, lanes) for place in b_places]
        for row_sums, a_row in zip(sums, a_rows, strict=True):
            value = builder.load(builder.gep(a_row, [loop.index]))
            lane = builder.insert_element(undefined, value, ir.IntType(32)(0))
            splat = builder.shuffle_vector(lane, undefined, splat_mask)
            for total, b_row in zip(row_sums, b_rows, strict=True):
                after = arithmetic.multiply_add(builder, builder.load(total), splat, b_row)
                builder.store(_computed_now(builder, after), total)
    for total, part in zip(totals, parts(c, c_stride), strict=True):
        builder.store(builder.load(total), part, align=4)


def _tile_function(module: Any, kind: _Kind, rows: int, lanes: int, panels: int) -> Any:
    return shared_function(
        module,
        f"paged_{kind.name}_tile_{rows}x{lanes}x{panels}",
        _NUM_ARGUMENTS,
        lambda builder, args: _emit_tile(builder, kind, rows, lanes, panels, args),
    )


def _generate(kind: _Kind, context: Any, builder: Any, args: Any) -> Any:
    """Emit the call of the tile for a number of panels and rows."""
    sizes = {(0, height): (_NARROW_LANES, 1) for height in (1, _NARROW_ROWS)}
    for panels in (1, 2, 4):
        for height in range(1, min(_ROWS, _SUMS // panels) + 1):
            sizes[panels, height] = (LANES, panels)
    tiles = {
        panels * (_ROWS + 1) + height: _tile_function(builder.module, kind, height, *size)
        for (panels, height), size in sizes.items()
    }
    if kind.streams:
        plain = kind._replace(streams=False)
        for panels in range(1, _SUMS // _ROWS + 1):
            for height in range(_LEAST_OF_MANY, _ROWS + 1):
                key = (_MANY + panels) * (_ROWS + 1) + height
                size = LANES, panels
                tiles[key] = _tile_function(builder.module, plain, height, *size)
    tile = builder.add(builder.mul(args[0], INT64(_ROWS + 1)), args[1])
    call_one(builder, tile, tiles, args[2:])
    return context.get_dummy_value()


@device_function
def panels_at_once(rows: int) -> Any:
    """Return the number of panels of a tile: 4, 2 or 1.

    Few rows have few sums, so their tiles are wider: a sum waits for the one before it, and the
    processor works on other sums meanwhile.
    """
    tiles = max(1, (rows + _ROWS - 1) // _ROWS)
    height = (rows + tiles - 1) // tiles
    panels = 4
    while panels * height > _SUMS:
        panels //= 2
    return panels


@device_function
def _prefetches(following: int, b: int, b_stride: int, depth: int, tiles: int) -> Any:
    """Return what tiles prefetch: an address, words per step of the depth, and the first step.

    A single tile prefetches its own panels some steps ahead, and in its last steps the beginning of
    the following ones. Of several tiles of rows, only the first one reads the panels from memory.
    Memory would be idle during the others, so each of them prefetches a part of the following
    panels.

    Args:
        following: the address of the following panels, or 0 if they are unknown.
        b: the address of the panels.
        b_stride: words of a panel for each step of the depth.
        depth: see `make_multiply`.
        tiles: number of tiles of rows.
    """
    if following == 0:
        return b, b_stride, depth
    if tiles > 1:
        return following, (b_stride + tiles - 1) // tiles, 0
    switch = max(0, depth - _PREFETCH_WORDS // b_stride)
    return following - switch * b_stride * 4, b_stride, switch


def make_multiply(arithmetic: Arithmetic, *, streams: bool = False) -> Any:
    """Return the device function ``multiply`` for some arithmetic.

    Args:
        arithmetic: arithmetic of the products.
        streams: B is a weight that is read from memory in order, so it is prefetched.

    multiply(rows, columns, a, a_stride, b, b_stride, panel_stride, c, c_stride, depth, initial,
    initial_stride, following=0) computes C[rows, columns] = A[rows, depth] @ B[depth, columns],
    plus the matrix at `initial` if that is not 0. It may be C itself, or a row, with a stride of 0.
    `a`, `b`, `c` and `initial` are addresses; strides and the depth count words. Each panel of B
    has `LANES` columns, and the next one begins `panel_stride` words later. `columns` is a multiple
    of 8. `following` is the address of the panels that the thread multiplies next, if it is known.
    """
    kind = _Kind(arithmetic, streams)

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def multiply_tile(
        context: Any,
        panels: Any,
        rows: Any,
        a: Any,
        a_stride: Any,
        b: Any,
        b_stride: Any,
        panel_stride: Any,
        c: Any,
        c_stride: Any,
        depth: Any,
        initial: Any,
        initial_stride: Any,
        ahead: Any,
        ahead_step: Any,
        switch: Any,
    ) -> Any:
        """Multiply by 4, 2 or 1 panels, by a narrow one if `panels` is 0, or see `_MANY`."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _generate(kind, context, builder, args)

        return types.void(*[types.int64] * (_NUM_ARGUMENTS + 2)), generate

    @device_variant(kind.name)
    def multiply(
        rows: int,
        columns: int,
        a: int,
        a_stride: int,
        b: int,
        b_stride: int,
        panel_stride: int,
        c: int,
        c_stride: int,
        depth: int,
        initial: int,
        initial_stride: int,
        following: int = 0,
    ) -> None:
        tiles = (rows + _ROWS - 1) // _ROWS
        panels = panels_at_once(rows)
        column = 0
        while column < columns:
            while panels * LANES > columns - column:
                panels //= 2
            b_tile = b + column // LANES * panel_stride * 4
            ahead = following
            if column + panels * LANES < columns:
                ahead = b_tile + panels * panel_stride * 4
            if panel_stride != b_stride * depth:
                ahead = 0
            ahead, ahead_step, switch = _prefetches(ahead, b_tile, b_stride, depth, tiles)
            function = panels
            if streams and panels != 0 and tiles > _MAX_STREAMED:
                function += _MANY
            first = 0
            tile = 0
            while first < rows:
                tile += 1
                height = tile * rows // tiles - first
                if panels == 0:
                    height = _NARROW_ROWS if rows - first >= _NARROW_ROWS else 1
                before = initial
                if initial != 0:
                    before += (first * initial_stride + column) * 4
                multiply_tile(
                    function,
                    height,
                    a + first * a_stride * 4,
                    a_stride,
                    b_tile,
                    b_stride,
                    panel_stride,
                    c + (first * c_stride + column) * 4,
                    c_stride,
                    depth,
                    before,
                    initial_stride,
                    ahead,
                    ahead_step,
                    switch,
                )
                ahead += depth * ahead_step * 4
                first += height
            column += panels * LANES if panels else _NARROW_LANES

    return multiply
