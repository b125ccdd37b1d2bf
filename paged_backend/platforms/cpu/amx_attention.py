"""Paged attention on AMX units: bf16 keys, values, queries and weights, with float32 sums.

Each result is a sum in an order that depends on positions alone, as in `attention_tiles`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.platforms.cpu.amx import ROWS, emit_instruction, has_amx, tile_config
from paged_backend.platforms.cpu.attention_tiles import (
    Products,
    Scratch,
    Step,
    make_attend,
    make_write,
)
from paged_backend.platforms.cpu.kv_formats import BFLOAT16_PAIRS, to_bfloat16
from paged_backend.platforms.cpu.llvm import INT64, call_one, shared_function
from paged_backend.platforms.cpu.softmax import weigh_bfloat16
from paged_backend.platforms.cpu.threads import ParallelKernel, array_at, device_function

KEYS = 16
"""Keys that a tile holds. Blocks must be a multiple of it."""

HEAD_DIM = 32
"""Elements of a head that a tile holds. Heads must be a multiple of it."""

_TILES = 2  # tiles of rows, and of columns, of a result that is computed at a time
_ROW_BYTES = 64  # size of a row: 32 bf16 or 16 float32
_INT8 = ir.IntType(8)
_POINTER = _INT8.as_pointer()
# Tiles 0 to 3 hold sums, 4 and 5 rows of A, 6 and 7 rows of B. A tile of weights has 16 columns,
# and a tile of values 8 rows of pairs, as this many are contiguous in a block.
_SCORE_CONFIG = tile_config([_ROW_BYTES] * 8, [ROWS] * 8)
_VALUE_CONFIG = tile_config(
    [_ROW_BYTES] * 4 + [2 * KEYS] * 2 + [_ROW_BYTES] * 2, [ROWS] * 6 + [8] * 2
)


class _Emitter:
    """Emits the product of one or two tiles of rows and two tiles of columns."""

    def __init__(self, builder: Any, row_tiles: int) -> None:
        self._builder = builder
        self._rows = range(row_tiles)
        self._sums = [[_INT8(_TILES * i + j) for j in range(_TILES)] for i in self._rows]
        self._a = [_INT8(4 + i) for i in self._rows]
        self._b = [_INT8(6 + j) for j in range(_TILES)]

    def run(self, name: str, *arguments: Any) -> None:
        emit_instruction(self._builder, name, *arguments)

    def clear(self) -> None:
        for total in (total for row in self._sums for total in row):
            self.run("tilezero", total)

    def move_sums(self, instruction: str, c: Any, c_stride: Any) -> None:
        """Load or store the sums; C has rows of `c_stride` bytes."""
        for i in self._rows:
            for j in range(_TILES):
                place = self._at(c, self._builder.mul(c_stride, INT64(ROWS * i)))
                self.run(
                    instruction, self._sums[i][j], self._at(place, INT64(j * _ROW_BYTES)), c_stride
                )

    def multiply(self, a: Any, a_stride: Any, b: list[Any], b_stride: Any) -> None:
        """Multiply tiles of rows at `a` by the tiles at the addresses in `b`."""
        for i, tile in enumerate(self._a):
            place = self._at(a, self._builder.mul(a_stride, INT64(ROWS * i)))
            self.run("tileloadd64", tile, place, a_stride)
        for j, place in enumerate(b):
            self.run("tileloadd64", self._b[j], place, b_stride)
            for i in self._rows:
                self.run("tdpbf16ps", self._sums[i][j], self._a[i], self._b[j])

    def _at(self, base: Any, offset: Any) -> Any:
        return self._builder.gep(base, [offset])


def _emit_scores(row_tiles: int, builder: Any, args: Any) -> None:
    config, a, a_stride, addresses, pairs, b_stride, c, c_stride, steps = args
    a, c, config = (builder.inttoptr(address, _POINTER) for address in (a, c, config))
    addresses = builder.inttoptr(addresses, INT64.as_pointer())
    emitter = _Emitter(builder, row_tiles)
    emitter.run("ldtilecfg", config)
    with cgutils.for_range(builder, pairs) as pair:
        first = builder.mul(pair.index, INT64(_TILES))
        keys = [
            builder.load(builder.gep(addresses, [builder.add(first, INT64(j))]))
            for j in range(_TILES)
        ]
        emitter.clear()
        with cgutils.for_range(builder, steps) as step:
            offset = builder.mul(step.index, builder.mul(b_stride, INT64(ROWS)))
            emitter.multiply(
                builder.gep(a, [builder.mul(step.index, INT64(_ROW_BYTES))]),
                a_stride,
                [builder.inttoptr(builder.add(key, offset), _POINTER) for key in keys],
                b_stride,
            )
        place = builder.gep(c, [builder.mul(first, INT64(_ROW_BYTES))])
        emitter.move_sums("tilestored64", place, c_stride)
    emitter.run("tilerelease")


def _emit_values(row_tiles: int, builder: Any, args: Any) -> None:
    config, a, a_stride, addresses, groups, b_stride, c, c_stride, pairs = args
    a, c, config = (builder.inttoptr(address, _POINTER) for address in (a, c, config))
    addresses = builder.inttoptr(addresses, INT64.as_pointer())
    emitter = _Emitter(builder, row_tiles)
    emitter.run("ldtilecfg", config)
    with cgutils.for_range(builder, pairs) as pair:
        column = builder.mul(pair.index, INT64(_TILES * _ROW_BYTES))
        place = builder.gep(c, [column])
        emitter.move_sums("tileloadd64", place, c_stride)
        with cgutils.for_range(builder, groups) as group:
            values = builder.add(builder.load(builder.gep(addresses, [group.index])), column)
            emitter.multiply(
                builder.gep(a, [builder.mul(group.index, INT64(2 * KEYS))]),
                a_stride,
                [
                    builder.inttoptr(builder.add(values, INT64(j * _ROW_BYTES)), _POINTER)
                    for j in range(_TILES)
                ],
                b_stride,
            )
        emitter.move_sums("tilestored64", place, c_stride)
    emitter.run("tilerelease")


def _make_product(name: str, emit: Any) -> Any:
    """Return the intrinsic that calls what `emit` emits, for one or two tiles of rows."""

    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def product(
        context: Any,
        row_tiles: Any,
        config: Any,
        a: Any,
        a_stride: Any,
        addresses: Any,
        count: Any,
        b_stride: Any,
        c: Any,
        c_stride: Any,
        steps: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            functions = {
                row_tiles: shared_function(
                    builder.module, f"{name}_{row_tiles}", 9, functools.partial(emit, row_tiles)
                )
                for row_tiles in (1, 2)
            }
            call_one(builder, args[0], functions, args[1:])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return product


_multiply_keys = _make_product("paged_amx_scores", _emit_scores)
"""Multiply queries by keys.

