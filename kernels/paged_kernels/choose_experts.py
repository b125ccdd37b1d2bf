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

_GROUPS = "must divide the experts, with a choice of groups that have enough of them"
_ROWS = 4  # rows of a program
_LOWEST = tl.constexpr(-3e38)  # stands for lower logits, and for NaN


@triton.jit(do_not_specialize=["rows"])
def _choose_experts_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    bias_ptr,
    scale,
    rows,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    NORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCORED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: some rows. The next largest logit, or score, is found `TOP_K` times."""
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
    BY_SCORE: tl.constexpr = (bias_ptr is not None) or (GROUPS > 1)
    keys = logits
    if BY_SCORE:
        all_weights = _weights_of_all(logits, exists, SCORING)
        keys = all_weights
        if bias_ptr is not None:
            keys += tl.load(bias_ptr + expert, mask=expert < EXPERTS, other=0.0)[None, :]
        if GROUPS > 1:
            free = free & _in_chosen_groups(keys, expert, EXPERTS, GROUPS, CHOSEN, SCORED)
    ids = tl.zeros([ROWS, RANKS], tl.int32)
    chosen = tl.full([ROWS, RANKS], _LOWEST, tl.float32)
    for k in tl.static_range(TOP_K):
        largest = tl.max(tl.where(free, keys, _LOWEST), 1)
        candidates = free & (keys == largest[:, None])
        index = tl.min(tl.where(candidates, expert[None, :], COLUMNS), 1)
        free = free & (expert[None, :] != index[:, None])
        ids = tl.where((rank == k)[None, :], index[:, None], ids)
        if BY_SCORE:
            largest = tl.sum(tl.where(expert[None, :] == index[:, None], all_weights, 0.0), 1)
        chosen = tl.where((rank == k)[None, :], largest[:, None], chosen)
    used = (rank < TOP_K)[None, :]
    if BY_SCORE:
        weights = chosen
    elif SCORING == "sigmoid":
        weights = _sigmoid(chosen)
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
    weights *= scale
    place = row.to(tl.int64)[:, None] * TOP_K + rank[None, :]
    mask = (row < rows)[:, None] & used
    tl.store(ids_ptr + place, ids, mask=mask)
    tl.store(weights_ptr + place, weights, mask=mask)


@triton.jit
def _sigmoid(x):
    decay = tl.exp(-tl.abs(x))
    return tl.where(x >= 0.0, 1.0, decay) / (1.0 + decay)


@triton.jit
def _weights_of_all(logits, exists, SCORING: tl.constexpr):
    """Return the weight that each expert would have [ROWS, COLUMNS]."""
    if SCORING == "sigmoid":
        return _sigmoid(logits)
    weights = tl.exp(logits - tl.max(logits, 1)[:, None])
    return weights / tl.sum(tl.where(exists, weights, 0.0), 1)[:, None]


@triton.jit
def _in_chosen_groups(
    scores,
    expert,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SCORED: tl.constexpr,
):
    """Return whether each expert is in one of its row's groups [ROWS, COLUMNS].

    They are the groups with the largest sums of their `SCORED` largest scores.
    """
    ROWS: tl.constexpr = scores.shape[0]
    COLUMNS: tl.constexpr = scores.shape[1]
    group = expert // (EXPERTS // GROUPS)
    GROUPS_PADDED: tl.constexpr = triton.next_power_of_2(GROUPS)
    number = tl.arange(0, GROUPS_PADDED)
    totals = tl.full([ROWS, GROUPS_PADDED], _LOWEST, tl.float32)
    for i in tl.static_range(GROUPS):
        rest = tl.where((group == i)[None, :], scores, _LOWEST)
        total = tl.zeros([ROWS], tl.float32)
        for _ in tl.static_range(SCORED):
            largest = tl.max(rest, 1)
            total += largest
            index = tl.min(tl.where(rest == largest[:, None], expert[None, :], COLUMNS), 1)
            rest = tl.where(expert[None, :] == index[:, None], _LOWEST, rest)
        totals = tl.where((number == i)[None, :], total[:, None], totals)
    free = tl.broadcast_to((number < GROUPS)[None, :], [ROWS, GROUPS_PADDED])
    inside = tl.zeros([ROWS, COLUMNS], tl.int1)
    for _ in tl.static_range(CHOSEN):
        largest = tl.max(tl.where(free, totals, _LOWEST), 1)
        candidates = free & (totals == largest[:, None])
        index = tl.min(tl.where(candidates, number[None, :], GROUPS_PADDED), 1)
        free = free & (number[None, :] != index[:, None])
        inside = inside | (group[None, :] == index[:, None])
    return inside


def choose_experts(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    normalize: bool = False,
    scale: float = 1.0,
    bias: Tensor | None = None,
    groups: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest scores for each row, and compute their weights.

    The expert with the largest score comes first; of equal ones, the expert with the lowest id
    does. A row depends on no other row. Logits that are NaN count as the lowest. The order of
    scores is that of the logits, unless there is a bias or there are groups: then a score is the
    weight that an expert would have, plus its bias.

    Args:
        logits: [rows, num_experts] bfloat16, float16 or float32, at most 1,024 experts.
        top_k: number of experts for each row.
        scoring: ``softmax`` over all experts, ``sigmoid`` of each, or ``softmax_of_top`` over the
            chosen experts.
        normalize: divide the weights of a row by their sum.
        scale: factor on the weights, after that.
        bias: [num_experts] float32, added to scores, not to weights; None for no bias.
        groups: the number of groups of consecutive experts, the number of groups that a row chooses
            its experts from, and the number of the largest scores in a group that are summed up to
            choose it; None for one group. Neither a bias nor groups go with ``softmax_of_top``.

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
    if bias is not None:
        check_tensor("bias", bias, (num_experts,), torch.float32, like=logits)
    by_score = bias is not None or groups is not None
    scored = not by_score or scoring != "softmax_of_top"
    check(scored, "scoring", "cannot be softmax_of_top with a bias or groups")
    count, chosen, num_scored = groups or (1, 1, 1)
    check(_are_groups(count, chosen, num_scored, num_experts, top_k), "groups", _GROUPS)
    ids = torch.empty((rows, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, top_k), dtype=torch.float32, device=logits.device)
    columns = triton.next_power_of_2(num_experts)
    _choose_experts_kernel[(triton.cdiv(rows, _ROWS),)](
        logits,
        ids,
        weights,
        bias,
        scale,
        rows,
        EXPERTS=num_experts,
        TOP_K=top_k,
        SCORING=scoring,
        NORMALIZE=normalize,
        GROUPS=count,
        CHOSEN=chosen,
        SCORED=num_scored,
        ROWS=_ROWS,
        COLUMNS=columns,
        RANKS=triton.next_power_of_2(top_k),
        num_warps=4,
        **dependent_launch(device),
    )
    return ids, weights


def _are_groups(count: int, chosen: int, num_scored: int, num_experts: int, top_k: int) -> bool:
    """Return whether groups divide the experts, and the chosen ones have enough experts."""
    if count < 1 or num_experts % count or not 1 <= chosen <= count:
        return False
    size = num_experts // count
    return 1 <= num_scored <= size and top_k <= chosen * size
