"""Lists of words are bounded before they are read, on whatever thread that is."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paged_backend.serving.tensorrtllm.sampling import (
    IDS,
    TEXT,
    check_bias_words,
    sampling_values,
)
from paged_backend.serving.tensorrtllm.words import write_words
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.request import RequestLimits

MANY = 250_000


@pytest.fixture(scope="module")
def llm() -> Any:
    limits = RequestLimits.of(
        EngineConfig.from_mapping({}), max_model_len=64, vocab_size=2048, max_num_seqs=4
    )
    return SimpleNamespace(tokenizer=load_tokenizer("demo"), limits=limits)


def _texts(number: int, text: bytes = b"a") -> Any:
    return np.array([text] * number, object)


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"stop_words_list": write_words([[5]] * MANY)}, "stop_words_list: at most 272 words, got"),
        (
            {"stop_words_list": write_words([[5, 6]] * 17)},
            r"stop_words_list: at most 16 words of several tokens \(max_stop_strings\), got 17",
        ),
        (
            {"stop_words_list": write_words([[5] * MANY])},
            "stop_words_list: each has at most 1024 tokens, got 250000",
        ),
        ({"bad_words_list": write_words([[5]] * MANY)}, "bad_words_list: at most 256 words, got"),
        ({"bad_words_list": write_words([[5] * 65])}, "bad_words_list: each has at most 64 tokens"),
        ({"stop_words": _texts(MANY)}, "stop_words: has 250000 elements, more than 16"),
        ({"stop_words": _texts(1, b"a" * 2**24)}, "stop_words: each has at most 256 characters"),
        ({"bad_words": _texts(MANY)}, "bad_words: has 250000 elements, more than 128"),
        (
            {"embedding_bias_words": _texts(MANY), "embedding_bias_weights": np.ones(MANY)},
            "embedding_bias_words: has 250000 elements, more than 1024",
        ),
        (
            {
                "embedding_bias_words": _texts(1024, b"a" * 64),
                "embedding_bias_weights": np.ones(1024),
            },
            "embedding_bias_words: all words of a request have at most 4096 bytes together",
        ),
        (
            {"embedding_bias_words": _texts(1), "embedding_bias_weights": np.ones(MANY)},
            "embedding_bias_weights: has 250000 elements, more than 1024",
        ),
        (
            {"embedding_bias": np.ones(MANY, np.float32)},
            r"embedding_bias: has 250000 elements other than 0, more than 1024 \(max_logit_bias\)",
        ),
        (
            {
                "guided_decoding_guide_type": _texts(1, b"regex"),
                "guided_decoding_guide": _texts(1, b"a" * 2**24),
            },
            "guided_decoding_guide: each has at most 131072 characters",
        ),
    ],
)
def test_lists_are_refused_before_they_are_read(
    llm: Any, tensors: dict[str, Any], problem: str
) -> None:
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match=problem):
        sampling_values(TEXT, tensors, llm)
    assert time.thread_time() - started < 0.02


def test_words_with_a_bias_are_counted_in_all_rows_together() -> None:
    """They are tokenized on the thread that admits all requests."""
    row = {"embedding_bias_words": _texts(64, b"a" * 63)}
    check_bias_words([row])
    for rows in ([row, {}, {"embedding_bias_words": _texts(1, b"")}], [{**row}] * MANY):
        started = time.thread_time()
        with pytest.raises(InvalidRequest, match="embedding_bias_words: all words"):
            check_bias_words(rows)
        assert time.thread_time() - started < 0.02


def test_lists_up_to_the_limits_are_read(llm: Any) -> None:
    tensors = {
        "stop_words_list": write_words([[5, 6]] * 16 + [[7]] * 256),
        "bad_words_list": write_words([[5] * 64] * 256),
        "embedding_bias": np.pad(np.ones(1024, np.float32), (0, 1024)),
    }
    values = sampling_values(IDS, tensors, llm)
    assert len(values["stop"]) == 16 and values["stop_token_ids"] == [7] * 256
    assert values["bad_words_token_ids"] == [[5] * 64] * 256
    assert len(values["logit_bias"]) == 1024
