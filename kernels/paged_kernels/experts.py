"""Products of the experts of a mixture-of-experts layer, for the rows that have chosen them.

Shazeer et al., "Outrageously Large Neural Networks" (2017), section 2. The pairs of a row and an
expert are sorted by expert on the device, and each tile of a product has rows of one expert. The
number of tiles follows from the sizes alone, and tiles without rows return at once, so that a step
can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._activation import swiglu
from paged_kernels._matmul import first_of_tile, load_factors, load_tile
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor
from paged_kernels.tuning.products import MatmulConfig, experts_config

_SORT_BLOCK = 1024  # pairs that a program looks at together
_SUM_TILE = 1024  # columns that one program adds up


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The pairs row * top_k + rank, sorted by expert and padded to whole tiles.

    Attributes:
        pairs: [count * rows of a tile] int32; the number of pairs stands for none.
        experts: [count + 1] int32 the expert of each tile; the last one is the number of tiles
            that have rows.
        count: number of tiles, which suffices for any choice of experts.
    """

    pairs: Tensor
    experts: Tensor
    count: int


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _sort_pairs_kernel(
    ids_ptr,
    slots_ptr,
    pairs_ptr,
    tile_experts_ptr,
    num_pairs,
    num_tiles,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: the pairs of one expert, in their order."""
    wait_for_launch_before(DEPENDENT)
    expert = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, BLOCK):
        ids = _load_ids(ids_ptr, slots_ptr, start + offsets, num_pairs, TOP_K, EXPERTS)
        counts += tl.histogram(ids, BINS)
    bins = tl.arange(0, BINS)
    tiles = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(bins < expert, tiles, 0))
    end = first + tl.sum(tl.where(bins == expert, tiles, 0))
    for tile in range(first, end):
        tl.store(tile_experts_ptr + tile, expert)
    if expert == EXPERTS - 1:
        tl.store(tile_experts_ptr + num_tiles, end)
    position = first * ROWS
    for start in range(0, num_pairs, BLOCK):
        ids = _load_ids(ids_ptr, slots_ptr, start + offsets, num_pairs, TOP_K, EXPERTS)
        mine = ids == expert
        before = tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(pairs_ptr + position + before, start + offsets, mask=mine)
        position += tl.sum(mine.to(tl.int32))
    rest = position + tl.arange(0, ROWS)
    tl.store(pairs_ptr + rest, num_pairs, mask=rest < end * ROWS)


@triton.jit
def _load_ids(ids_ptr, slots_ptr, pairs, num_pairs, TOP_K: tl.constexpr, EXPERTS: tl.constexpr):
    """Return the expert of each pair; EXPERTS stands for none."""
    ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=EXPERTS)
    if slots_ptr is not None:
        slots = tl.load(slots_ptr + pairs // TOP_K, mask=pairs < num_pairs, other=-1)
        ids = tl.where(slots < 0, EXPERTS, ids)
    return ids


@triton.jit
def _sum_tile(
    x_ptr,
    w_ptr,
    rows,
    exists,
    num_features,
    N: tl.constexpr,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return the sums [FEATURES, ROWS] of products of features of `w` and of some rows of `x`."""
    total = tl.zeros([FEATURES, rows.shape[0]], tl.float32)
    columns = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * K + columns[None, :]
    for start in range(0, K, BLOCK_K):
        w = load_tile(w_ptr, num_features, start, K, FEATURES, BLOCK_K, N % FEATURES == 0)
        mask = exists[:, None]
        if K % BLOCK_K != 0:
            mask = mask & (start + columns < K)[None, :]
        x = tl.load(x_ptrs + start, mask=mask, other=0.0)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _gate_up_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    pairs_ptr,
    tile_experts_ptr,
    num_pairs,
    num_tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    CUBIC: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one tile of the activation; gate and up, or only up, are N features."""
    wait_for_launch_before(DEPENDENT)
    first_row, first_feature = first_of_tile(num_tiles * ROWS, N, ROWS, FEATURES)
    if first_row >= tl.load(tile_experts_ptr + num_tiles) * ROWS:
        return
    expert = tl.load(tile_experts_ptr + first_row // ROWS).to(tl.int64)
    pairs = tl.load(pairs_ptr + first_row + tl.arange(0, ROWS))
    exists = pairs < num_pairs
    num_features = N - first_feature
    w_ptr += (expert * N + first_feature) * K
    total = _sum_tile(
        x_ptr, w_ptr, pairs // TOP_K, exists, num_features, N, K, FEATURES, BLOCK_K
    )  # fmt: skip
    if bias_ptr is not None:
        bias = load_factors(bias_ptr + expert * N, first_feature, num_features, FEATURES, 0.0)
        total += bias[:, None]
    PER_VALUE: tl.constexpr = 2 if GATED else 1
    WIDTH: tl.constexpr = N // PER_VALUE
    if GATED:
        both = tl.permute(tl.reshape(total, [FEATURES // 2, 2, ROWS]), [2, 0, 1])
        gate, up = tl.split(both)
        values = swiglu(gate, up, ALPHA, LIMIT, UP_OFFSET, CUBIC)
    else:
        positive = tl.maximum(tl.trans(total), 0.0)
        values = positive * positive
    columns = first_feature // PER_VALUE + tl.arange(0, FEATURES // PER_VALUE)
    pointers = out_ptr + pairs.to(tl.int64)[:, None] * WIDTH + columns[None, :]
    mask = exists[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointers, values.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _down_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    pairs_ptr,
    tile_experts_ptr,
    num_pairs,
    num_tiles,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one tile of the outputs of experts [num_pairs, N]."""
    wait_for_launch_before(DEPENDENT)
    first_row, first_feature = first_of_tile(num_tiles * ROWS, N, ROWS, FEATURES)
    if first_row >= tl.load(tile_experts_ptr + num_tiles) * ROWS:
        return
    expert = tl.load(tile_experts_ptr + first_row // ROWS).to(tl.int64)
    pairs = tl.load(pairs_ptr + first_row + tl.arange(0, ROWS))
    exists = pairs < num_pairs
    num_features = N - first_feature
    w_ptr += (expert * N + first_feature) * K
    total = _sum_tile(x_ptr, w_ptr, pairs, exists, num_features, N, K, FEATURES, BLOCK_K)
    if bias_ptr is not None:
        bias = load_factors(bias_ptr + expert * N, first_feature, num_features, FEATURES, 0.0)
        total += bias[:, None]
    columns = first_feature + tl.arange(0, FEATURES)
    pointers = out_ptr + pairs.to(tl.int64)[:, None] * N + columns[None, :]
    values = tl.trans(total).to(out_ptr.dtype.element_ty)
    tl.store(pointers, values, mask=exists[:, None] & (columns < N)[None, :])


@triton.jit
def _add_experts_kernel(
    outputs_ptr,
    weights_ptr,
    out_ptr,
    N: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: a part of one row."""
    wait_for_launch_before(DEPENDENT)
    TILES: tl.constexpr = triton.cdiv(N, TILE)
    row = (tl.program_id(0) // TILES).to(tl.int64)
    columns = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    inside = columns < N
    total = tl.zeros([TILE], tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = row * TOP_K + rank
        output = tl.load(outputs_ptr + pair * N + columns, mask=inside, other=0.0).to(tl.float32)
        total = tl.fma(output, tl.load(weights_ptr + pair), total)
    tl.store(out_ptr + row * N + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def experts(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    cubic: float = 0.0,
    has_absent: bool = False,
    gated: bool = True,
    slots: Tensor | None = None,
) -> Tensor:
    """Compute the weighted sum of the outputs of each row's experts.

    The output of an expert is down @ ((up + up_offset) * gate * s) + its bias, where s is
    sigmoid(alpha * gate + cubic * gate ** 3), and gate and up are rows of gate_up @ x + its bias.
    Experts without a gate compute down @ max(up, 0) ** 2 + its bias. Sums are float32. The
    activation and the outputs of experts are rounded to the dtype of `x`; outputs are added in the
    order of the ids. A row's result does not depend on the other rows.

    Args:
        x: [rows, hidden] bfloat16, float16 or float32.
        gate_up: [num_experts, 2 * intermediate, hidden], dtype of `x`; gate and up take turns.
        down: [num_experts, hidden, intermediate], dtype of `x`.
        expert_ids: [rows, top_k] int32 from 0 to num_experts - 1.
        expert_weights: [rows, top_k] float32.
        gate_up_bias: [num_experts, 2 * intermediate], dtype of `x`.
        down_bias: [num_experts, hidden], dtype of `x`.
        alpha: factor in the sigmoid.
        limit: gate is at most this, and up is between its negative and this.
        up_offset: added to up.
        cubic: factor of the cube in the sigmoid; 0 for none.
        has_absent: `expert_ids` may have num_experts, for experts with an output of zeros.
        gated: whether the experts have a gate. Without one, `gate_up` is [num_experts,
            intermediate, hidden], its bias [num_experts, intermediate], and the numbers of the
            activation have no effect.
        slots: [rows] int64; a negative one marks a row that is padding. It gets arbitrary numbers,
            and no weights are read for it.

    Returns:
        [rows, hidden] in the dtype of `x`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_tensor("x", x, (None, None), MODEL_DTYPES, like=x)
    dependent = dependent_launch(device_of("x", x))
    rows, hidden = x.shape
    check_tensor("gate_up", gate_up, (None, None, hidden), x.dtype, like=x)
    num_experts, both = gate_up.shape[:2]
    check(num_experts > 0, "gate_up", "must have at least one expert")
    per_value = 2 if gated else 1
    check(both % per_value == 0 and both > 0, "gate_up", f"must have rows in pairs, got {both}")
    inner = both // per_value
    check_tensor("down", down, (num_experts, hidden, inner), x.dtype, like=x)
    check_tensor("expert_ids", expert_ids, (rows, None), torch.int32, like=x)
    top_k = expert_ids.shape[1]
    check(top_k > 0, "expert_ids", "must have at least one column")
    check_tensor("expert_weights", expert_weights, (rows, top_k), torch.float32, like=x)
    for name, bias, size in (("gate_up", gate_up_bias, both), ("down", down_bias, hidden)):
        if bias is not None:
            check_tensor(f"{name}_bias", bias, (num_experts, size), x.dtype, like=x)
    if slots is not None:
        check_tensor("slots", slots, (rows,), torch.int64, like=x)
    num_pairs = rows * top_k
    activated = x.new_empty(num_pairs, inner)
    outputs = (x.new_zeros if has_absent else x.new_empty)(num_pairs, hidden)
    out = torch.empty_like(x)
    if rows == 0:
        return out
    config = experts_config(triton.cdiv(num_pairs, num_experts), x.element_size())
    tiles = _sort_pairs(expert_ids, slots, num_experts, config.rows)
    _launch(
        *(_gate_up_kernel, x, gate_up, gate_up_bias, activated, tiles, config),
        TOP_K=top_k,
        ALPHA=alpha,
        LIMIT=limit,
        UP_OFFSET=up_offset,
        CUBIC=cubic,
        GATED=gated,
    )
    _launch(_down_kernel, activated, down, down_bias, outputs, tiles, config)
    tile = min(triton.next_power_of_2(hidden), _SUM_TILE)
    _add_experts_kernel[(rows * triton.cdiv(hidden, tile),)](
        outputs, expert_weights, out, N=hidden, TOP_K=top_k, TILE=tile, num_warps=4, **dependent
    )
    return out


def _sort_pairs(expert_ids: Tensor, slots: Tensor | None, num_experts: int, rows: int) -> _Tiles:
    """Sort the pairs of a row and an expert; a tile has `rows` of them, or fewer."""
    num_pairs = expert_ids.numel()
    # Each expert that is chosen at all has at most one tile that is not full.
    count = (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows
    pairs = expert_ids.new_empty(count * rows)
    tile_experts = expert_ids.new_empty(count + 1)
    _sort_pairs_kernel[(num_experts,)](
        expert_ids,
        slots,
        pairs,
        tile_experts,
        num_pairs,
        count,
        TOP_K=expert_ids.shape[1],
        EXPERTS=num_experts,
        BINS=triton.next_power_of_2(num_experts + 1),
        ROWS=rows,
        BLOCK=_SORT_BLOCK,
        num_warps=4,
        **dependent_launch(device_of("expert_ids", expert_ids)),
    )
    return _Tiles(pairs, tile_experts, count)


def _launch(
    kernel: triton.JITFunction,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: _Tiles,
    config: MatmulConfig,
    **constants: object,
) -> None:
    """Launch a product of sorted rows with the weights `w` [num_experts, N, K] of their experts."""
    features, width = w.shape[1:]
    kernel[(tiles.count * triton.cdiv(features, config.features),)](
        x,
        w,
        bias,
        out,
        tiles.pairs,
        tiles.experts,
        len(out),
        tiles.count,
        N=features,
        K=width,
        ROWS=config.rows,
        FEATURES=config.features,
        BLOCK_K=64 if x.element_size() == 2 else 32,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **dependent_launch(device_of("x", x)),
        **constants,
    )
