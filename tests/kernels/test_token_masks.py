"""Masks of allowed tokens against decisions made bit by bit."""

from __future__ import annotations

import math

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_kernels.device import INTERPRETED
from paged_kernels.errors import ArgumentError
from paged_kernels.reference.token_masks import masked
from paged_kernels.token_masks import apply_token_masks
from torch import Tensor

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
SIZES = st.one_of(
    st.integers(1, 70), st.sampled_from([2047, 2048, 2049, 2 * 2048, 2 * 2048 + 31, 3 * 2048 + 1])
)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random_masks(count: int, vocab: int, share: float) -> Tensor:
    """Masks that allow a share of the tokens; bits beyond the vocabulary are random, too."""
    bits = torch.rand(count, -(-vocab // 32), 32) < share
    values = (bits.long() << torch.arange(32)).sum(-1)
    return values.where(values < 2**31, values - 2**32).int()


@given(
    vocab=SIZES,
    num_rows=st.integers(1, 5),
    order=st.permutations(range(5)),
    num_masks=st.integers(0, 5),
    share=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=examples(60), deadline=None)
def test_logits_equal_those_of_the_reference(vocab, num_rows, order, num_masks, share, seed):
    torch.manual_seed(seed)
    rows = ints([row for row in order if row < num_rows][:num_masks])
    masks = random_masks(len(rows), vocab, share)
    guarded = torch.randn(num_rows + 8, vocab)
    found = guarded.to(DEVICE)
    apply_token_masks(found[4:-4], rows.to(DEVICE), masks.to(DEVICE))
    assert torch.equal(found.cpu(), masked(guarded, rows + 4, masks))


def test_every_bit_of_a_word_stands_for_its_token():
    """The sign of a word, too; what a logit was does not matter."""
    vocab = 65
    rows = ints(list(range(vocab)))
    masks = torch.zeros(vocab, 3, dtype=torch.int64)
    masks[rows.long(), rows.long() // 32] = 1 << (rows.long() % 32)
    masks = masks.where(masks < 2**31, masks - 2**32).int()
    for value in (0.5, math.nan, math.inf, -math.inf):
        logits = torch.full((vocab, vocab), value, device=DEVICE)
        apply_token_masks(logits, rows.to(DEVICE), masks.to(DEVICE))
        assert torch.equal(logits.cpu().isneginf(), ~torch.eye(vocab).bool() | (value == -math.inf))


def test_bad_calls_are_refused():
    logits = torch.zeros(4, 40, device=DEVICE)
    rows, masks = ints([0, 2]).to(DEVICE), torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    bad = {
        "logits": [(logits.bfloat16(), rows, masks), (logits[:, :36], rows, masks)],
        "rows": [(logits, rows.long(), masks), (logits, rows[None], masks)],
        "masks": [
            (logits, rows, masks.long()),
            (logits, rows, masks[:1]),
            (logits, rows, masks[:, :1].contiguous()),
            (logits, rows, masks.repeat(1, 2)),
        ],
    }
    for name, calls in bad.items():
        for arguments in calls:
            with pytest.raises(ArgumentError) as refused:
                apply_token_masks(*arguments)
            assert refused.value.name == name
    assert not logits.any()
    apply_token_masks(logits, rows, masks)
    assert logits[[0, 2]].isneginf().all() and not logits[[1, 3]].any()
