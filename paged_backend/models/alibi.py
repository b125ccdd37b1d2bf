"""Linear biases of positions (ALiBi) as additional columns of queries and keys.

A bias slope * (key position - query position) is added to each score ("Train Short, Test Long",
https://arxiv.org/abs/2108.12409). The part of the query is the same for all keys, so the softmax
drops it. The part of the key is a product: the key ends with its position, and the query with the
slope. So attention kernels and the KV cache need to know nothing of it.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

COLUMNS = 8
"""Numbers that a head grows by; kernels need a multiple of 8."""
# bfloat16 has integers up to this number, so a position becomes two numbers.
_DIGIT = 256
MAX_POSITIONS = _DIGIT * _DIGIT


@functools.cache
def halving_slopes(num_heads: int) -> Tensor:
    """Return the slopes [num_heads] float32 of BLOOM and Falcon.

    They are 2^(-8/n), 2^(-16/n) ... for the largest power of two n that is at most the number of
    heads. Other heads have every second slope of 2 * n heads.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = _powers(whole)
    return torch.cat((slopes, _powers(2 * whole)[::2]))[:num_heads]


@functools.cache
def interleaved_slopes(num_heads: int, largest: float) -> Tensor:
    """Return the slopes [num_heads] float32 of MPT.

    Those of the next power of two of heads, the second, fourth ... first.

    Args:
        num_heads: the number of heads.
        largest: the exponent of the smallest slope, 2^-largest.
    """
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = _powers(whole, largest)
    if whole != num_heads:
        slopes = torch.cat((slopes[1::2], slopes[::2]))[:num_heads]
    return slopes


def _powers(num_heads: int, largest: float = 8.0) -> Tensor:
    exponents = torch.arange(1, num_heads + 1, dtype=torch.float64) * (largest / num_heads)
    return torch.exp2(-exponents).float()


def with_columns(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, scale: float, positions: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with the columns of a bias.

    Slopes are sums of two numbers of the dtype, so that 16 bits are as good as twice as many.

    Args:
        q: [1, num_heads, num_tokens, head_dim].
        k: [1, num_kv_heads, num_tokens, head_dim].
        v: the same.
        slopes: [num_heads] float32.
        scale: factor on the scores, which must not change the bias.
        positions: [num_tokens], below `MAX_POSITIONS`.

    Returns:
        The same with heads of head_dim + `COLUMNS` numbers; those of values are zeros.
    """
    wanted = slopes.to(q.device) / scale
    high = wanted.to(q.dtype)
    low = (wanted - high.float()).to(q.dtype)
    factors = torch.stack((_DIGIT * high, high, _DIGIT * low, low), dim=-1)
    digits = torch.stack((positions // _DIGIT, positions % _DIGIT), dim=-1).to(k.dtype)
    num_tokens = len(positions)
    query_columns = _padded(factors)[None, :, None].expand(1, -1, num_tokens, -1)
    key_columns = _padded(digits.repeat(1, 2))[None, None].expand(1, k.shape[1], -1, -1)
    return (
        torch.cat((q, query_columns), dim=-1),
        torch.cat((k, key_columns), dim=-1),
        F.pad(v, (0, COLUMNS)),
    )


def _padded(columns: Tensor) -> Tensor:
    return F.pad(columns, (0, COLUMNS - columns.shape[-1]))
