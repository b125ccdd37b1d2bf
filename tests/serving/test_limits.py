"""What an operator allows: each limit is an option, and an error names it."""

from __future__ import annotations

import json
import re
import time

import numpy as np
import pytest

from paged_backend.serving import fields
from paged_backend.serving.contract import as_strings
from paged_backend.serving.requests.parameters import RequestParameters
from paged_backend.serving.requests.parsing import ParsedRequest, RequestParser
from paged_backend.serving.requests.tasks import Task, TaskKind
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.request import RequestLimits

NARROW = {
    "max_prompt_tokens": 8,
    "max_output_tokens": 32,
    "max_n": 2,
    "max_stop_strings": 2,
    "max_stop_length": 5,
    "max_logit_bias": 1,
    "max_json_length": 200,
    "max_json_depth": 3,
    "max_total_logprobs": 20,
    "max_total_logits": 3 * 2048,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("demo")


def parser(tokenizer: Tokenizer, **options: int) -> RequestParser:
    limits = RequestLimits.of(
        EngineConfig.from_mapping(options), max_model_len=64, vocab_size=2048, max_num_seqs=4
    )
    return RequestParser(tokenizer, limits)


def parse(parser: RequestParser, sampling: str = "{}", **prompt: object):
    tensors = {"sampling_parameters": as_strings([sampling])}
    for name, value in (prompt or {"text_input": "x"}).items():
        is_ids = name == "input_ids"
        tensors[name] = np.array(value, np.int32) if is_ids else as_strings([value])
    parameters = RequestParameters(tensors, "", parser.limits)
    return parser.parse("1", Task(TaskKind.GENERATE, tensors, parameters))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"n": 3}, "n: must be at most max_n (2), got 3"),
        ({"max_tokens": 33}, "max_tokens: must be at most max_output_tokens (32), got 33"),
        (
            {"max_tokens": None, "min_tokens": 33},
            "min_tokens: must be at most max_tokens (32), got 33",
        ),
        (
            {"n": 2, "max_tokens": 20, "logprobs": 1},
            "logprobs: at most 20 in all (max_total_logprobs), got up to 80: 40 tokens with 1 of "
            "the likeliest each",
        ),
        (
            {"prompt_logprobs": 20, "max_tokens": 1},
            "prompt_logprobs: at most 20 in all (max_total_logprobs), got up to 21: 1 tokens with "
            "20 of the likeliest each",
        ),
        ({"stop": ["a", "b", "c"]}, "stop: at most 2 strings (max_stop_strings), got 3"),
        ({"stop": ["a", "bcdefg"]}, "stop: at most 5 characters (max_stop_length), got 6"),
        ({"logit_bias": {"1": 1, "2": 1}}, "logit_bias: at most 1 entries (max_logit_bias), got 2"),
        (
            {"cache_salt": "x" * 200},
            "sampling_parameters: has over 200 characters (max_json_length)",
        ),
        (
            {"bad_words_token_ids": [[[1]]]},
            "sampling_parameters: is nested deeper than 3 levels (max_json_depth)",
        ),
    ],
)
def test_each_limit_is_an_option(tokenizer, fields, problem):
    source = json.dumps(fields)
    with pytest.raises(InvalidRequest) as caught:
        parse(parser(tokenizer, **NARROW), source)
    assert str(caught.value) == problem
    # Without the options, none of it is over a limit.
    try:
        parse(parser(tokenizer), source)
    except InvalidRequest as error:
        assert "max_" not in str(error)


@pytest.mark.parametrize(
    ("fields", "vocab_size", "speculates", "problem"),
    [
        ({}, 2048, False, "cannot be used: the engine does not speculate (speculative_config)"),
        ({"speculate": False}, 2048, True, "cannot be used with speculate: false"),
        # The tokenizer may know more tokens than the model.
        ({}, 3, True, "must be from 0 to 2, got "),
    ],
)
def test_a_prediction_that_cannot_be_used_is_refused(
    tokenizer, fields, vocab_size, speculates, problem
):
    limits = RequestLimits.of(
        EngineConfig(),
        max_model_len=64,
        vocab_size=vocab_size,
        max_num_seqs=4,
        speculates=speculates,
    )
    source = json.dumps({"prediction": "a text", **fields})
    with pytest.raises(InvalidRequest, match=re.escape(f"prediction: {problem}")):
        parse(RequestParser(tokenizer, limits), source, input_ids=[1])


