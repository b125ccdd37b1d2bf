"""Sample tokens from logits entirely on the device, without a sort.

Filters keep the tokens at or above a threshold; `_selection` explains how the threshold is found,
what the stacks are, and how NaN is treated.

The draw is a race (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006): the
token with the smallest Exp(1) / weight wins. The exponentials come from Philox4x32-10 (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the key is the seed, the counter is
(token // 4, position, 0, 0), and the token takes word `token % 4` of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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
    bound_of_rank,
    check_logits,
    collect,
    find_threshold,
    load_values,
    make_stacks,
    mass_from,
    scan_row,
)
from paged_kernels.dependent_launch import dependent_launch, wait_for_launch_before
from paged_kernels.device import device_of
from paged_kernels.errors import check_tensor

_NUM_WARPS = 16
_GREEDY_TEMPERATURE = tl.constexpr(1e-5)


@triton.jit
def _words(seed, position, start):
    """Return the random words of the LANES tokens from `start` (a multiple of 4) on."""
    quad = start // 4 + tl.arange(0, LANES // 4)
    zero = quad * 0
    a, b, c, d = tl.philox(seed, quad, zero + position, zero, zero)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [LANES])


@triton.jit
def _words_of(seed, position, tokens):
    """Return the random words of arbitrary tokens."""
    zero = tokens * 0
    a, b, c, d = tl.philox(seed, tokens // 4, zero + position, zero, zero)
    place = tokens % 4
    return tl.where(place == 0, a, tl.where(place == 1, b, tl.where(place == 2, c, d)))


@triton.jit
def _exponential(words):
    """Return -log(1 - u) for u = (word + 1/2) / 2**32, accurate for small u, which win races."""
    u = (words.to(tl.float32) + 0.5) * 2.0**-32
    # 1 - u rounds away the differences between small u; the series of the logarithm does not.
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u * (1.0 / 4))))
    return tl.where(u < 2.0**-6, series, -tl.log(1.0 - tl.minimum(u, 1.0 - 2.0**-24)))


@triton.jit
def _race(values_ptr, tokens_ptr, length, threshold, highest, scale, seed, position):
    """Draw a token with a value >= `threshold`. If `tokens_ptr` is None, tokens are indices."""
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], float("inf"), tl.float32)
    winner = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, length, LANES, num_stages=STAGES):
        x = load_values(values_ptr, start + lane, length)
        if tokens_ptr is None:
            tokens = start + lane
            words = _words(seed, position, start)
        else:
            tokens = tl.load(tokens_ptr + start + lane)
            words = _words_of(seed, position, tokens)
        # The cap of 2**120 is finite and far too large to win.
        time = _exponential(words) * tl.exp2(tl.minimum((highest - x) * scale, 120.0))
        better = (x >= threshold) & (time < best)
        best = tl.where(better, time, best)
        winner = tl.where(better, tokens, winner)
    return tl.min(tl.where(best == tl.min(best, 0), winner, 0x7FFFFFFF), 0)


@triton.jit
def _target(mass, top_p):
    """Return the mass that the kept tokens must reach together (at least 1)."""
    return tl.maximum(tl.ceil(mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _draw(values_ptr, tokens_ptr, length, rank, top_p, mass, floor, highest, scale, seed, position):
    """Apply top-k and top-p, then draw. `mass` is the total weight of the values >= `floor`."""
    threshold = floor
    if rank > 0:
        threshold = find_threshold(values_ptr, length, floor, highest, rank, scale, False)
        mass = mass_from(values_ptr, length, threshold, highest, scale)
    if top_p < 1.0:
        # A token 2**42 times less likely than the likeliest has an integer weight of 0.
        lowest = tl.maximum(threshold, highest - 42.0 / scale)
        target = _target(mass, top_p)
        threshold = find_threshold(values_ptr, length, lowest, highest, target, scale, True)
    return _race(values_ptr, tokens_ptr, length, threshold, highest, scale, seed, position)


@triton.jit
def _sample_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    values_ptr,
    tokens_ptr,
    out_ptr,
    VOCAB: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: one row."""
    wait_for_launch_before(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    logits_ptr += row * VOCAB
    values_ptr += row * (DEPTH * LANES)
    tokens_ptr += row * (DEPTH * LANES)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    peaks, highest, token = scan_row(logits_ptr, VOCAB)
    greedy = (temperature < _GREEDY_TEMPERATURE) | (top_k == 1) | (highest == float("-inf"))
    if not greedy:
        top_p = tl.load(top_p_ptr + slot)
        min_p = tl.load(min_p_ptr + slot)
        seed = tl.load(seed_ptr + slot)
        position = tl.load(positions_ptr + row)
        scale = LOG2E / temperature
        drop = temperature * tl.log(tl.where(min_p > 0.0, min_p, 1.0))
        floor = tl.where(min_p > 0.0, tl.maximum(highest + drop, -LARGEST), -LARGEST)
        rank = tl.where(top_k < VOCAB, top_k, 0)  # below 1: no top-k
        length = 0
        mass = tl.zeros([], tl.int64)
        if (rank > 0) | (top_p < 1.0):
            # A bound at half of the lanes leaves room for any top-p set, unless the row is flat.
            half = LANES // 2
            lanes = tl.where(rank > 0, tl.minimum(rank, half), half)
            bound = bound_of_rank(peaks, values_ptr, floor, highest, lanes)
            depth, found, kept, mass = collect(
                logits_ptr, values_ptr, tokens_ptr, bound, floor, highest, scale, VOCAB
            )
            rank = tl.minimum(rank, kept)
            if depth <= DEPTH:
                length = depth * LANES
                if rank > 0:
                    enough = found >= rank
                else:
                    held = mass_from(values_ptr, length, bound, highest, scale)
                    enough = held >= _target(mass, top_p)
                length = tl.where(enough, length, 0)
        if length > 0:
            token = _draw(
                values_ptr,
                tokens_ptr,
                length,
                rank,
                top_p,
                mass,
                floor,
                highest,
                scale,
                seed,
                position,
            )
        else:
            token = _draw(
                logits_ptr, None, VOCAB, rank, top_p, mass, floor, highest, scale, seed, position
            )
    tl.store(out_ptr + row, token)


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Sampling parameters of the sequence in each slot, with vLLM's names and meanings."""

    temperature: Tensor  # [num_slots] float32; below 1e-5: argmax, the first one of ties
    top_k: Tensor  # [num_slots] int32; disabled if < 1 or >= the vocabulary size
    top_p: Tensor  # [num_slots] float32 > 0; disabled if >= 1
    min_p: Tensor  # [num_slots] float32 in 0..1; disabled at 0
    seed: Tensor  # [num_slots] int64; any 64 bits


_STATE_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
}


