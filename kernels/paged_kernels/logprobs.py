"""Log-probabilities of sampled tokens and of top tokens, on the device and without a sort.

`_selection` explains how the top tokens are found and how NaN is treated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels._selection import (
    DEPTH,
    LANES,
    LARGEST,
    LOG2E,
    STAGES,
    WEIGHT_ONE,
    bound_of_rank,
    check_logits,
    collect,
    load_values,
    make_stacks,
    mass_from,
    scan_row,
)
from paged_kernels.errors import check, check_tensor

MAX_LOGPROBS = 32

_NUM_WARPS = 8


@triton.jit
def _next(values_ptr, tokens_ptr, length, value, token):
    """Return the successor of (value, token), ordered by falling values, then rising tokens."""
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), tl.float32)
    winner = tl.full([LANES], 0x7FFFFFFF, tl.int32)
    for start in tl.range(0, length, LANES, num_stages=STAGES):
        x = load_values(values_ptr, start + lane, length)
        if tokens_ptr is None:
            tokens = start + lane
        else:
            tokens = tl.load(tokens_ptr + start + lane)
        follows = (x < value) | ((x == value) & (tokens > token))
        better = follows & (x > best)  # tokens of a lane ascend, so the first of equals wins
        best = tl.where(better, x, best)
        winner = tl.where(better, tokens, winner)
    highest = tl.max(best, 0)
    return highest, tl.min(tl.where(best == highest, winner, 0x7FFFFFFF), 0)


@triton.jit
def _store_top(values_ptr, tokens_ptr, length, number, base, top_tokens_ptr, top_logprobs_ptr):
    """Write the `number` largest values minus `base`; missing ones are token -1 and -inf."""
    value = float("inf") + tl.zeros([], tl.float32)
    token = tl.full([], -1, tl.int32)
    for place in tl.range(0, number):
        value, token = _next(values_ptr, tokens_ptr, length, value, token)
        some = value > float("-inf")
        tl.store(top_tokens_ptr + place, tl.where(some, token, -1))
        tl.store(top_logprobs_ptr + place, value - base)


@triton.jit
def _logprobs_kernel(
    logits_ptr,
    slots_ptr,
    sampled_ptr,
    wanted_ptr,
    values_ptr,
    tokens_ptr,
    logprobs_ptr,
    ranks_ptr,
    top_tokens_ptr,
    top_logprobs_ptr,
    VOCAB: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program: one row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    number = tl.minimum(tl.load(wanted_ptr + slot), WIDTH)
    if number < 0:
        return
    logits_ptr += row * VOCAB
    values_ptr += row * (DEPTH * LANES)
    tokens_ptr += row * (DEPTH * LANES)
    top_tokens_ptr += row * WIDTH
    top_logprobs_ptr += row * WIDTH
    peaks, highest, _ = scan_row(logits_ptr, VOCAB)
    floor = tl.full([], -LARGEST, tl.float32)
    highest = tl.maximum(highest, floor)
    bound = highest
    if number > 0:
        bound = bound_of_rank(peaks, values_ptr, floor, highest, number)
    sampled = load_values(logits_ptr, tl.load(sampled_ptr + row), VOCAB)
    depth, found, rank, _ = collect(
        logits_ptr, values_ptr, tokens_ptr, bound, sampled, highest, LOG2E, VOCAB
    )
    mass = mass_from(logits_ptr, VOCAB, floor, highest, LOG2E)
    # The likeliest token alone weighs WEIGHT_ONE, so the mass is 0 only if all are minus infinity.
    base = highest + tl.log(tl.maximum(mass, 1).to(tl.float32) / WEIGHT_ONE)
    tl.store(logprobs_ptr + row, sampled - base)
    # Padding past the end of the row counts as minus infinity and may tie with `sampled`.
    tl.store(ranks_ptr + row, tl.minimum(rank, VOCAB))
    if (depth <= DEPTH) & (found >= number):
        _store_top(
            values_ptr, tokens_ptr, depth * LANES, number, base, top_tokens_ptr, top_logprobs_ptr
        )
    else:
        _store_top(logits_ptr, None, VOCAB, number, base, top_tokens_ptr, top_logprobs_ptr)


class LogProbs(NamedTuple):
    """Natural logarithms of probabilities; rows with nothing requested are uninitialized."""

    sampled: Tensor  # [rows] float32, of the sampled tokens
    ranks: Tensor  # [rows] int32: tokens at least as likely as the sampled one, including itself
    top_tokens: Tensor  # [rows, width] int32, likeliest first, lower ids first among equals
    top: Tensor  # [rows, width] float32


def logprobs(
    logits: Tensor, slots: Tensor, sampled: Tensor, wanted: Tensor, width: int
) -> LogProbs:
    """Compute log-probabilities of the sampled tokens and of the top tokens.

    They follow from the given logits, with no temperature or filter. vLLM reports the ones of the
    model's own logits: pass these, or a copy of them if penalties have changed them since.

    Args:
        logits: [rows, vocab] bf16, fp16 or fp32; only read. If a row is all minus infinity, so are
            its log-probabilities.
        slots: [rows] int32. A negative slot is padding: nothing is written for its row.
        sampled: [rows] int32, the sampled tokens.
        wanted: [num_slots] int32: number of top tokens, limited to `width`; a negative number
            requests nothing, not even the sampled token.
        width: columns of the result, 0 to 32; each row has `wanted` of them filled. If fewer tokens
            have a nonzero probability, the rest are -1 and minus infinity.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    rows, vocab = check_logits(logits)
    check_tensor("slots", slots, (rows,), torch.int32, like=logits)
    check_tensor("sampled", sampled, (rows,), torch.int32, like=logits)
    check_tensor("wanted", wanted, (None,), torch.int32, like=logits)
    check(0 <= width <= MAX_LOGPROBS, "width", f"must be in 0..{MAX_LOGPROBS}, got {width}")
    result = LogProbs(
        torch.empty(rows, dtype=torch.float32, device=logits.device),
        torch.empty(rows, dtype=torch.int32, device=logits.device),
        torch.empty((rows, width), dtype=torch.int32, device=logits.device),
        torch.empty((rows, width), dtype=torch.float32, device=logits.device),
    )
    if rows:
        _logprobs_kernel[(rows,)](
            logits,
            slots,
            sampled,
            wanted,
            *make_stacks(logits),
            *result,
            VOCAB=vocab,
            WIDTH=width,
            num_warps=_NUM_WARPS,
        )
    return result