Args: row_tiles, config, queries and bytes of a row, addresses of tiles of keys, half their number,
bytes of a row of these tiles, scores and bytes of a row, and head_dim / HEAD_DIM.
"""

_multiply_values = _make_product("paged_amx_values", _emit_values)
"""Add weights times values to the sums.

Args: row_tiles, config, weights and bytes of a row, addresses of the values of KEYS tokens, their
number, bytes of a row of these tiles, sums and bytes of a row, and head_dim / HEAD_DIM.
"""


@device_function
def _prepare(step: Step, scratch: Scratch, rows: int) -> None:
    """Round the queries to bf16."""
    for row in range(rows):
        rounded, queries = scratch.rounded_queries[row], scratch.queries[row]
        for i in range(len(queries)):
            rounded[i] = to_bfloat16(queries[i], np.float32(1.0))


@device_function
def _find(
    step: Step,
    scratch: Scratch,
    pool: Any,
    place: Any,
    skipped: int,
    num_keys: int,
    token_bytes: int,
) -> Any:
    """Fill in the addresses of each KEYS tokens of a chunk in a pool; returns their number.

    The addresses of skipped tokens stay as they are.
    """
    seq, head, base = place
    numbers, stride = step.out.shape[2] * step.block_size, pool.shape[1]
    groups, start = (num_keys + KEYS - 1) // KEYS, np.int64(pool.ctypes.data)
    index, offset = divmod(base + skipped, step.block_size)
    for group in range(skipped // KEYS, groups):
        place_in_pool = step.table[seq, index] * stride + head * numbers
        scratch.addresses[group] = start + place_in_pool * 2 + offset * token_bytes
        offset += KEYS
        if offset == step.block_size:
            index, offset = index + 1, 0
    return groups


@device_function
def _score(
    step: Step,
    scratch: Scratch,
    rows: int,
    seq: int,
    head: int,
    base: int,
    skipped: int,
    num_keys: int,
) -> None:
    """Multiply queries by the keys of a chunk."""
    head_dim, chunk = scratch.queries.shape[1], scratch.scores.shape[1]
    groups = _find(step, scratch, step.keys, (seq, head, base), skipped, num_keys, 4)
    if groups % _TILES:  # the scores after the last key do not count
        scratch.addresses[groups] = scratch.addresses[groups - 1]
    first = skipped // KEYS
    if first % _TILES:  # neither do those before the first key
        first -= 1
        scratch.addresses[first] = scratch.addresses[first + 1]
    for row in range(0, rows, _TILES * ROWS):
        _multiply_keys(
            2 if rows - row > ROWS else 1,
            np.int64(_SCORE_CONFIG.ctypes.data),
            np.int64(scratch.rounded_queries.ctypes.data) + row * head_dim * 2,
            *(np.int64(head_dim * 2), np.int64(scratch.addresses.ctypes.data) + first * 8),
            *((groups - first + 1) // _TILES, step.block_size * 4),
            np.int64(scratch.scores.ctypes.data) + (row * chunk + first * KEYS) * 4,
            np.int64(chunk * 4),
            head_dim // HEAD_DIM,
        )


@device_function
def _copy_last_values(step: Step, scratch: Scratch, group: int, count: int) -> None:
    """Copy the values of the last tokens, with zeros for what a block holds after them.

    A weight of 0 times a number that is not finite would not be 0.
    """
    head_dim = scratch.queries.shape[1]
    values = array_at(scratch.addresses[group], KEYS * head_dim, np.uint16)
    for token in range(KEYS):
        pair = token // 2 * head_dim
        for i in range(head_dim):
            place = (pair + i) * 2 + token % 2
            scratch.last_values[place] = values[place] if token < count else 0
    scratch.addresses[group] = np.int64(scratch.last_values.ctypes.data)


@device_function
def _add_values(
    step: Step,
    scratch: Scratch,
    rows: int,
    seq: int,
    head: int,
    base: int,
    skipped: int,
    num_keys: int,
) -> None:
    """Add the values of a chunk, weighted, to the sums."""
    head_dim, chunk = scratch.queries.shape[1], scratch.scores.shape[1]
    place, first = (seq, head, base), skipped // KEYS
    groups = _find(step, scratch, step.values, place, skipped, num_keys, head_dim * 2)
    if num_keys % KEYS:
        _copy_last_values(step, scratch, groups - 1, num_keys % KEYS)
    for row in range(0, rows, _TILES * ROWS):
        _multiply_values(
            2 if rows - row > ROWS else 1,
            np.int64(_VALUE_CONFIG.ctypes.data),
            np.int64(scratch.scores.ctypes.data) + row * chunk * 4 + first * KEYS * 2,
            *(np.int64(chunk * 4), np.int64(scratch.addresses.ctypes.data) + first * 8),
            *(groups - first, np.int64(head_dim * 4)),
            *(np.int64(scratch.sums.ctypes.data) + row * head_dim * 4, np.int64(head_dim * 4)),
            head_dim // HEAD_DIM,
        )


_write_pairs = make_write(BFLOAT16_PAIRS)
_attend_tiles = make_attend(
    BFLOAT16_PAIRS, Products(_TILES * ROWS, weigh_bfloat16, _prepare, _score, _add_values)
)


def _write(arguments: Any) -> None:
    _write_pairs(arguments)


def _attend(arguments: Any) -> None:
    _attend_tiles(arguments)


def fits(spec: KVCacheSpec) -> bool:
    """Return whether these kernels can serve a pool of bf16 numbers of this shape."""
    sizes = spec.sizes.values()
    return spec.block_size % KEYS == 0 and all(each.key_dim % HEAD_DIM == 0 for each in sizes)


@functools.cache
def amx_kernels() -> tuple[ParallelKernel, ParallelKernel]:
    """Return the kernels for a pool of pairs of bf16; see `vector_kernels`.

    Raises:
        RuntimeError: this CPU has no AMX, and the first instruction would end the process.
    """
    if not has_amx():
        raise RuntimeError("this CPU has no AMX with bf16, or the kernel does not allow it")
    return ParallelKernel(_write), ParallelKernel(_attend)
