"""Selection of a row's top tokens without a sort, shared by sampling and log-probabilities.

One program handles one row. It reads the vocabulary in lanes: lane `i` sees the tokens `i`,
`i + LANES`, and so on. The largest logits of the lanes give a bound that few tokens reach, but at
least as many as the caller needs. Each lane then pushes its tokens at or above the bound onto its
own stack, so that no lane waits for another, and all later steps read only the stacks. If these do
not suffice (many equal logits, or filters that keep thousands of tokens), the same steps read the
row instead.

The search for a threshold compares the values with several pivots at once and is exact: weights are
summed as integers, so sums do not depend on their order and a sort would find the same threshold.

NaN counts as minus infinity, and plus infinity as the largest finite number.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check, check_tensor

MAX_VOCAB = 2**22  # this many weights of up to 2**40 sum to less than 2**63

LANES = tl.constexpr(2048)
DEPTH = tl.constexpr(8)  # maximum number of tokens on a lane's stack
STAGES = tl.constexpr(6)  # tiles of a row in flight
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LOG2E = tl.constexpr(1.4426950408889634)
WEIGHT_ONE = tl.constexpr(2.0**40)  # weight of the likeliest token
_PIVOTS = tl.constexpr(4)


@triton.jit
def load_values(values_ptr, at, length):
    """Load values as float32: NaN and what is past `length` as -inf, plus infinity as finite."""
    x = tl.load(values_ptr + at, mask=at < length, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, tl.minimum(x, LARGEST), float("-inf"))


@triton.jit
def _key(x):
    """Return an integer that sorts in the same order as the float32."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _from_key(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, highest, scale):
    """Return 2 ** (scale * (x - highest)) in units of 2**-40."""
    return (tl.exp2((x - highest) * scale) * WEIGHT_ONE).to(tl.int64)


@triton.jit
def mass_from(values_ptr, length, threshold, highest, scale):
    """Return the total weight of the values >= `threshold`."""
    lane = tl.arange(0, LANES)
    mass = tl.zeros([LANES], tl.int64)
    for start in tl.range(0, length, LANES, num_stages=STAGES):
        x = load_values(values_ptr, start + lane, length)
        mass += tl.where(x >= threshold, _weight(x, highest, scale), 0)
    return tl.sum(mass, 0)


@triton.jit
def find_threshold(values_ptr, length, lowest, highest, target, scale, BY_MASS: tl.constexpr):
    """Return the largest threshold for which values >= it have a count (or mass) >= `target`.

    `lowest` must be such a threshold and finite; no value may exceed `highest`. Each pass leaves a
    quarter of the range if values are evenly spread, and at most half of the floats in it, so there
    are at most 32 passes.
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
        # The threshold is one of the values, so it lies within those inside the range.
        low = tl.maximum(low, _key(tl.min(least, 0)))
        high = tl.minimum(high, _key(tl.max(most, 0)))
        low = tl.maximum(low, tl.max(tl.where(enough, keys, low), 0))
        high = tl.minimum(high, tl.min(tl.where(enough, high, keys - 1), 0))
    return _from_key(low)


@triton.jit
def scan_row(row_ptr, VOCAB: tl.constexpr):
    """Return the largest logit of each lane, the largest of all, and the first token with it."""
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
    """Return the `rank`-th largest of the peaks >= `floor`, or the smallest if there are fewer.

    At least as many tokens have logits >= the result.
    """
    lanes = tl.sum((peaks >= floor).to(tl.int32), 0)
    tl.store(values_ptr + tl.arange(0, LANES), peaks)
    tl.debug_barrier()
    bound = find_threshold(values_ptr, LANES, floor, highest, tl.minimum(rank, lanes), 1.0, False)
    tl.debug_barrier()  # the stacks will overwrite the peaks
    return bound


@triton.jit
def collect(row_ptr, values_ptr, tokens_ptr, bound, floor, highest, scale, VOCAB: tl.constexpr):
    """Push the tokens with logits >= `bound` onto the stacks.

    Returns the depth that the stacks need (it may exceed DEPTH), the number of tokens >= `bound`,
    and the number and mass of the tokens >= `floor`.
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
    """Check logits and return the number of rows and the vocabulary size.

    Raises:
        ArgumentError: wrong shape, dtype, device or layout.
    """
    check_tensor("logits", logits, (None, None), MODEL_DTYPES, like=logits)
    device_of("logits", logits)
    rows, vocab = logits.shape
    check(1 <= vocab <= MAX_VOCAB, "logits", f"must have 1..{MAX_VOCAB} columns, got {vocab}")
    return rows, vocab


def make_stacks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate the stacks: 128 KiB per row, of which little is accessed."""
    shape = (logits.shape[0], DEPTH.value * LANES.value)
    return (
        torch.empty(shape, dtype=torch.float32, device=logits.device),
        torch.empty(shape, dtype=torch.int32, device=logits.device),
    )
