"""Each kind of bad input gets an error that names the field, and harms nobody else."""

from __future__ import annotations

import json
import math
import threading

import numpy as np
import pytest
from paged_client import Client, InvalidRequest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from paged_backend.tools.demo import load_questions

pytestmark = pytest.mark.server
QUESTION = load_questions()[0]

BAD_FIELDS = [
    ({}, "text_input"),
    ({"text_input": "x", "input_ids": [1]}, "text_input"),
    ({"text_input": ""}, "prompt: is empty"),
    ({"input_ids": []}, "prompt: is empty"),
    ({"text_input": "word " * 3000}, "max_model_len"),
    ({"input_ids": [5] * 2048}, "at most 2047"),
    ({"input_ids": [-1]}, "token ids must be from 0"),
    ({"input_ids": [10**6]}, "token ids must be from 0"),
    ({"text_input": "x", "sampling_parameters": "["}, "sampling_parameters: is not valid JSON"),
    ({"text_input": "x", "sampling_parameters": "[]"}, "must be a JSON object"),
    ({"text_input": "x", "sampling_parameters": "[" * 100_000}, "sampling_parameters"),
    ({"text_input": "x", "temprature": 1}, "did you mean temperature?"),
    ({"prompt": "x"}, "prompt: is not known; the prompt's name here is text_input"),
    ({"text_input": "x", "temperature": "hot"}, "temperature: must be a number from 0"),
    ({"text_input": "x", "temperature": -1}, "temperature: must be a number from 0"),
    ({"text_input": "x", "top_p": 0}, "top_p: must be a number above 0"),
    ({"text_input": "x", "top_k": 2**40}, "top_k: must be an integer"),
    ({"text_input": "x", "n": 0}, "n: must be an integer from 1"),
    ({"text_input": "x", "n": 65}, "n: must be an integer from 1 up to 64"),
    ({"text_input": "x", "max_tokens": 0}, "max_tokens: must be an integer from 1"),
    ({"text_input": "x", "max_tokens": 10**6}, "max_tokens: must be at most max_model_len"),
    ({"text_input": "x", "min_tokens": 99}, "min_tokens: must be at most max_tokens"),
    ({"text_input": "x", "seed": -2}, "seed: must be an integer from 0"),
    ({"text_input": "x", "ignore_eos": 1}, "ignore_eos: must be true or false"),
    ({"text_input": "x", "cache_salt": 3}, "cache_salt: must be a string"),
    ({"text_input": "x", "stream": True, "exclude_input_in_output": False}, "When streaming"),
    (
        {"text_input": "x", "stream": True, "pass_through": "x" * 4097},
        "pass_through: has 4097 bytes, more than 4096 (max_pass_through_length)",
    ),
    (
        {"text_input": "x", "pass_through": "x" * 2**20},
        "pass_through: has 1048576 bytes, more than",
    ),
]

BAD_SAMPLING = [
    ('{"temperature": NaN}', "temperature: must be a number from 0"),
    ('{"temperature": Infinity}', "temperature: must be a number from 0"),
    ('{"top_p": -Infinity}', "top_p: must be a number above 0"),
    ('{"max_tokens": 1e400}', "max_tokens: must be an integer"),
    ('{"seed": ' + "9" * 4000 + "}", "seed: must be an integer"),
    ('{"stop": [1]}', "stop: must be a string or a list of strings"),
    (json.dumps({"stop": ["x"] * 17}), "stop: at most 16 strings"),
    (json.dumps({"stop": "x" * 300}), "stop: each string has 1 to 256 characters"),
    ('{"stop": ""}', "stop: each string has 1 to 256 characters"),
    ('{"stop_token_ids": [99999]}', "stop_token_ids: must be below"),
    ('{"stop_token_ids": "x"}', "stop_token_ids: must be a list"),
    ('{"logprobs": true}', "logprobs: must be an integer from 0 up to 20"),
    ('{"bad_words": [3]}', "bad_words: must be a string or a list of strings"),
    ('{"bad_words_token_ids": [[]]}', "bad_words_token_ids: each list has at least one"),
    ('{"logit_bias": [1]}', "logit_bias: must be an object of token ids"),
    ('{"logit_bias": {"1": NaN}}', "logit_bias: each must be a number from -100"),
    ('{"n": true}', "n: must be an integer"),
    ('{"n": []}', "n: must be an integer"),
    ('"' + "x" * 1_100_000 + '"', "sampling_parameters: has over"),
    ('{"stop": "\\ud800"}', "stop: must be a string or a list of strings"),
    ('{"cache_salt": "\\ud800"}', "cache_salt: must be a string of at most 256"),
    ('{"seed": ' + "9" * 10**6 + "}", "sampling_parameters: is not valid JSON: 'Exceeds the limit"),
    ('{"stop": ' + "[" * 40 + "]" * 40 + "}", "is nested deeper than 32 levels (max_json_depth)"),
    ("[" * 10**6, "sampling_parameters: is nested deeper than 32 levels (max_json_depth)"),
    ('{"": 1}', "'': is not known"),
]


