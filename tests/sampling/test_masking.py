"""Masks on logits of the host, against a bit-by-bit definition."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.core.scheduler_output import TokenMasks
from paged_backend.sampling.draws import draw_greedy
from paged_backend.sampling.token_masks import apply_token_masks, draw_greedy_allowed

WORDS = st.one_of(st.sampled_from([0, 1, 2**31, 2**32 - 1]), st.integers(0, 2**32 - 1))


@given(st.data(), st.integers(1, 200), st.integers(1, 5))
def test_only_logits_without_a_bit_change(data: st.DataObject, vocab: int, num_rows: int) -> None:
    indices = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True, min_size=1).map(sorted))
    num_words = -(-vocab // 32)
    size = len(indices) * num_words
    words = data.draw(st.lists(WORDS, min_size=size, max_size=size))
    logits = torch.randn(num_rows, vocab)
    expected = logits.clone()
    for place, row in enumerate(indices):
        for token in range(vocab):
            if not words[place * num_words + token // 32] >> token % 32 & 1:
                expected[row, token] = -torch.inf
    apply_token_masks(logits, TokenMasks(indices, np.array(words, "<u4").tobytes()))
    assert torch.equal(logits, expected)


EDGES = st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf, -math.inf])


@given(st.data(), st.integers(1, 200), st.integers(1, 5))
def test_the_greedy_tokens_of_masks_are_those_of_masked_logits(
    data: st.DataObject, vocab: int, num_rows: int
) -> None:
    indices = data.draw(st.lists(st.integers(0, num_rows - 1), unique=True, min_size=1).map(sorted))
    size = len(indices) * -(-vocab // 32)
    words = np.array(data.draw(st.lists(WORDS, min_size=size, max_size=size)), "<u4")
    logits = torch.randn(num_rows, vocab)
    if data.draw(st.booleans()):
        logits.clamp_(max=0.5)  # many are equal
    for row, column in data.draw(
        st.lists(st.tuples(st.integers(0, num_rows - 1), st.integers(0, vocab - 1)), max_size=20)
    ):
        logits[row, column] = data.draw(EDGES)
    masks = TokenMasks(indices, words.tobytes())
    found = draw_greedy_allowed(logits, masks)
    apply_token_masks(logits, masks)
    assert found == draw_greedy(logits[indices], ())
