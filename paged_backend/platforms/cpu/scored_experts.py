"""The choice of experts by scores with biases, within groups, on the CPU; see `checkpoint.moe`."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.checkpoint.moe import ExpertGroups, Routing, Scoring
from paged_backend.platforms.cpu.math import exp, sigmoid
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim_rows,
    device_function,
    float_bits,
    float_of,
    floats,
    ints,
)

_ONE_GROUP = ExpertGroups(1, 1, 1)


def choose_by_score(logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the ids int32 and weights float32 of the experts with the largest scores.

    Args:
        logits: [rows, num_experts] float32, contiguous.
        routing: the choice, with softmax or sigmoid as its scoring.
        bias: [num_experts] float32, contiguous; None for none.
    """
    shape = len(logits), routing.num_experts_per_tok
    ids, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
    groups = routing.groups or _ONE_GROUP
    _choose_by_score()(
        *(logits.data_ptr(), 0 if bias is None else bias.data_ptr()),
        *(ids.data_ptr(), weights.data_ptr(), *logits.shape, shape[1]),
        *(int(routing.scoring is Scoring.SIGMOID), int(routing.norm_topk_prob)),
        *(float_bits(routing.scale), groups.count, groups.chosen, groups.num_scored),
    )
    return ids, weights


@device_function
def take_largest(numbers: Any, taken: Any) -> Any:
    """Return the index of the largest number that is not taken, the first of equal ones."""
    best = 0
    while taken[best]:
        best += 1
    for i in range(best + 1, len(numbers)):
        if not taken[i] and numbers[i] > numbers[best]:
            best = i
    taken[best] = True
    return best


@device_function
def weigh_all(logits: Any, weights: Any, is_sigmoid: int) -> None:
    """Compute the weight that each expert would have."""
    if is_sigmoid:
        for i in range(len(logits)):
            weights[i] = sigmoid(logits[i])
        return
    largest, total = logits[0], np.float32(0.0)
    for i in range(1, len(logits)):
        largest = max(largest, logits[i])
    for i in range(len(logits)):
        weights[i] = exp(logits[i] - largest)
    # This loop is separate, because the compiler makes two versions of a loop that also stores. It
    # runs one of them if the arrays are close together, which adds in another order.
    for i in range(len(logits)):
        total += weights[i]
    for i in range(len(logits)):
        weights[i] /= total


@device_function
def _take_other_groups(scores: Any, taken: Any, totals: Any, chosen: int, num_scored: int) -> None:
    """Take all experts that are not in one of the row's groups; `taken` is False before."""
    count = len(totals)
    size = len(scores) // count
    for group in range(count):
        first, last = group * size, (group + 1) * size
        total = np.float32(0.0)
        for _ in range(num_scored):
            total += scores[first + take_largest(scores[first:last], taken[first:last])]
        totals[group] = total
    taken[:] = True
    taken_groups = np.zeros(count, np.bool_)
    for _ in range(chosen):
        group = take_largest(totals, taken_groups)
        taken[group * size : (group + 1) * size] = False


def _choose_by_score_of_rows(arguments: Any) -> None:
    (
        _,
        address,
        bias_at,
        ids_at,
        weights_at,
        rows,
        num_experts,
        top_k,
        is_sigmoid,
        norm,
        scale_bits,
        count,
        chosen,
        num_scored,
    ) = numba.carray(arguments, 14)
    all_logits, scale = floats(address, (rows, num_experts)), float_of(scale_bits)
    ids, weights = ints(ids_at, (rows, top_k)), floats(weights_at, (rows, top_k))
    all_weights, scores = np.empty(num_experts, np.float32), np.empty(num_experts, np.float32)
    taken, totals = np.empty(num_experts, np.bool_), np.empty(count, np.float32)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            weigh_all(all_logits[row], all_weights, is_sigmoid)
            scores[:] = all_weights
            if bias_at != 0:
                bias = floats(bias_at, num_experts)
                for i in range(num_experts):
                    scores[i] += bias[i]
            taken[:] = False
            if count > 1:
                _take_other_groups(scores, taken, totals, chosen, num_scored)
            total = np.float32(0.0)
            for rank in range(top_k):
                expert = take_largest(scores, taken)
                ids[row, rank] = expert
                weights[row, rank] = all_weights[expert]
                total += all_weights[expert]
            for rank in range(top_k):
                if norm:
                    weights[row, rank] /= total
                weights[row, rank] *= scale
        start, end = claim_rows(arguments, rows)


_choose_by_score = cache(partial(ParallelKernel, _choose_by_score_of_rows))