def test_no_more_tokens_can_be_allowed_than_there_are(tokenizer):
    parse(parser(tokenizer), json.dumps({"allowed_token_ids": [1] * 2048}))
    with pytest.raises(InvalidRequest, match="allowed_token_ids: at most 2048 token ids, got 2049"):
        parse(parser(tokenizer), json.dumps({"allowed_token_ids": [1] * 2049}))


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ({"input_ids": [1] * 9}, "prompt: has 9 tokens; at most 8 tokens (max_prompt_tokens)"),
        (
            {"text_input": "x" * 500},
            "text_input: has 500 characters, more than can become 8 tokens (max_prompt_tokens)",
        ),
        (
            {"messages": json.dumps([{"role": "user", "content": "x" * 500}])},
            " characters, more than can become 8 tokens (max_prompt_tokens)",
        ),
        ({"messages": "[" + " " * 10**6 + "]"}, "messages: has 1000002 characters, more than"),
        (
            {"messages": '[{"role": "user", "content": [[[]]]}]'},
            "messages: is nested deeper than 3 levels (max_json_depth)",
        ),
    ],
)
def test_a_prompt_has_a_longest_length_whatever_it_is_made_of(tokenizer, prompt, problem):
    with pytest.raises(InvalidRequest) as caught:
        parse(parser(tokenizer, **NARROW), **prompt)
    assert problem in str(caught.value)


def test_the_default_is_what_fits_the_model(tokenizer):
    with pytest.raises(InvalidRequest) as caught:
        parse(parser(tokenizer), input_ids=[1] * 64)
    assert str(caught.value) == (
        "prompt: has 64 tokens; at most 63 tokens, below max_model_len (64)"
    )
    wide = parser(tokenizer, max_prompt_tokens=1000, max_output_tokens=1000)
    with pytest.raises(InvalidRequest, match="at most max_model_len \\(64\\), got 65"):
        parse(wide, '{"max_tokens": 65}')


@pytest.mark.parametrize(("options", "most"), [({}, 64), ({"max_output_tokens": 10}, 10)])
def test_no_max_tokens_stands_for_the_limit(tokenizer, options, most):
    parsed = parse(parser(tokenizer, **options), '{"max_tokens": null}')
    assert parsed.request.params.max_tokens == most
    parsed = parse(parser(tokenizer, **options))  # not even null
    assert parsed.request.params.max_tokens == min(16, most)


@pytest.mark.parametrize("opening", ["[", '{"a":', '[{"a":'])
@pytest.mark.parametrize("depth", [33, 1000, 100_000, 10_000_000])
@pytest.mark.parametrize("closed", [False, True])
def test_deep_json_costs_nothing(tokenizer, opening, depth, closed):
    brackets = {"[": "]", '{"a":': "}", '[{"a":': "}]"}
    source = opening * depth + ("0" + brackets[opening] * depth if closed else "")
    wide = parser(tokenizer, max_json_length=2**24)
    started = time.process_time()
    for prompt in ({}, {"messages": source}):
        with pytest.raises(InvalidRequest) as caught:
            parse(wide, "{}" if prompt else source, **prompt)
        assert str(caught.value).startswith(("sampling_parameters: ", "messages: "))
    assert time.process_time() - started < 1


def test_depth_is_counted_outside_of_strings(tokenizer):
    parsed = parse(parser(tokenizer), json.dumps({"stop": "[{" * 100, "cache_salt": '"[\\"[' * 40}))
    assert parsed.request.params.stop == ("[{" * 100,)
    nested = json.dumps({"bad_words_token_ids": [[1]]})
    assert parse(parser(tokenizer, max_json_depth=3), nested)
    with pytest.raises(InvalidRequest, match="deeper than 2 levels"):
        parse(parser(tokenizer, max_json_depth=2), nested)


@pytest.mark.parametrize(
    "digits",
    ["9" * 4301, "9" * 10**6, "-" + "9" * 10**6, "1e" + "9" * 10**6],
    ids=["just too many", "a million", "minus", "exponent"],
)
@pytest.mark.parametrize("name", ["seed", "temperature", "max_tokens", "priority", "logit_bias"])
def test_a_number_of_any_length_is_an_error_of_its_field(tokenizer, name, digits):
    started = time.process_time()
    for value in (digits, f'"{digits}"'):
        with pytest.raises(InvalidRequest) as caught:
            parse(parser(tokenizer, max_json_length=2**24), f'{{"{name}": {value}}}')
        assert str(caught.value).startswith((f"{name}: ", "sampling_parameters: "))
        assert len(str(caught.value)) < 200
    assert time.process_time() - started < 1


