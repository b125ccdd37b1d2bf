"""A model's defaults of sampling parameters, for requests that leave them out."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paged_backend.serving.contract import as_strings
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.serving.tensorrtllm.sampling import IDS, TEXT, Dialect, sampling_values
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.request import RequestLimits
from paged_backend.values.sampling_defaults import SamplingDefaults
from paged_backend.values.sampling_params import SamplingParams

DEFAULTS = SamplingDefaults(
    temperature=0.6, top_k=20, top_p=0.95, min_p=0.1, repetition_penalty=1.05, max_tokens=30
)
FILLED = SamplingParams(**DEFAULTS.values(64))
EXPLICIT = {
    **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
    "max_tokens": 16,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("demo")


def limits(**options: int) -> RequestLimits:
    config = EngineConfig.from_mapping(options)
    return RequestLimits.of(config, max_model_len=64, vocab_size=2048, max_num_seqs=4)


def parse(
    tokenizer: Tokenizer,
    values: dict[str, Any],
    defaults: SamplingDefaults = DEFAULTS,
    *,
    as_tensor: bool = True,
    **options: int,
) -> SamplingParams:
    parser = RequestParser(tokenizer, limits(**options), defaults=defaults)
    tensors = {"text_input": as_strings(["x"])}
    if as_tensor:
        tensors["sampling_parameters"] = as_strings([json.dumps(values)])
    task = parser.read(tensors, "" if as_tensor else json.dumps(values))
    return parser.parse("1", task).request.params


@pytest.mark.parametrize("as_tensor", [True, False])
def test_what_a_request_leaves_out_or_sets_to_null_has_the_default(
    tokenizer: Tokenizer, as_tensor: bool
) -> None:
    for values in ({}, dict.fromkeys(EXPLICIT)):
        assert parse(tokenizer, values, as_tensor=as_tensor) == FILLED
    expected = replace(FILLED, seed=3, presence_penalty=0.5, n=2)
    own = {"seed": 3, "presence_penalty": 0.5, "n": 2}
    assert parse(tokenizer, own, as_tensor=as_tensor) == expected


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("name", EXPLICIT)
def test_what_a_request_has_wins_even_if_it_is_neutral(
    tokenizer: Tokenizer, name: str, as_tensor: bool
) -> None:
    value = EXPLICIT[name]
    assert getattr(FILLED, name) != value
    for given in (value, str(value)):  # parameters of a request may be strings
        expected = replace(FILLED, **{name: value})
        assert parse(tokenizer, {name: given}, as_tensor=as_tensor) == expected
    assert parse(tokenizer, EXPLICIT, as_tensor=as_tensor) == SamplingParams()


def test_a_wrong_value_is_not_replaced(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="^temperature: must be a number from 0 up to 100"):
        parse(tokenizer, {"temperature": -1})
    with pytest.raises(InvalidRequest, match="^min_tokens: must be at most max_tokens"):
        parse(tokenizer, {"min_tokens": 31})


def test_greedy_by_default(tokenizer: Tokenizer) -> None:
    greedy = SamplingDefaults(temperature=0)
    assert parse(tokenizer, {"n": 3, "seed": 5}, greedy).temperature == 0
    assert parse(tokenizer, {"temperature": 1.0}, greedy).temperature == 1


@pytest.mark.parametrize(
    ("defaults", "values", "expected"),
    [
        ({}, {}, 16),
        ({}, {"max_tokens": None}, 50),
        ({"max_tokens": 30}, {}, 30),
        ({"max_tokens": 30}, {"max_tokens": None}, 30),
        ({"max_tokens": 30}, {"max_tokens": 40}, 40),
        ({"max_tokens": 99999}, {}, 50),
        ({"max_tokens": 30, "max_tokens_limit": 30}, {}, 30),
        ({"max_tokens": 30, "max_tokens_limit": 30}, {"max_tokens": None}, 30),
        ({"max_tokens": 30, "max_tokens_limit": 30}, {"max_tokens": 40}, 30),
        ({"max_tokens": 30, "max_tokens_limit": 30}, {"max_tokens": 20}, 20),
    ],
)
def test_the_number_of_tokens(
    tokenizer: Tokenizer, defaults: dict[str, int], values: dict[str, Any], expected: int
) -> None:
    found = parse(tokenizer, values, SamplingDefaults(**defaults), max_output_tokens=50)
    assert found.max_tokens == expected


@pytest.mark.parametrize("dialect", [TEXT, IDS])
def test_tensorrtllms_fields_have_their_own_defaults(
    tokenizer: Tokenizer, dialect: Dialect
) -> None:
    llm = SimpleNamespace(tokenizer=tokenizer, limits=limits())
    found = parse(tokenizer, sampling_values(dialect, {}, llm))
    assert found == SamplingParams(temperature=0.0, stop_special_tokens=True)
    found = parse(tokenizer, sampling_values(dialect, {dialect.top_k: np.array([[5]])}, llm))
    assert found == SamplingParams(top_k=5, stop_special_tokens=True)
