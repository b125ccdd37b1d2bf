"""Bidirectional attention over packed prompts against dense attention in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_backend.models.attention_step import AttentionStep
from paged_backend.models.packed_attention import PackedPrompts
from paged_backend.platforms.cpu.prompt_attention import CpuPrompts

# One token, one tile of queries, and more keys than are read at once.
LENGTHS = [1, 48, 7, 300, 49, 1, 130]
NUM_HEADS, NUM_KV_HEADS = 4, 2


def make_torch(lengths: Sequence[int]) -> AttentionStep:
    return PackedPrompts(lengths, torch.device("cpu"))


def make_inputs(num_tokens: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [1, heads, num_tokens, head_dim], as views of rows of tokens."""
    torch.manual_seed(head_dim)
    heads = NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS
    q, k, v = (torch.randn(1, num_tokens, number, head_dim).transpose(1, 2) for number in heads)
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Attention of one prompt [tokens, heads, head_dim] in float64."""
    group = NUM_HEADS // NUM_KV_HEADS
    q, k, v = q[0].double(), *(x[0].double().repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    places = torch.arange(scores.shape[1])
    if window is not None:
        scores = scores.masked_fill((places[:, None] - places).abs() >= window, -math.inf)
    return (scores.softmax(2) @ v).transpose(0, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [CpuPrompts, make_torch], ids=["cpu", "torch"])
@pytest.mark.parametrize("head_dim", [8, 20, 32, 72])
@pytest.mark.parametrize("window", [None, 1, 5, 64, 200])
def test_prompts_attend_to_themselves(make: Any, head_dim: int, window: int | None) -> None:
    q, k, v = make_inputs(sum(LENGTHS), head_dim)
    options = {"scaling": 0.3, "sliding_window": window}
    found = make(LENGTHS).attend(None, q, k, v, options)
    assert found.shape == (1, sum(LENGTHS), NUM_HEADS, head_dim)
    parts = [torch.split(x, LENGTHS, dim=2) for x in (q, k, v)]
    expected = torch.cat([dense(*part, 0.3, window) for part in zip(*parts, strict=True)])
    torch.testing.assert_close(found[0], expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("make", [CpuPrompts, make_torch], ids=["cpu", "torch"])
def test_the_default_scale_and_large_scores(make: Any) -> None:
    q, k, v = (x * 10 for x in make_inputs(200, 32))
    found = make([200]).attend(None, q, k, v, {})
    expected = dense(q, k, v, 32**-0.5, None)
    torch.testing.assert_close(found[0], expected.float(), atol=2e-3, rtol=2e-3)


def test_a_prompt_does_not_depend_on_the_others() -> None:
    q, k, v = make_inputs(sum(LENGTHS), 32)
    together = CpuPrompts(LENGTHS).attend(None, q, k, v, {})
    start = sum(LENGTHS[:3])
    alone = CpuPrompts([300]).attend(
        None, *(x[:, :, start : start + 300].contiguous() for x in (q, k, v)), {}
    )
    assert torch.equal(together[:, start : start + 300], alone)
