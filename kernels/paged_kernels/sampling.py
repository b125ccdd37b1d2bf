"""Tokens from logits, and their log-probabilities, without a sort and without the host.

One program has a row. It goes over the vocabulary lane by lane: lane `i` sees the tokens `i`,
`i + LANES`, and so on. The largest logits of the lanes give a bound that few tokens reach, but more
than a filter keeps; each lane then puts its tokens over the bound on a stack of its own, so that no
lane waits for another, and all that follows reads the stacks only. Where they do not suffice (many
equal logits, or filters that keep thousands of tokens), the same steps read the row instead.

Filters keep the tokens over a threshold. It is searched by comparing with several pivots at once,
never by rounding: weights are added as integers, so sums do not depend on their order and the
threshold is that of a sort.

The draw is a race (Efraimidis and Spirakis, "Weighted random sampling with a reservoir", 2006): the
token with the least of Exp(1) / weight wins. The exponentials come from Philox4x32-10 (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", 2011): the key is the seed, the counter is
(token // 4, position, 0, 0), and the token takes word `token % 4` of the result.

NaN counts as minus infinity and plus infinity as the largest finite number.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.device import device_of
from paged_kernels.errors import check, check_tensor

MAX_VOCAB = 2**22  # so many weights of up to 2**40 add up to less than 2**63
MAX_LOGPROBS = 32

_LANES = tl.constexpr(2048)
_DEPTH = tl.constexpr(8)  # tokens on the stack of a lane
_PIVOTS = tl.constexpr(4)
_STAGES = tl.constexpr(6)  # tiles of a row under way
_SAMPLE_WARPS = 16
_LOGPROBS_WARPS = 8
_GREEDY_TEMPERATURE = tl.constexpr(1e-5)
_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
_LOG2_E = tl.constexpr(1.4426950408889634)
_WEIGHT_ONE = tl.constexpr(2.0**40)  # that of the likeliest token


@triton.jit
def _load(values_ptr, at, length):
    x = tl.load(values_ptr + at, mask=at < length, other=float("-inf"))
    return tl.where(x == x, tl.minimum(x, _LARGEST), float("-inf"))


@triton.jit
def _key(x):
    """An integer that is ordered as the float32 is."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_key(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, highest, scale):
    """2 ** (scale * (x - highest)) in units of 2**-40."""
    return (tl.exp2((x - highest) * scale) * _WEIGHT_ONE).to(tl.int64)


@triton.jit
def _mass(values_ptr, length, threshold, highest, scale):
    """The weight of all values from `threshold` on."""
    lane = tl.arange(0, _LANES)
    mass = tl.zeros([_LANES], tl.int64)
    for start in tl.range(0, length, _LANES, num_stages=_STAGES):
        x = _load(values_ptr, start + lane, length)
        mass += tl.where(x >= threshold, _weight(x, highest, scale), 0)
    return tl.sum(mass, 0)


