"""Masks on logits of the host, against a bit-by-bit definition."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.core.scheduler_output import TokenMasks
from paged_backend.sampling.token_masks import apply_token_masks

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