@pytest.fixture(scope="module", autouse=True)
def beside(server):
    """A stream that runs beside every bad request and must not notice any of them."""
    answers, done = [], threading.Event()

    def run():
        with Client(server.running.grpc_url, timeout=60) as client:
            while not (answers and done.is_set()):
                answers.append(
                    client.generate(QUESTION.question, temperature=0, max_tokens=64).text
                )

    thread = threading.Thread(target=run)
    thread.start()
    yield
    done.set()
    thread.join()
    assert set(answers) == {"\n" + QUESTION.answer}


@pytest.fixture(autouse=True)
def nothing_left():
    """The stream beside keeps blocks in use; the module's end checks what matters."""


@pytest.mark.parametrize(("fields", "message"), BAD_FIELDS)
@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_over_http(server, verb, fields, message):
    status, body = server.post(verb, fields)
    assert status == 400, body
    assert message in body


@pytest.mark.parametrize("name", [b"temperature", b"\xff\xfe"])
def test_parameters_that_are_no_text(server, name):
    body = b'{"text_input": "x", "' + name + b'": "\xff\xfe"}'
    status, answer = server.post("generate", body)
    assert status == 400
    assert "parameters: must be valid UTF-8" in answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_note_of_the_allowed_length_comes_back(server, stream):
    note = "é" * 2048 if stream else "é" * 40_000
    verb = "generate_stream" if stream else "generate"
    fields = {"text_input": "x", "max_tokens": 2, "stream": stream, "pass_through": note}
    status, answer = server.post(verb, fields)
    assert status == 200
    assert answer.count(note) == (2 if stream else 1)


@pytest.mark.parametrize(("text", "message"), BAD_SAMPLING)
def test_sampling_parameters(server, text, message):
    status, body = server.post("generate", {"text_input": "x", "sampling_parameters": text})
    assert status == 400
    assert message in body


@pytest.mark.parametrize(
    "params", [{"max_tokens": 10**9}, {"unknown": 1}, {"top_p": 2}, {"stop": ["a"] * 99}]
)
def test_over_grpc_the_status_is_invalid_argument(client, params):
    with pytest.raises(InvalidRequest, match=next(iter(params))):
        client.generate("x", **params)


def test_nan_as_a_grpc_parameter(server):
    with pytest.raises(InferenceServerException, match="temperature: must be a number"):
        infer(server, text_input=np.array([b"x"], object), parameters={"temperature": math.nan})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"text_input": np.array([b"\xff\xfe"], object)}, "text_input: is not valid UTF-8"),
        ({"text_input": np.array([b"a", b"b"], object)}, "text_input"),
        ({"text_input": np.array([1], np.int32)}, "text_input"),
        ({"input_ids": np.array([1.0], np.float32)}, "input_ids"),
        ({"input_ids": np.array([[1, 2]], np.int32)}, "input_ids"),
        ({"input_ids": np.array([], np.int32)}, "empty"),
        ({"unknown": np.array([1], np.int32)}, "unknown"),
        (
            {
                "text_input": np.array([b"x"], object),
                "sampling_parameters": np.array([b"\xff"], object),
            },
            "sampling_parameters: is not valid UTF-8",
        ),
    ],
)
def test_wrong_tensors(server, tensors, message):
    with pytest.raises(InferenceServerException, match=message):
        infer(server, **tensors)


def infer(server, parameters=None, **tensors):
    """The first result of a stream, or its error."""
    results, arrived = [], threading.Event()

    def take(result, error):
        results.append(error or result)
        arrived.set()

    types = {"O": "BYTES", "i": "INT32", "f": "FP32"}
    with InferenceServerClient(server.running.grpc_url) as client:
        client.start_stream(take)
        inputs = []
        for name, array in tensors.items():
            inputs.append(InferInput(name, list(array.shape), types[array.dtype.kind]))
            inputs[-1].set_data_from_numpy(array)
        client.async_stream_infer("paged_llm", inputs, parameters=parameters)
        assert arrived.wait(30)
        client.stop_stream()
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]
