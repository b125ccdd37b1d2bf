"""What sampling and log-probabilities share: the likeliest tokens of a row, without a sort.

One program has a row. It goes over the vocabulary lane by lane: lane `i` sees the tokens `i`,
`i + LANES`, and so on. The largest logits of the lanes give a bound that few tokens reach, but more
than the caller asks for; each lane then puts its tokens over the bound on a stack of its own, so
that no lane waits for another, and all that follows reads the stacks only. Where they do not
suffice (many equal logits, or filters that keep thousands of tokens), the same steps read the row
instead.

A threshold is searched by comparing with several pivots at once, never by rounding: weights are
added as integers, so sums do not depend on their order and the threshold is that of a sort.

NaN counts as minus infinity and plus infinity as the largest finite number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.device import device_of
from paged_kernels.errors import check, check_tensor

MAX_VOCAB = 2**22  # so many weights of up to 2**40 add up to less than 2**63

LANES = tl.constexpr(2048)
DEPTH = tl.constexpr(8)  # tokens on the stack of a lane
STAGES = tl.constexpr(6)  # tiles of a row under way
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LOG2E = tl.constexpr(1.4426950408889634)
WEIGHT_ONE = tl.constexpr(2.0**40)  # that of the likeliest token
_PIVOTS = tl.constexpr(4)


@triton.jit
def load_values(values_ptr, at, length):
    """Finite values, or minus infinity: for NaN, and from `length` on."""
    x = tl.load(values_ptr + at, mask=at < length, other=float("-inf"))
    return tl.where(x == x, tl.minimum(x, LARGEST), float("-inf"))


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
    return (tl.exp2((x - highest) * scale) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def mass_from(values_ptr, length, threshold, highest, scale):
    """The weight of all values from `threshold` on."""
    lane = tl.arange(0, LANES)
    mass = tl.zeros([LANES], tl.int64)
    for start in tl.range(0, length, LANES, num_stages=STAGES):
        x = load_values(values_ptr, start + lane, length)
        mass += tl.where(x >= threshold, _weight(x, highest, scale), 0)
    return tl.sum(mass, 0)


@triton.jit
def find_threshold(values_ptr, length, lowest, highest, target, scale, BY_MASS: tl.constexpr):
    """The largest threshold with a count, or mass, of `target` or more values from it on.

    `lowest` must be such a threshold, finite; no value lies over `highest`. A pass leaves a quarter
    of the range, where values are spread evenly, and never more than half of the floats in it: 32
    passes are the most.
    """
    lane = tl.arange(0, LANES)
    pivot_id = tl.arange(0, _PIVOTS)
    low = _key(lowest)
    high = _key(highest)
    while low < high:
        bottom = _from_key(low)
        top = _from_key(high)
        share = (pivot_id + 1).to(tl.float32) / _PIVOTS
        even = bottom * (1.0 - share) + top * share
        pivots = tl.where(pivot_id + 1 < _PIVOTS, even, _from_key(low + (high - low + 1) // 2))
        over = tl.zeros([_PIVOTS, LANES], tl.int64 if BY_MASS else tl.int32)
        least = tl.full([LANES], float("inf"), tl.float32)
        most = tl.full([LANES], float("-inf"), tl.float32)
        for start in tl.range(0, length, LANES, num_stages=STAGES):
            x = load_values(values_ptr, start + lane, length)
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
def scan_row(row_ptr, VOCAB: tl.constexpr):
    """The largest logit of each lane, the largest of all, and the first token that has it."""
    lane = tl.arange(0, LANES)
    peaks = tl.full([LANES], float("-inf"), tl.float32)
    first = lane
    for start in tl.range(0, VOCAB, LANES, num_stages=STAGES):
        x = load_values(row_ptr, start + lane, VOCAB)
        first = tl.where(x > peaks, start + lane, first)
        peaks = tl.maximum(peaks, x)
    highest = tl.max(peaks, 0)
    return peaks, highest, tl.min(tl.where(peaks == highest, first, VOCAB), 0)


@triton.jit
def bound_of_rank(peaks, values_ptr, floor, highest, rank):
    """The peak of that rank, or the least from `floor` on: so many tokens at least reach it."""
    lanes = tl.sum((peaks >= floor).to(tl.int32), 0)
    tl.store(values_ptr + tl.arange(0, LANES), peaks)
    tl.debug_barrier()
    bound = find_threshold(values_ptr, LANES, floor, highest, tl.minimum(rank, lanes), 1.0, False)
    tl.debug_barrier()  # the stacks will overwrite the peaks
    return bound


@triton.jit
def collect(row_ptr, values_ptr, tokens_ptr, bound, floor, highest, scale, VOCAB: tl.constexpr):
    """Put the tokens from `bound` on onto the stacks.

    Returns the depth that the stacks would need, the number of tokens meant for them, and the
    number and mass of tokens from `floor` on.
    """
    lane = tl.arange(0, LANES)
    depth = tl.zeros([LANES], tl.int32)
    kept = tl.zeros([LANES], tl.int32)
    mass = tl.zeros([LANES], tl.int64)
    for start in tl.range(0, VOCAB, LANES, num_stages=STAGES):
        x = load_values(row_ptr, start + lane, VOCAB)
        found = x >= bound
        place = depth * LANES + lane
        fits = found & (depth < DEPTH)
        tl.store(values_ptr + place, x, mask=fits)
        tl.store(tokens_ptr + place, start + lane, mask=fits)
        depth += found.to(tl.int32)
        kept += (x >= floor).to(tl.int32)
        mass += tl.where(x >= floor, _weight(x, highest, scale), 0)
    deepest = tl.max(depth, 0)
    for level in tl.range(0, tl.minimum(deepest, DEPTH)):
        tl.store(values_ptr + level * LANES + lane, float("-inf"), mask=level >= depth)
    tl.debug_barrier()
    return deepest, tl.sum(depth, 0), tl.sum(kept, 0), tl.sum(mass, 0)


def check_logits(logits: Tensor) -> tuple[int, int]:
    """The number of rows, and of tokens in the vocabulary.

    Raises:
        ArgumentError: another shape, dtype, device or layout than kernels take.
    """
    check_tensor("logits", logits, (None, None), torch.float32, like=logits)
    device_of("logits", logits)
    rows, vocab = logits.shape
    check(1 <= vocab <= MAX_VOCAB, "logits", f"must have 1..{MAX_VOCAB} columns, got {vocab}")
    return rows, vocab


def make_stacks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the stacks of each row: 128 KiB, of which little is touched."""
    shape = (logits.shape[0], DEPTH.value * LANES.value)
    return (
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
    )
