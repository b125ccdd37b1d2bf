"""Functions that sample one token for each row of logits, on the host.

The token of a row depends only on that row's logits, parameters, seed and position, never on other
rows: no operation mixes rows. If a filter needs a slower method for a row, only that row uses it.

Temperature is applied first, then ``min_p``, then ``top_k``. ``top_p`` comes last and applies to
the tokens that remain. If tokens have the same probability as the last one that a filter keeps, it
keeps them as well. Exception: ``top_k=1`` is greedy, and takes the first one of equal logits.
``paged_kernels.reference.sampling`` defines the filters and the draw, for the CPU and the GPU.

A NaN or infinite logit does not affect other rows. NaN counts as minus infinity, and plus infinity
as the largest finite number. A row with only NaN and minus infinity yields token 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec

# Number of most likely tokens that are tried first; a slower method filters the whole row.
NUM_CANDIDATES = 64
_GROUP_SIZE = 16  # tokens in a group; candidates are searched in the groups with the largest peaks
_SUM_BLOCK = 128  # tokens in a block: weights are added in float32, the sums of blocks in float64
_DIGIT_BITS = 10  # bits in a digit; 30 bits distinguish all floats in [0, 1]
_FIXED_POINT = 2.0**34  # weights as integers in float64: sums are exact, whatever their order


def compile_draws() -> None:
    """Compile the functions that draw tokens, so that the first sample does not wait for it."""
    _race()


def _race() -> ModuleType:
    # Imported where a CPU serves: a host with a GPU needs no numba.
    from paged_backend.sampling import race

    return race


def draw_greedy(logits: Tensor, samples: Sequence[SampleSpec]) -> list[int]:
    """Return the argmax of each row of ``logits`` [n, vocab]; the first one of equal logits."""
    del samples
    values = logits.numpy()
    tokens = _argmax(values)
    if np.isnan(values[np.arange(len(values)), tokens]).any():
        tokens = _argmax(_repaired(logits).numpy())
    result: list[int] = tokens.tolist()
    return result


def draw_from_candidates(logits: Tensor, samples: Sequence[SampleSpec]) -> list[int]:
    """Sample with ``top_k`` in 1..NUM_CANDIDATES, from the most likely tokens of each row.

    Only these tokens are weighted and filtered. If more tokens may tie with the last one of a row,
    `draw_from_all` samples that row.
    """
    values, token_ids = _largest(logits, NUM_CANDIDATES + 1)
    if not bool(values[:, 0].isfinite().all()):
        logits = _repaired(logits)
        values, token_ids = _largest(logits, NUM_CANDIDATES + 1)
    top_k, top_p, min_p, temperature = _columns(
        logits,
        [(s.params.top_k, s.params.top_p, s.params.min_p, s.params.temperature) for s in samples],
    )
    width = values.shape[1]
    last = values.gather(1, top_k.long().clamp_(max=width) - 1)
    weights = ((values.double() - values[:, :1]) / temperature).exp_()
    weights.mul_((values >= last) & (weights >= min_p))
    limit = top_p * weights.sum(1, keepdim=True)
    num_below = (weights.cumsum(1) < limit).sum(1, keepdim=True)
    weights.mul_(weights >= weights.gather(1, num_below.clamp_(max=width - 1)))
    tokens: list[int] = _race().race_among(weights, token_ids, samples)
    if width < logits.shape[1]:  # tokens as likely as the last may follow
        tied = (values[:, -1:] == last) & last.isfinite()
        for row in tied.squeeze(1).nonzero().flatten().tolist():
            tokens[row : row + 1] = draw_from_all(logits[row : row + 1], samples[row : row + 1])
    return tokens


def draw_from_all(logits: Tensor, samples: Sequence[SampleSpec]) -> list[int]:
    """Sample from the whole vocabulary, after ``min_p``, ``top_k`` and ``top_p``."""
    (temperature,) = _columns(logits, [(s.params.temperature,) for s in samples])
    scaled = logits / temperature.float()
    weights = scaled.softmax(1)
    if bool(weights[:, 0].isnan().any()):  # one bad logit makes its whole row NaN
        weights = _repaired(scaled).softmax(1)
    _apply_top_k_and_min_p(weights, samples)
    _apply_top_p(weights, samples)
    tokens: list[int] = _race().race(weights, samples)
    return tokens


def _argmax(values: NDArray[np.float32]) -> NDArray[np.int64]:
    # torch's argmax is 12 times slower on a CPU.
    tokens: NDArray[np.int64] = np.argmax(values, axis=1)
    return tokens


def _repaired(logits: Tensor) -> Tensor:
    fixed = logits.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    fixed[fixed.amax(1) == -torch.inf, 0] = 0
    return fixed


def _columns(logits: Tensor, rows: list[tuple[float, ...]]) -> tuple[Tensor, ...]:
    """Return each column of ``rows`` as float64 [n, 1]."""
    table = torch.tensor(rows, dtype=torch.float64).to(logits.device)
    return tuple(column.unsqueeze(1) for column in table.unbind(1))


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest of each row, descending, and their columns: [n, count]."""
    num_rows, width = values.shape
    num_groups = width // _GROUP_SIZE
    if num_groups <= count:
        found = values.topk(min(count, width), dim=1)
        return found.values, found.indices
    # Each of the ``count`` largest lies in one of the ``count`` groups with the largest peaks.
    grouped = values[:, : num_groups * _GROUP_SIZE].view(num_rows, _GROUP_SIZE, num_groups)
    best = grouped.amax(1).topk(count, dim=1, sorted=False).indices
    offsets = torch.arange(0, _GROUP_SIZE * num_groups, num_groups, device=values.device)
    columns = (offsets.unsqueeze(1) + best.unsqueeze(1)).flatten(1)
    rest = torch.arange(num_groups * _GROUP_SIZE, width, device=values.device)
    columns = torch.cat((columns, rest.expand(num_rows, -1)), dim=1)
    found = values.gather(1, columns).topk(count, dim=1)
    return found.values, columns.gather(1, found.indices)