def sample(
    logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, out: Tensor
) -> Tensor:
    """Draw one token from each row of logits, with the sampling parameters of the row's slot.

    A row's token depends only on its own logits, parameters, seed and position. Temperature is
    applied first, then `min_p`, `top_k` and, on the tokens these leave, `top_p`; tokens as likely
    as the last one kept are kept as well. A row that is all minus infinity yields token 0.

    Tokens less likely than about 1e-10 are drawn too rarely: random numbers have 32 bits.

    Args:
        logits: [rows, vocab] bf16, fp16 or fp32; only read.
        slots: [rows] int32. A negative slot is padding: nothing is written for its row.
        positions: [rows] int32, positions of the tokens to be sampled.
        state: parameters by slot; read on the device, so captured launches see updates.
        out: [rows] int32, receives the tokens.

    Returns:
        `out`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    rows, vocab = check_logits(logits)
    check_tensor("slots", slots, (rows,), torch.int32, like=logits)
    check_tensor("positions", positions, (rows,), torch.int32, like=logits)
    num_slots = state.temperature.numel()
    columns = []
    for field in fields(state):
        column = getattr(state, field.name)
        check_tensor(field.name, column, (num_slots,), _STATE_DTYPES[field.name], like=logits)
        columns.append(column)
    check_tensor("out", out, (rows,), torch.int32, like=logits)
    if rows:
        _sample_kernel[(rows,)](
            logits,
            slots,
            positions,
            *columns,
            *make_stacks(logits),
            out,
            VOCAB=vocab,
            num_warps=_NUM_WARPS,
            **dependent_launch(device_of("logits", logits)),
        )
    return out
