"""A stream sends its first token, then responses of a number of tokens, and loses nothing."""

from __future__ import annotations

import json
import random
import string
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.requests.answer import GenerationAnswer
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.outputs import (
    DraftCounts,
    FinishReason,
    SequenceOutput,
    SequenceTimes,
    TokenLogprobs,
)
from paged_backend.values.request import RequestLimits

REQUEST = "1"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("demo")


def answer_of(
    tokenizer: Tokenizer,
    n: int,
    stream_interval: int,
    *,
    stream: bool = True,
    stop: tuple[str, ...] = (),
) -> GenerationAnswer:
    limits = RequestLimits.of(EngineConfig(), max_model_len=64, vocab_size=2048, max_num_seqs=8)
    tensors = {
        "text_input": as_strings(["x"]),
        "sampling_parameters": as_strings([json.dumps({"n": n, "stop": stop})]),
        "stream": np.array([stream]),
        "return_output_ids": np.array([True]),
        "return_num_output_tokens": np.array([True]),
        "return_metrics": np.array([True]),
    }
    parser = RequestParser(tokenizer, limits)
    parsed = parser.parse(REQUEST, parser.read(tensors, ""))
    return GenerationAnswer(parsed, tokenizer, stream_interval)


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[SequenceOutput]]:
    """The outputs of all completions of a request, each up to its end, in a random order."""
    n = draw(st.integers(1, 3))
    outputs = []
    for index in draw(st.permutations([i for i in range(n) for _ in range(draw(_LENGTHS))])):
        token_ids = draw(st.lists(st.integers(100, 2000), min_size=1, max_size=3))
        outputs.append(SequenceOutput(REQUEST, index, token_ids))
    outputs += [SequenceOutput(REQUEST, index, [7], FinishReason.LENGTH) for index in range(n)]
    return n, outputs


_LENGTHS = st.integers(0, 8)


def responses(
    answer: GenerationAnswer, outputs: list[SequenceOutput]
) -> Iterator[dict[str, Array]]:
    for output in outputs:
        answer.append(output)
        if answer.is_due:
            yield answer.take()
    assert answer.is_finished


@given(history=histories(), stream_interval=st.integers(1, 6))
def test_a_response_that_is_made_later_has_what_it_would_have_had_at_once(
    tokenizer, history, stream_interval
):
    n, outputs = history
    at_once = responses(answer_of(tokenizer, n, stream_interval), outputs)
    answer, later = answer_of(tokenizer, n, stream_interval), []
    for output in outputs:
        answer.append(output)
        if answer.is_due:
            later.append(answer.take_later())
    for expected, make in zip(at_once, later, strict=True):
        found = make()
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("entry", "number", "is_large"),
    [
        (TokenLogprobs(-1.0, 1, [5], [-1.0]), 1, False),
        (TokenLogprobs(-1.0, 1, [5], [-1.0], bytes(4 * 2048)), 1, True),
        (TokenLogprobs(-1.0, 1, [5] * 19, [-1.0] * 19), 40, False),
        (TokenLogprobs(-1.0, 1, [5] * 19, [-1.0] * 19), 52, True),
        (None, 9000, True),
    ],
)
def test_a_response_is_large_by_its_logits_or_its_size(tokenizer, entry, number, is_large):
    answer = answer_of(tokenizer, 1, 1)
    logprobs = None if entry is None else [entry] * number
    answer.append(SequenceOutput(REQUEST, 0, [7] * number, logprobs=logprobs))
    assert answer.is_large == is_large
    answer.take()
    assert not answer.is_large


