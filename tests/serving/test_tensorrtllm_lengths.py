"""Requests to the steps of tensorrtllm_backend are bounded in all their rows together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paged_backend.serving.tensorrtllm.lengths import MAX_QUERIES, check_queries, check_sequences
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.request import RequestLimits

LIMITS = RequestLimits.of(
    EngineConfig.from_mapping({}), max_model_len=64, vocab_size=2048, max_num_seqs=4
)


def _sequences(number: int, width: int, *lengths: int) -> dict[str, Any]:
    return {
        "TOKENS_BATCH": np.zeros((number, width), np.int32),
        "SEQUENCE_LENGTH": np.array(lengths or [width] * number, np.int32),
    }


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (
            [_sequences(1, 65)],
            r"TOKENS_BATCH: each has at most 64 tokens \(max_model_len\), got 65",
        ),
        ([_sequences(1, 2_000_000, 1)], "TOKENS_BATCH: each has at most 64 tokens"),
        ([_sequences(33, 1)] * 2, "TOKENS_BATCH: at most 64 sequences, got 66"),
        ([_sequences(2, 4, 1)], "SEQUENCE_LENGTH: has 1 elements for 2 sequences"),
        ([_sequences(1, 4, 5)], "SEQUENCE_LENGTH: must be from 0 to 4, got 5"),
        ([_sequences(1, 4, -1)], "SEQUENCE_LENGTH: must be from 0 to 4, got -1"),
    ],
)
def test_more_tokens_than_a_batch_can_have_are_refused(rows: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        check_sequences(rows, LIMITS)


def test_a_whole_batch_of_the_longest_sequences_is_taken() -> None:
    check_sequences([_sequences(1, 64)] * 64, LIMITS)
    check_sequences([_sequences(0, 0)], LIMITS)


def test_queries_are_bounded_together_but_not_below_one_prompt() -> None:
    row = {"QUERY": np.array([b"a" * 2**20], object)}
    check_queries([row] * 4, 64)
    with pytest.raises(InvalidRequest, match=f"QUERY: all rows have at most {MAX_QUERIES} char"):
        check_queries([row] * 5, 64)
    check_queries([row] * 5, 2 * MAX_QUERIES)