@triton.jit
def _search(values_ptr, length, lowest, highest, target, scale, BY_MASS: tl.constexpr):
    """The largest threshold with a count, or mass, of `target` or more values from it on.

    `lowest` must be such a threshold, finite; no value lies over `highest`. A pass leaves a quarter
    of the range, where values are spread evenly, and never more than half of the floats in it: 32
    passes are the most.
    """
    lane = tl.arange(0, _LANES)
    pivot_id = tl.arange(0, _PIVOTS)
    low = _key(lowest)
    high = _key(highest)
    while low < high:
        bottom = _from_key(low)
        top = _from_key(high)
        share = (pivot_id + 1).to(tl.float32) / _PIVOTS
        even = bottom * (1.0 - share) + top * share
        pivots = tl.where(pivot_id + 1 < _PIVOTS, even, _from_key(low + (high - low + 1) // 2))
        over = tl.zeros([_PIVOTS, _LANES], tl.int64 if BY_MASS else tl.int32)
        least = tl.full([_LANES], float("inf"), tl.float32)
        most = tl.full([_LANES], float("-inf"), tl.float32)
        for start in tl.range(0, length, _LANES, num_stages=_STAGES):
            x = _load(values_ptr, start + lane, length)
            if BY_MASS:
                over += tl.where(x[None, :] >= pivots[:, None], _weight(x, highest, scale), 0)
            else:
                over += (x[None, :] >= pivots[:, None]).to(tl.int32)
            inside = (x >= bottom) & (x <= top)
            least = tl.minimum(least, tl.where(inside, x, float("inf")))
            most = tl.maximum(most, tl.where(inside, x, float("-inf")))
        enough = tl.sum(over, 1) >= target
        keys = _key(pivots)
        # The threshold is a value itself: it lies between the least and the most of those inside.
        low = tl.maximum(low, _key(tl.min(least, 0)))
        high = tl.minimum(high, _key(tl.max(most, 0)))
        low = tl.maximum(low, tl.max(tl.where(enough, keys, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, keys - 1), 0))
    return _from_key(low)


@triton.jit
def _scan(row_ptr, VOCAB: tl.constexpr):
    """The largest logit of each lane, the largest of all, and the first token that has it."""
    lane = tl.arange(0, _LANES)
    peaks = tl.full([_LANES], float("-inf"), tl.float32)
    first = lane
    for start in tl.range(0, VOCAB, _LANES, num_stages=_STAGES):
        x = _load(row_ptr, start + lane, VOCAB)
        first = tl.where(x > peaks, start + lane, first)
        peaks = tl.maximum(peaks, x)
    highest = tl.max(peaks, 0)
    return peaks, highest, tl.min(tl.where(peaks == highest, first, VOCAB), 0)


@triton.jit
def _bound(peaks, values_ptr, floor, highest, rank):
    """The peak of that rank, or the least from `floor` on: so many tokens at least reach it."""
    lanes = tl.sum((peaks >= floor).to(tl.int32), 0)
    tl.store(values_ptr + tl.arange(0, _LANES), peaks)
    tl.debug_barrier()
    bound = _search(values_ptr, _LANES, floor, highest, tl.minimum(rank, lanes), 1.0, False)
    tl.debug_barrier()  # the stacks will overwrite the peaks
    return bound


@triton.jit
def _collect(row_ptr, values_ptr, tokens_ptr, bound, floor, highest, scale, VOCAB: tl.constexpr):
    """Put the tokens from `bound` on onto the stacks.

    Returns the depth that the stacks would need, the number of tokens meant for them, and the
    number and mass of tokens from `floor` on.
    """
    lane = tl.arange(0, _LANES)
    depth = tl.zeros([_LANES], tl.int32)
    kept = tl.zeros([_LANES], tl.int32)
    mass = tl.zeros([_LANES], tl.int64)
    for start in tl.range(0, VOCAB, _LANES, num_stages=_STAGES):
        x = _load(row_ptr, start + lane, VOCAB)
        found = x >= bound
        place = depth * _LANES + lane
        fits = found & (depth < _DEPTH)
        tl.store(values_ptr + place, x, mask=fits)
        tl.store(tokens_ptr + place, start + lane, mask=fits)
        depth += found.to(tl.int32)
        kept += (x >= floor).to(tl.int32)
        mass += tl.where(x >= floor, _weight(x, highest, scale), 0)
    deepest = tl.max(depth, 0)
    for level in tl.range(0, tl.minimum(deepest, _DEPTH)):
        tl.store(values_ptr + level * _LANES + lane, float("-inf"), mask=level >= depth)
    tl.debug_barrier()
    return deepest, tl.sum(depth, 0), tl.sum(kept, 0), tl.sum(mass, 0)


@triton.jit
def _words(seed, position, start):
    """The random words of the tokens from `start` on, a multiple of 4, one for each lane."""
    quad = start // 4 + tl.arange(0, _LANES // 4)
    zero = quad * 0
    a, b, c, d = tl.philox(seed, quad, zero + position, zero, zero)
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [_LANES])


@triton.jit
def _words_of(seed, position, tokens):
    """The random words of any tokens."""
    zero = tokens * 0
    a, b, c, d = tl.philox(seed, tokens // 4, zero + position, zero, zero)
    place = tokens % 4
    return tl.where(place == 0, a, tl.where(place == 1, b, tl.where(place == 2, c, d)))


@triton.jit
def _exponential(words):
    """-log(1 - u) of u = (word + 1/2) / 2**32. What wins a race comes of a small u."""
    u = (words.to(tl.float32) + 0.5) * 2.0**-32
    # 1 - u rounds away what tells small u apart; its logarithm's series does not.
    series = u * (1.0 + u * (1.0 / 2 + u * (1.0 / 3 + u * (1.0 / 4))))
    return tl.where(u < 2.0**-6, series, -tl.log(1.0 - tl.minimum(u, 1.0 - 2.0**-24)))


@triton.jit
def _race(values_ptr, tokens_ptr, length, threshold, highest, scale, seed, position):
    """Draw among the values from `threshold` on. Without `tokens_ptr` a token is its place."""
    lane = tl.arange(0, _LANES)
    best = tl.full([_LANES], float("inf"), tl.float32)
    winner = tl.zeros([_LANES], tl.int32)
    for start in tl.range(0, length, _LANES, num_stages=_STAGES):
        x = _load(values_ptr, start + lane, length)
        if tokens_ptr is None:
            tokens = start + lane
            words = _words(seed, position, start)
        else:
            tokens = tl.load(tokens_ptr + start + lane)
            words = _words_of(seed, position, tokens)
        # 2**120 is far beyond what can win, and finite.
        time = _exponential(words) * tl.exp2(tl.minimum((highest - x) * scale, 120.0))
        better = (x >= threshold) & (time < best)
        best = tl.where(better, time, best)
        winner = tl.where(better, tokens, winner)
    return tl.min(tl.where(best == tl.min(best, 0), winner, 0x7FFFFFFF), 0)


@triton.jit
def _target(mass, top_p):
    """The mass that the likeliest tokens must hold; never none."""
    return tl.maximum(tl.ceil(mass.to(tl.float64) * top_p.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def _draw(values_ptr, tokens_ptr, length, rank, top_p, mass, floor, highest, scale, seed, position):
    """Filter, then draw. `mass` is that from `floor` on."""
    threshold = floor
    if rank > 0:
        threshold = _search(values_ptr, length, floor, highest, rank, scale, False)
        mass = _mass(values_ptr, length, threshold, highest, scale)
    if top_p < 1.0:
        # What lies 42 halvings below the likeliest weighs nothing.
        lowest = tl.maximum(threshold, highest - 42.0 / scale)
        target = _target(mass, top_p)
        threshold = _search(values_ptr, length, lowest, highest, target, scale, True)
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
):
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    logits_ptr += row * VOCAB
    values_ptr += row * (_DEPTH * _LANES)
    tokens_ptr += row * (_DEPTH * _LANES)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    peaks, highest, token = _scan(logits_ptr, VOCAB)
    greedy = (temperature < _GREEDY_TEMPERATURE) | (top_k == 1) | (highest == float("-inf"))
    if not greedy:
        top_p = tl.load(top_p_ptr + slot)
        min_p = tl.load(min_p_ptr + slot)
        seed = tl.load(seed_ptr + slot)
        position = tl.load(positions_ptr + row)
        scale = _LOG2_E / temperature
        drop = temperature * tl.log(tl.where(min_p > 0.0, min_p, 1.0))
        floor = tl.where(min_p > 0.0, tl.maximum(highest + drop, -_LARGEST), -_LARGEST)
        rank = tl.where(top_k < VOCAB, top_k, 0)  # none below 1
        length = 0
        mass = tl.zeros([], tl.int64)
        if (rank > 0) | (top_p < 1.0):
            # Half of the lanes have room for any nucleus but a flat one.
            half = _LANES // 2
            lanes = tl.where(rank > 0, tl.minimum(rank, half), half)
            bound = _bound(peaks, values_ptr, floor, highest, lanes)
            depth, found, kept, mass = _collect(
                logits_ptr, values_ptr, tokens_ptr, bound, floor, highest, scale, VOCAB
            )
            rank = tl.minimum(rank, kept)
            if depth <= _DEPTH:
                length = depth * _LANES
                if rank > 0:
                    enough = found >= rank
                else:
                    held = _mass(values_ptr, length, bound, highest, scale)
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


@triton.jit
def _next(values_ptr, tokens_ptr, length, value, token):
    """What follows a value and token in the order of falling values, then rising tokens."""
    lane = tl.arange(0, _LANES)
    best = tl.full([_LANES], float("-inf"), tl.float32)
    winner = tl.full([_LANES], 0x7FFFFFFF, tl.int32)
    for start in tl.range(0, length, _LANES, num_stages=_STAGES):
        x = _load(values_ptr, start + lane, length)
        if tokens_ptr is None:
            tokens = start + lane
        else:
            tokens = tl.load(tokens_ptr + start + lane)
        follows = (x < value) | ((x == value) & (tokens > token))
        better = follows & (x > best)  # a lane's tokens rise: the first of equals stays
        best = tl.where(better, x, best)
        winner = tl.where(better, tokens, winner)
    highest = tl.max(best, 0)
    return highest, tl.min(tl.where(best == highest, winner, 0x7FFFFFFF), 0)


@triton.jit
def _store_top(values_ptr, tokens_ptr, length, number, base, top_tokens_ptr, top_logprobs_ptr):
    """Write the `number` largest values, less `base`; where there are fewer, -1 and -inf."""
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
    """One row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    number = tl.minimum(tl.load(wanted_ptr + slot), WIDTH)
    if number < 0:
        return
    logits_ptr += row * VOCAB
    values_ptr += row * (_DEPTH * _LANES)
    tokens_ptr += row * (_DEPTH * _LANES)
    top_tokens_ptr += row * WIDTH
    top_logprobs_ptr += row * WIDTH
    peaks, highest, _ = _scan(logits_ptr, VOCAB)
    floor = tl.full([], -_LARGEST, tl.float32)
    highest = tl.maximum(highest, floor)
    bound = highest
    if number > 0:
        bound = _bound(peaks, values_ptr, floor, highest, number)
    sampled = _load(logits_ptr, tl.load(sampled_ptr + row), VOCAB)
    depth, found, rank, _ = _collect(
        logits_ptr, values_ptr, tokens_ptr, bound, sampled, highest, _LOG2_E, VOCAB
    )
    mass = _mass(logits_ptr, VOCAB, floor, highest, _LOG2_E)
    # The likeliest weighs one alone, so there is none only where all are minus infinity.
    base = highest + tl.log(tl.maximum(mass, 1).to(tl.float32) / _WEIGHT_ONE)
    tl.store(logprobs_ptr + row, sampled - base)
    # Past the end of the row there is minus infinity too.
    tl.store(ranks_ptr + row, tl.minimum(rank, VOCAB))
    if (depth <= _DEPTH) & (found >= number):
        _store_top(
            values_ptr, tokens_ptr, depth * _LANES, number, base, top_tokens_ptr, top_logprobs_ptr
        )
    else:
        _store_top(logits_ptr, None, VOCAB, number, base, top_tokens_ptr, top_logprobs_ptr)


@dataclass(frozen=True, slots=True)
class SamplingState:
    """How the sequence in each slot wants its tokens chosen; names and meanings are vLLM's."""

    temperature: Tensor  # [num_slots] float32; below 1e-5 the first of the likeliest is taken
    top_k: Tensor  # [num_slots] int32; none where below 1 or not below the vocabulary's size
    top_p: Tensor  # [num_slots] float32 over 0; none from 1 on
    min_p: Tensor  # [num_slots] float32 in 0..1; none at 0
    seed: Tensor  # [num_slots] int64; any 64 bits


_STATE_DTYPES = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seed": torch.int64,
}


class LogProbs(NamedTuple):
    """Natural logarithms of probabilities; rows that ask for nothing hold anything."""

    sampled: Tensor  # [rows] float32, of the sampled tokens
    ranks: Tensor  # [rows] int32: tokens at least as likely as the sampled one, itself included
    top_tokens: Tensor  # [rows, width] int32, likeliest first, lower ids first among equals
    top: Tensor  # [rows, width] float32


def sample(
    logits: Tensor, slots: Tensor, positions: Tensor, state: SamplingState, out: Tensor
) -> Tensor:
    """Draw one token from each row of logits, as the parameters in the row's slot say.

    A row's token depends on its own logits, parameters, seed and position only. Temperature is
    applied first, then `min_p`, `top_k` and, to what these left, `top_p`; tokens as likely as the
    last one kept are kept as well. A row of nothing but minus infinity yields token 0.

    Tokens less likely than some 1e-10 are drawn too rarely: random numbers have 32 bits.

    Args:
        logits: [rows, vocab] float32; only read.
        slots: [rows] int32. A negative slot is padding: nothing is written for its row.
        positions: [rows] int32, of the tokens to be sampled.
        state: parameters by slot; read on the device, so that captured launches obey changes.
        out: [rows] int32 for the tokens.

    Returns:
        `out`.

    Raises:
        ArgumentError: an argument has another shape, dtype, device or layout.
    """
    rows, vocab = _check_logits(logits)
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
            *_stacks(logits),
            out,
            VOCAB=vocab,
            num_warps=_SAMPLE_WARPS,
        )
    return out


def logprobs(
    logits: Tensor, slots: Tensor, sampled: Tensor, wanted: Tensor, width: int
) -> LogProbs:
    """Log-probabilities of the sampled tokens and of the likeliest.

    These are of the logits as they are given, with no temperature or filter. vLLM reports those of
    the model's own logits: hand in these, or a copy where penalties have changed them since.

    Args:
        logits: [rows, vocab] float32; only read. Where a row is minus infinity all over, so are its
            log-probabilities.
        slots: [rows] int32. A negative slot is padding: nothing is written for its row.
        sampled: [rows] int32, the sampled tokens.
        wanted: [num_slots] int32: how many of the likeliest tokens; a negative number asks for
            nothing at all. More than `width` are `width`.
        width: columns of the result, 0 to 32, of which each row has `wanted` filled. Where fewer
            tokens are possible at all, -1 and minus infinity follow them.

    Raises:
        ArgumentError: an argument has another shape, dtype, device or layout.
    """
    rows, vocab = _check_logits(logits)
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
            *_stacks(logits),
            *result,
            VOCAB=vocab,
            WIDTH=width,
            num_warps=_LOGPROBS_WARPS,
        )
    return result


def _check_logits(logits: Tensor) -> tuple[int, int]:
    check_tensor("logits", logits, (None, None), torch.float32, like=logits)
    device_of("logits", logits)
    rows, vocab = logits.shape
    check(1 <= vocab <= MAX_VOCAB, "logits", f"must have 1..{MAX_VOCAB} columns, got {vocab}")
    return rows, vocab


def _stacks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the stacks of each row: 128 KiB, of which little is touched."""
    shape = (logits.shape[0], _DEPTH.value * _LANES.value)
    return (
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
    )
