"""Routing of a mixture of experts: the experts of each row and their weights, from logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor

SCORINGS = ("softmax", "sigmoid", "softmax_of_top")
MAX_EXPERTS = 1024

_ROWS = 4  # rows of a program
_LOWEST = tl.constexpr(-3e38)  # stands for lower logits, and for NaN


@triton.jit(do_not_specialize=["rows"])
def _choose_experts_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: some rows. The next largest logit is found `TOP_K` times."""
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, COLUMNS)
    rank = tl.arange(0, RANKS)
    exists = (expert < EXPERTS)[None, :]
    mask = (row < rows)[:, None] & exists
    pointers = logits_ptr + row.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    logits = tl.load(pointers, mask=mask, other=_LOWEST).to(tl.float32)
    logits = tl.where(logits == logits, logits, _LOWEST)
    logits = tl.minimum(tl.maximum(logits, _LOWEST), -_LOWEST)  # differences are not NaN
    free = tl.broadcast_to(exists, [ROWS, COLUMNS])
    ids = tl.zeros([ROWS, RANKS], tl.int32)
    chosen = tl.full([ROWS, RANKS], _LOWEST, tl.float32)
    for k in tl.static_range(TOP_K):
        largest = tl.max(tl.where(free, logits, _LOWEST), 1)
        candidates = free & (logits == largest[:, None])
        index = tl.min(tl.where(candidates, expert[None, :], COLUMNS), 1)
        free = free & (expert[None, :] != index[:, None])
        ids = tl.where((rank == k)[None, :], index[:, None], ids)
        chosen = tl.where((rank == k)[None, :], largest[:, None], chosen)
    used = (rank < TOP_K)[None, :]
    if SCORING == "sigmoid":
        decay = tl.exp(-tl.abs(chosen))
        weights = tl.where(chosen >= 0.0, 1.0, decay) / (1.0 + decay)
    else:
        first = tl.max(chosen, 1)[:, None]
        weights = tl.exp(chosen - first)
        if SCORING == "softmax":
            total = tl.sum(tl.where(exists, tl.exp(logits - first), 0.0), 1)
        else:
            total = tl.sum(tl.where(used, weights, 0.0), 1)
        weights = weights / total[:, None]
    if NORMALIZE:
        total = tl.sum(tl.where(used, weights, 0.0), 1)
        weights = weights / tl.where(total > 0.0, total, 1.0)[:, None]
    place = row.to(tl.int64)[:, None] * TOP_K + rank[None, :]
    mask = (row < rows)[:, None] & used
    tl.store(ids_ptr + place, ids, mask=mask)
    tl.store(weights_ptr + place, weights, mask=mask)


def choose_experts(
    logits: Tensor, top_k: int, *, scoring: str = "softmax", normalize: bool = False
) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest logits for each row, and compute their weights.

    The expert with the largest logit comes first; of equal ones, the expert with the lowest id
    does. A row depends on no other row. Logits that are NaN count as the lowest.

    Args:
        logits: [rows, num_experts] bfloat16, float16 or float32, at most 1,024 experts.
        top_k: number of experts for each row.
        scoring: ``softmax`` over all experts, ``sigmoid`` of each, or ``softmax_of_top`` over the
            chosen experts.
        normalize: divide the weights of a row by their sum.

    Returns:
        The ids int32 and the weights float32, [rows, top_k] each.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device, layout or value.
    """
    check_tensor("logits", logits, (None, None), MODEL_DTYPES, like=logits)
    device = device_of("logits", logits)
    rows, num_experts = logits.shape
    problem = f"must have from 1 to {MAX_EXPERTS} columns, got {num_experts}"
    check(1 <= num_experts <= MAX_EXPERTS, "logits", problem)
    check(1 <= top_k <= num_experts, "top_k", f"must be from 1 to {num_experts}, got {top_k}")
    check(scoring in SCORINGS, "scoring", f"must be one of {', '.join(SCORINGS)}, got {scoring}")
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    columns = triton.next_power_of_2(num_experts)
    _choose_experts_kernel[(triton.cdiv(rows, _ROWS),)](
        logits,
        ids,
        weights,
        rows,
        EXPERTS=num_experts,
        TOP_K=top_k,
        SCORING=scoring,
        NORMALIZE=normalize,
        ROWS=_ROWS,
        COLUMNS=columns,
        RANKS=triton.next_power_of_2(top_k),
        num_warps=4,
        **dependent_launch(device),
    )
    return ids, weights
