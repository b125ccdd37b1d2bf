"""Batches and lists of words in tensorrtllm_backend's format."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.serving.tensorrtllm.arrays import merge, split_rows
from paged_backend.serving.tensorrtllm.words import NO_WORD, read_words, write_words
from paged_backend.values.errors import InvalidRequest

WORDS = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), max_size=5)


@given(words=WORDS, padding=st.integers(0, 4))
def test_words_are_read_as_they_were_written(words: list[list[int]], padding: int) -> None:
    written = np.pad(write_words(words), [(0, 0), (0, padding)], constant_values=NO_WORD)
    assert read_words("words", written, 5, 5) == words


@pytest.mark.parametrize(
    "array", [[[1, 2], [2, 1]], [[1, 2], [0, -1]], [[1], [2]], [1, 2], [[1], [1], [1]]]
)
def test_what_is_no_list_of_words_is_refused(array: list[object]) -> None:
    with pytest.raises(InvalidRequest, match="words: (each end|must have the shape)"):
        read_words("words", np.array(array), 5, 5)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), padding=st.sampled_from([0, -1])
)
def test_merged_answers_are_the_rows_again(lengths: list[int], padding: int) -> None:
    answers = [{"ids": np.full((1, 1, length), row)} for row, length in enumerate(lengths, 1)]
    merged = merge([dict(answer) for answer in answers], padding={"ids": padding})
    assert merged["ids"].shape == (len(lengths), 1, max(lengths))
    for row, (tensors, length) in enumerate(
        zip(split_rows(merged, is_batched=True), lengths, strict=True), 1
    ):
        assert tensors["ids"][0].tolist() == [row] * length + [padding] * (max(lengths) - length)


def test_without_a_batch_dimension_there_is_one_row() -> None:
    tensors = {"a": np.zeros((3, 2))}
    assert split_rows(tensors, is_batched=False) == [tensors]
    assert merge([]) == {}