@given(history=histories(), stream_interval=st.integers(1, 6))
def test_the_responses_have_all_text_and_all_tokens(tokenizer, history, stream_interval):
    n, outputs = history
    texts, token_ids = [""] * n, [[] for _ in range(n)]
    for response in responses(answer_of(tokenizer, n, stream_interval), outputs):
        flat = response["output_ids"].tolist()
        for index, text in enumerate(response["text_output"].tolist()):
            count = response["num_output_tokens"][index]
            token_ids[index] += flat[:count]
            flat = flat[count:]
            texts[index] += text.decode()
    for index in range(n):
        expected = [t for o in outputs if o.index == index for t in o.new_token_ids]
        assert token_ids[index] == expected
        assert texts[index] == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("stream_interval", "counts"),
    [(1, [1] * 8 + [3]), (2, [1, 2, 2, 2, 4]), (3, [1, 3, 3, 4]), (99, [1, 10])],
)
def test_the_first_and_the_last_tokens_do_not_wait(tokenizer, stream_interval, counts):
    outputs = [SequenceOutput(REQUEST, 0, [200]) for _ in range(8)]
    outputs.append(SequenceOutput(REQUEST, 0, [200, 201, 202], FinishReason.LENGTH))
    found = responses(answer_of(tokenizer, 1, stream_interval), outputs)
    assert [response["num_output_tokens"].tolist() for response in found] == [[n] for n in counts]


def test_a_completion_that_ends_does_not_wait_for_the_others(tokenizer):
    ends = FinishReason.LENGTH
    outputs = [
        *(SequenceOutput(REQUEST, 0, [200]), SequenceOutput(REQUEST, 1, [200])),
        *(SequenceOutput(REQUEST, 0, [200]), SequenceOutput(REQUEST, 1, [200, 201], ends)),
        *(SequenceOutput(REQUEST, 0, [200]), SequenceOutput(REQUEST, 0, [200], ends)),
    ]
    found = responses(answer_of(tokenizer, 2, 9), outputs)
    counts = [response["num_output_tokens"].tolist() for response in found]
    assert counts == [[1, 0], [0, 1], [1, 2], [2, 0]]


def test_without_a_stream_the_response_is_due_at_the_end(tokenizer):
    answer = answer_of(tokenizer, 2, 1, stream=False)
    for index, reason in ((0, None), (1, None), (0, FinishReason.LENGTH)):
        answer.append(SequenceOutput(REQUEST, index, [200], reason))
        assert not answer.is_due
    answer.append(SequenceOutput(REQUEST, 1, [200], FinishReason.LENGTH))
    assert answer.is_due
    assert answer.take()["num_output_tokens"].tolist() == [2, 2]


def test_completions_share_what_searches_for_stop_strings_which_the_first_token_builds(tokenizer):
    draw = random.Random(1)
    stop = tuple("".join(draw.choices(string.ascii_letters, k=220)) for _ in range(16))
    tracemalloc.start()
    answer = answer_of(tokenizer, 8, 1, stop=stop)
    admitted, _ = tracemalloc.get_traced_memory()
    for index in range(8):
        answer.append(SequenceOutput(REQUEST, index, [1000]))
    begun, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert admitted < 100_000
    assert begun - admitted < 400_000  # one of them is smaller than 200,000 bytes


def test_metrics_count_the_drafts_up_to_a_stop_string(tokenizer):
    letters = [tokenizer.encode(letter, add_special_tokens=False)[-1] for letter in "abcdefgh"]
    answer = answer_of(tokenizer, 2, 1, stream=False, stop=("e",))
    for index, drafts in enumerate((DraftCounts(3, 2, 3, 2), DraftCounts(3, 2))):
        times = SequenceTimes(1.0, 2.0, 3.0)
        answer.append(SequenceOutput(REQUEST, index, letters[:1], times=times))
        answer.append(SequenceOutput(REQUEST, index, letters[1:4], drafts=drafts))
    # Four drafts are right, but the first of them completes the stop string.
    answer.append(SequenceOutput(REQUEST, 0, letters[4:], drafts=DraftCounts(4, 4, 4, 4)))
    answer.append(SequenceOutput(REQUEST, 1, [7], FinishReason.LENGTH))
    names = (
        *("total_draft_tokens", "total_accepted_draft_tokens"),
        *("accepted_prediction_tokens", "rejected_prediction_tokens"),
    )
    found = [json.loads(text) for text in answer.take()["metrics"].tolist()]
    assert [[values[name] for name in names] for values in found] == [[7, 3, 3, 4], [3, 2, 0, 0]]