def _apply_top_k_and_min_p(weights: Tensor, samples: Sequence[SampleSpec]) -> None:
    """Zero the ``weights`` [n, vocab] that ``min_p`` and ``top_k`` leave out."""
    limits = [_top_k(s.params.top_k, weights.shape[1]) for s in samples]
    ranked = [row for row, limit in enumerate(limits) if limit]
    floor = torch.zeros(len(samples), device=weights.device)
    if any(s.params.min_p for s in samples):
        (min_p,) = _columns(weights, [(s.params.min_p,) for s in samples])
        floor = weights.amax(1) * min_p.squeeze(1).float()
    elif not ranked:
        return
    if ranked:
        last = torch.tensor([[limits[row] - 1] for row in ranked], device=weights.device)
        leaders, _ = _largest(_rows(weights, ranked), max(limits))
        floor[ranked] = torch.maximum(floor[ranked], leaders.gather(1, last).squeeze(1))
    _zero_below(weights, floor)


def _top_k(value: int, vocab_size: int) -> int:
    return value if 0 < value < vocab_size else 0


def _apply_top_p(weights: Tensor, samples: Sequence[SampleSpec]) -> None:
    """Zero the ``weights`` [n, vocab] that ``top_p`` leaves out."""
    rows = [row for row, s in enumerate(samples) if s.params.top_p < 1]
    if not rows:
        return
    (top_p,) = _columns(weights, [(samples[row].params.top_p,) for row in rows])
    floor = torch.zeros(len(samples), device=weights.device)
    floor[rows] = _nucleus_floor(_rows(weights, rows), top_p)
    _zero_below(weights, floor)


def _rows(values: Tensor, rows: list[int]) -> Tensor:
    return values if len(rows) == values.shape[0] else values[rows]


def _zero_below(weights: Tensor, floor: Tensor) -> None:
    # A comparison written as float32 costs a tenth of a masked fill on a CPU.
    weights.mul_(torch.ge(weights, floor.unsqueeze(1), out=torch.empty_like(weights)))


def _nucleus_floor(weights: Tensor, top_p: Tensor) -> Tensor:
    """Return the smallest weight among the most likely tokens with mass ``top_p`` [n, 1]: [n]."""
    leaders, _ = _largest(weights, NUM_CANDIDATES)
    limit = top_p * _block_sums(weights).sum(1, keepdim=True)
    last = (leaders.double().cumsum(1) < limit).sum(1)
    width = leaders.shape[1]
    floor = leaders.gather(1, last.clamp(max=width - 1).unsqueeze(1)).squeeze(1)
    wide = (last == width).nonzero().squeeze(1)
    if wide.numel():
        floor[wide] = _nucleus_floor_by_digits(weights[wide], top_p[wide])
    return floor


def _nucleus_floor_by_digits(weights: Tensor, top_p: Tensor) -> Tensor:
    """Return what :func:`_nucleus_floor` returns, without a sort, in three passes over each row.

    The bits of floats in [0, 1] have the same order as the floats, so the floor is found as a
    number of three digits. Each digit is the one at which the mass from the top reaches the limit.
    """
    bits = weights.view(torch.int32)
    mass = weights.double().mul_(_FIXED_POINT).floor_()
    limit = (top_p * mass.sum(1, keepdim=True)).ceil_()
    base = 1 << _DIGIT_BITS
    floor = torch.zeros_like(bits[:, :1])
    for shift in (2 * _DIGIT_BITS, _DIGIT_BITS, 0):
        digits = (bits >> shift).bitwise_and_(base - 1)
        sums = mass.new_zeros(mass.shape[0], base + 1).scatter_add_(1, digits.long(), mass)
        from_top = sums.flip(1).cumsum(1).flip(1)
        crossing = (from_top >= limit).sum(1, keepdim=True) - 1
        limit -= from_top.gather(1, crossing + 1)
        floor = floor * base + crossing.int()
        mass.mul_(torch.eq(digits, crossing.int(), out=torch.empty_like(mass)))
    return floor.view(torch.float32).squeeze(1)


def _block_sums(weights: Tensor) -> Tensor:
    """Sums of blocks of ``weights`` [n, vocab] as float64 [n, blocks]."""
    missing = -weights.shape[1] % _SUM_BLOCK
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    return weights.view(weights.shape[0], -1, _SUM_BLOCK).sum(2).double()