@pytest.mark.parametrize("name", ["stop", "bad_words", "cache_salt", "tenant"])
def test_half_of_a_surrogate_pair_is_no_text(tokenizer, name):
    for value in ('"\\ud800"', '["\\ud800"]', '["x", "\\udc00"]'):
        with pytest.raises(InvalidRequest, match=f"^{name}: must be a string"):
            parse(parser(tokenizer), f'{{"{name}": {value}}}')
    assert parse(parser(tokenizer), f'{{"{name}": "\\ud83e\\udd9c"}}')


@pytest.mark.parametrize("name", ["return_context_logits", "return_generation_logits"])
def test_logits_are_limited(tokenizer: Tokenizer, name: str) -> None:
    narrow = parser(tokenizer, **NARROW)

    def ask(num_tokens: int) -> ParsedRequest:
        tensors = {
            "input_ids": np.arange(num_tokens, dtype=np.int32),
            "sampling_parameters": as_strings([f'{{"max_tokens": {num_tokens}}}']),
            name: np.array([True]),
        }
        return narrow.parse("1", narrow.read(tensors, ""))

    assert ask(3).request.params.logprobs == 0
    with pytest.raises(InvalidRequest) as caught:
        ask(4)
    assert str(caught.value) == (
        f"{name}: at most 6144 logits in all (max_total_logits), got up to 8192: 4 tokens with "
        "2048 each"
    )
    with pytest.raises(InvalidRequest, match=f"{name}: is a separate input"):
        parse(narrow, f'{{"{name}": true}}')


@pytest.mark.parametrize(
    ("tensor", "parameters", "name"),
    [
        (None, "", ""),
        (None, '{"temperature": 0.5}', ""),
        (None, '{"call_id": "by-parameter"}', "by-parameter"),
        ("by-tensor", "", "by-tensor"),
        ("same", '{"call_id": "same"}', "same"),
        (None, r'{"call\u005fid": "by-escaped-parameter"}', "by-escaped-parameter"),
    ],
)
def test_a_name_is_a_tensor_or_a_parameter(tokenizer, tensor, parameters, name):
    tensors = {"text_input": as_strings(["x"])}
    if tensor is not None:
        tensors["call_id"] = as_strings([tensor])
    reader = parser(tokenizer)
    parsed = reader.parse("1", reader.read(tensors, parameters))
    assert parsed.request.call_id == name


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ('{"call_id": "other"}', "must be the same as a tensor and as a parameter"),
        ('{"call_id": 7}', "must have 1 to 64 letters, digits, '_' and '-', got 7"),
        ('{"call_id": "a b"}', "must have 1 to 64 letters, digits, '_' and '-', got 'a b'"),
        ('{"call_id": "' + "a" * 500 + '"}', "must have 1 to 64 letters, digits, '_' and '-', got"),
        ('{"call_id"', "parameters: is not valid JSON"),
        ('["call_id"]', "parameters: must be a JSON object"),
    ],
)
def test_a_wrong_name_is_refused(tokenizer, parameters, problem):
    tensors = {"text_input": as_strings(["x"]), "call_id": as_strings(["mine"])}
    with pytest.raises(InvalidRequest, match=re.escape(problem)):
        parser(tokenizer).read(tensors, parameters)


def test_finding_the_name_of_a_request_skips_its_other_parameters(tokenizer):
    parameters = json.dumps({"other": [[]] * 200_000, "call_id": "mine"})
    started = time.thread_time()
    assert parser(tokenizer).read({}, parameters).call_id == "mine"
    assert time.thread_time() - started < 0.01


def test_the_parameters_of_a_request_are_decoded_once(tokenizer, monkeypatch):
    decoded = []
    json_object = fields.json_object

    def noting(name, *rest):
        decoded.append(name)
        return json_object(name, *rest)

    monkeypatch.setattr(fields, "json_object", noting)
    reader = parser(tokenizer)
    parameters = json.dumps({"call_id": "mine", "temperature": 0.5, "priority": 3})
    task = reader.read({"text_input": as_strings(["x"])}, parameters)
    assert not decoded  # the thread that admits all requests leaves that to others
    for _ in range(2):  # as for a request that turns out to need another thread
        request = reader.parse("1", task).request
        assert (request.call_id, request.priority, request.params.temperature) == ("mine", 3, 0.5)
    assert decoded == ["parameters"]
