"""The policy of beam search, without a model."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from paged_backend.core.beams import BeamSearch
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.outputs import TokenLogprobs
from paged_backend.values.sampling_params import SamplingParams

VOCAB = 3
END = 0
MAX_TOKENS = 3


def logprobs_after(tokens: tuple[int, ...], seed: int) -> list[float]:
    """The log-probabilities of the next token after any output."""
    rng = random.Random(f"{seed} {tokens}")
    weights = [rng.random() + 0.01 for _ in range(VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def search_all(seed: int, **options: object) -> BeamSearch:
    """A search with as many beams as there are outputs."""
    params = SamplingParams(beam_width=16, n=16, **options)
    search = BeamSearch(params, frozenset({END}), MAX_TOKENS)
    prefix: list[int] = []
    is_over = False
    while not is_over:
        rows = []
        for beam in search.beams:
            values = logprobs_after(tuple(beam.token_ids), seed)
            order = sorted(range(VOCAB), key=lambda token: -values[token])
            rows.append(TokenLogprobs(0.0, 1, order, [values[token] for token in order]))
        is_over = not search.advance(rows)
        outputs = [*search.beams, *search.finished]
        found = {tuple(output.token_ids[: search.num_common]) for output in outputs}
        assert len(found) == 1
        assert list(found.pop())[: len(prefix)] == prefix  # what was sent stays true
        prefix = outputs[0].token_ids[: search.num_common]
    return search


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 2.0])
def test_a_search_with_room_for_all_outputs_finds_the_best(
    seed: int, length_penalty: float
) -> None:
    search = search_all(seed, length_penalty=length_penalty, early_stopping="never")
    scores: dict[tuple[int, ...], float] = {}
    for tokens in product(range(VOCAB), repeat=MAX_TOKENS):
        cut = tokens[: tokens.index(END) + 1] if END in tokens else tokens
        values = [logprobs_after(cut[:place], seed)[token] for place, token in enumerate(cut)]
        scores[cut] = sum(values) / len(cut) ** length_penalty
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:15]
    assert [tuple(output.token_ids) for output in search.finished[:15]] == best
    for output in search.finished:
        assert output.score == pytest.approx(scores[tuple(output.token_ids)], abs=1e-5)


def test_a_token_without_probability_is_no_continuation() -> None:
    """Only two tokens are possible after the prompt, and none after one of them."""
    params = SamplingParams(beam_width=4, n=4)
    search = BeamSearch(params, frozenset({END}), MAX_TOKENS)
    first = TokenLogprobs(0.0, 1, [2, 1, END], [-0.5, -1.0, -math.inf])
    assert [child.token_id for child in search.advance([first])] == [2, 1]
    # A GPU returns no impossible tokens, and a CPU returns them with their log-probability.
    nothing = TokenLogprobs(0.0, 1, [], [])
    ends = TokenLogprobs(0.0, 1, [END, 1, 2], [-0.1, -math.inf, -math.inf])
    assert search.advance([nothing, ends]) == []
    assert [output.token_ids for output in search.finished] == [[1, END]]


@pytest.mark.parametrize("logprobs", [[], [-math.inf] * VOCAB])
def test_a_model_that_rules_out_all_tokens_ends_the_search(logprobs: list[float]) -> None:
    search = BeamSearch(SamplingParams(beam_width=2), frozenset({END}), MAX_TOKENS)
    row = TokenLogprobs(0.0, 1, list(range(len(logprobs))), logprobs)
    assert search.advance([row]) == search.finished == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"beam_width": 4, "temperature": 0.5}, "temperature: must be 0 with beam search, got 0.5"),
        ({"beam_width": 4, "seed": 1}, "seed: must be left out with beam search, got 1"),
        ({"beam_width": 4, "stop": "a"}, "stop: must be left out with beam search, got 'a'"),
        ({"beam_width": 4, "allowed_token_ids": [1]}, "allowed_token_ids: must be left out with"),
        ({"beam_width": 2, "n": 3}, "n: must be at most beam_width (2), got 3"),
        ({"n": 2, "num_return_sequences": 3}, "n: must equal num_return_sequences (3), got 2"),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping: must be true, false, "),
        ({"use_beam_search": True, "n": 2, "min_p": 0.1}, "min_p: must be 0 with beam search"),
    ],
)
def test_what_beams_cannot_be_combined_with_is_refused(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams.from_mapping(values)
    assert str(caught.value).startswith(message)


def test_names_of_other_servers_have_the_same_meaning() -> None:
    beams = SamplingParams(beam_width=3, n=3)
    assert SamplingParams.from_mapping({"use_beam_search": True, "n": 3}) == beams
    assert SamplingParams.from_mapping({"beam_width": 3, "num_return_sequences": 3}) == beams
