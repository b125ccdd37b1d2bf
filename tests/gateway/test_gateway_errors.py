"""What clients do wrong, and what they are told."""

from __future__ import annotations

import openai
import pytest
from gateways import MODEL, running_gateway
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from paged_client import InvalidRequest, RequestTimeout, ServerError, Unavailable, UnknownModel
from paged_client.gateway.errors import ApiError
from paged_client.gateway.schema.chat_completions import ChatRequest
from paged_client.gateway.schema.completions import CompletionRequest

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
DEEP_OBJECT = b'{"a": ' * 400 + b"1" + b"}" * 400
TEXT = {"model": MODEL, "prompt": "hi", "max_tokens": 1}


def chat(**fields):
    return "/v1/chat/completions", CHAT | fields


def text(**fields):
    return "/v1/completions", TEXT | fields


def message(**fields):
    return chat(messages=[CHAT["messages"][0], {"role": "user", "content": "x"} | fields])


@pytest.mark.server
@pytest.mark.parametrize(
    "request_",
    [
        chat(messages=[{"role": "user", "content": "x " * 9000}]),
        text(prompt="x " * 9000),
        text(prompt="x" * 10**6),
    ],
)
def test_a_prompt_that_is_too_long_has_openai_s_code(gateway, request_):
    response = gateway.post(*request_)
    assert (response.status, response.error["code"]) == (400, "context_length_exceeded")
    assert "This model's maximum context length is 2048 tokens." in response.error["message"]


@pytest.mark.server
@pytest.mark.parametrize(
    ("request_", "param", "problem"),
    [
        (text(temperature=-1), "temperature", "must be greater than or equal to 0"),
        (text(temperature=2.1), "temperature", "must be less than or equal to 2"),
        (text(temperature="1"), "temperature", "must be a valid number"),
        (text(temperature=True), "temperature", "must be a valid number"),
        (text(n=0), "n", "must be greater than or equal to 1"),
        (text(n=65), "n", "must be less than or equal to 64"),
        (text(n=64, prompt=["x"] * 5), "n", "at most 256 answers to all prompts together"),
        (text(max_tokens=0), "max_tokens", "must be at least 1, except for echo: true"),
        (text(max_tokens=5000), "max_tokens", "must be at most max_model_len (2048), got 5000"),
        (text(logprobs=21), "logprobs", "must be less than or equal to 20"),
        (text(seed=2**64), "seed", "must be less than 18446744073709551616"),
        (text(stop=["x"] * 17), "stop", "at most 16 strings (max_stop_strings), got 17"),
        (text(stop=["x"] * 257), "stop", "must have at most 256 items"),
        (text(stop=["ok", ""]), "stop[1]", "must have at least 1 character"),
        (text(stop_token_ids=[99999]), "stop_token_ids", "must be below 2048, got 99999"),
        (text(logit_bias={"5": 101}), "logit_bias.5", "must be less than or equal to 100"),
        (text(logit_bias={"a": 1}), "logit_bias.a", "must match pattern"),
        (text(best_of=2), "best_of", "is not supported yet, except for the value of n"),
        (text(suffix="."), "suffix", "is not supported yet"),
        (
            text(prediction={"type": "content", "content": "x"}),
            "prediction",
            "the engine does not speculate (speculative_config)",
        ),
        (chat(prediction={"type": "x"}), "prediction.type", "must be"),
        (text(beam_width=17), "beam_width", "less than or equal to 16"),
        (text(guided_json={"not": {}}), "guided_json", "not"),
        (text(prompt=[]), "prompt", "must be a text, token ids, or a list of either"),
        (text(prompt=["x", [1]]), "prompt", "must be a text, token ids, or a list of either"),
        (text(prompt=[1, True]), "prompt", "must be a text, token ids, or a list of either"),
        (text(prompt=[1, -1]), "prompt", "must be a text, token ids, or a list of either"),
        (text(prompt=["x"] * 257), "prompt", "at most 256 prompts, got 257"),
        (text(prompt=[99999]), "prompt", "99999"),
        (text(prompt="x" * 10**6), "prompt", "characters, more than can become 2047 tokens"),
        (text(prompt=None), "prompt", "is missing"),
        (text(stream_options={"x": 1}), "stream_options.x", "is not known"),
        (text(documents=[{"text": "x"}]), "documents", "is not supported yet"),
        (text(stream=True, prompt_logprobs=1), "prompt_logprobs", "is only for stream: false"),
        (text(temprature=1), "temprature", "is not known, did you mean temperature?"),
        (text(messages=[]), "messages", "is not known"),
        (text(timeout_s=0), "timeout_s", "must be greater than 0"),
        (text(timeout_s="2"), "timeout_s", "must be a valid number"),
        (text(tenant="x" * 257), "tenant", "must have at most 256 characters"),
        (text(cache_salt="x" * 257), "cache_salt", "must have at most 256 characters"),
        (chat(messages=[]), "messages", "must have at least 1 item"),
        (chat(top_logprobs=1), "top_logprobs", "is only for logprobs: true"),
        (chat(tools=[{"type": "function"}]), "tools[0].function", "must be an object"),
        (chat(tool_choice="auto"), "tool_choice", "needs tools"),
        (chat(functions=[{"name": "f"}]), "functions", "is not supported yet"),
        (chat(response_format={"type": "yaml"}), "response_format.type", "must be one of text, "),
        (chat(modalities=["audio"]), "modalities", "is not supported yet"),
        (chat(chat_template_kwargs={"messages": 1}), "chat_template_kwargs", "must not hold"),
        (chat(stream=True, stream_options={"x": 1}), "stream_options.x", "is not known"),
        (chat(stream=True, stream_options={"": 1}), 'stream_options.""', "is not known"),
        (chat(**{"": 1}), '""', "is not known"),
        (chat(**{"x" * 999: 1}), "x" * 61 + "...", "is not known"),
        (message(content=5), "messages[1].content", "must be a valid string"),
        (message(content=None), "messages[1].content", "is missing"),
        (message(role=None), "messages[1].role", "is missing"),
        (message(tool_calls=[1]), "messages[1].tool_calls[0]", "must be a valid dictionary"),
        (
            message(content=[{"type": "image_url", "image_url": {"url": "data:"}}]),
            "messages[1].content[0].image_url",
            "is not supported yet",
        ),
    ],
)
def test_a_field_that_cannot_be_used_is_named(gateway, request_, param, problem):
    response = gateway.post(*request_)
    assert (response.status, response.error["type"]) == (400, "invalid_request_error")
    assert response.error["param"] == param
    assert response.error["message"].startswith(f"{param}: ")
    assert problem in response.error["message"]


@pytest.mark.server
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"{bad", "not valid JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "temperature: must be a finite number"),
        (b'{"prompt": ' + b"[" * 40 + b"]" * 40 + b"}", "nested more than 32 levels deep"),
        (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", "nested more than 32 levels deep"),
        (b'{"chat_template_kwargs": ' + DEEP_OBJECT + b"}", "nested more than 32 levels deep"),
        (b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", "at most 16384 lists and objects"),
        (b'{"prompt": ' + b"[" * 10**5, "at most 16384 lists and objects"),
        (b'{"prompt": ' + b"[" * 10**4, "nested more than 32 levels deep"),
        (b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", "not valid JSON: number out of range"),
    ],
)
def test_a_body_that_is_no_request_is_refused(gateway, body, problem):
    response = gateway.post("/v1/completions", body)
    assert response.status == 400
    assert problem in response.error["message"]


Values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@pytest.mark.server
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_body_is_a_fault_of_the_gateway(gateway, data):
    path, base, model = data.draw(
        st.sampled_from([(*chat(), ChatRequest), (*text(), CompletionRequest)])
    )
    names = st.sampled_from([*model.model_fields, *model.not_supported])
    fields = data.draw(st.dictionaries(names, Values, min_size=1, max_size=3))
    # What would only take long.
    fields = {name: 1 if name == "n" or "max_" in name else v for name, v in fields.items()}
    fields.pop("timeout_s", None)  # which may end a good request
    assert gateway.post(path, base | fields).status in (200, 400, 404)


@pytest.mark.server
@pytest.mark.parametrize(
    ("options", "kind", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"temperature": 101}, openai.BadRequestError, None),
        ({"stream": True, "temperature": 101}, openai.BadRequestError, None),
        ({"stream": True, "max_tokens": 5000}, openai.BadRequestError, None),
    ],
)
def test_the_sdk_raises_the_right_exception(api, options, kind, code):
    with pytest.raises(kind) as caught:
        api.chat.completions.create(**CHAT | options)
    assert caught.value.code == code


@pytest.mark.server
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/completions", 405),
        ("GET", "/nothing", 404),
        ("GET", "/v1/models/nobody", 404),
        ("GET", "/v1/models/", 404),
    ],
)
def test_errors_of_routes_have_the_same_form(gateway, method, path, status):
    response = gateway.request(method, path, None, {})
    assert response.status == status
    assert response.error["message"]


@pytest.mark.server
def test_one_bad_prompt_fails_its_own_request_only(gateway, api, client):
    with client.stream("What does", max_tokens=300, ignore_eos=True) as beside:
        response = gateway.post(*text(prompt=["fine", [99999]], max_tokens=300))
        assert (response.status, response.error["param"]) == (400, "prompt")
        assert sum(chunk.num_output_tokens for chunk in beside) == 300


@pytest.mark.server
def test_a_request_that_takes_too_long_is_a_504_and_cancelled(server):
    with running_gateway("--triton", server.running.grpc_url, "--request-timeout", "1") as gateway:
        body = {"prompt": "What does", "max_tokens": 1900, "ignore_eos": True}
        response = gateway.post("/v1/completions", body)
        assert (response.status, response.headers["retry-after"]) == (504, "1")
        assert response.error["type"] == "timeout_error"
        server.wait_for("kv_blocks_used", 0)
        with gateway.sdk() as api, pytest.raises(openai.APIError, match="deadline: "):
            for _ in api.completions.create(model=MODEL, stream=True, **_for_sdk(body)):
                pass  # the time is over in mid-stream
        events = gateway.post("/v1/completions", body | {"stream": True}).body.split(b"\n\n")
        assert b'"error":{' in events[-3] and events[-2:] == [b"data: [DONE]", b""]


def _for_sdk(body):
    extra = {"ignore_eos": body["ignore_eos"]}
    return {name: value for name, value in body.items() if name not in extra} | {
        "extra_body": extra
    }


@pytest.mark.parametrize(
    ("error", "status", "code", "wait"),
    [
        (InvalidRequest("n: is wrong"), 400, None, None),
        (UnknownModel("Request for unknown model: 'x' is not found"), 404, "model_not_found", None),
        (Unavailable("queue_full: 9 requests wait; retry after 7 s"), 503, "queue_full", "7"),
        (Unavailable("rate_limited: tenant 'x'; retry after 1.5 s"), 429, "rate_limited", "2"),
        (Unavailable("draining: the model is being unloaded"), 503, "draining", "1"),
        (Unavailable("engine_dead: its process has ended"), 503, "engine_dead", "1"),
        (Unavailable("failed to connect to 10.0.0.7"), 503, "unavailable", "1"),
        (RequestTimeout("deadline: timeout_s (2) is over"), 504, "deadline", "1"),
        (RequestTimeout("Deadline Exceeded"), 504, "deadline", "1"),
        (ServerError("internal error (KeyError)"), 500, None, None),
        (ServerError("crash_limit: in flight at 3 ends"), 500, "crash_limit", None),
    ],
)
def test_what_a_servers_error_means_over_http(error, status, code, wait):
    translated = ApiError.from_client(error)
    assert (translated.status, translated.body["error"]["code"]) == (status, code)
    assert translated.headers.get("Retry-After") == wait
    assert "10.0.0.7" not in str(translated)


@pytest.mark.parametrize(
    ("params", "model"),
    [
        (chat_create_params.CompletionCreateParamsStreaming, ChatRequest),
        (completion_create_params.CompletionCreateParamsStreaming, CompletionRequest),
    ],
)
def test_every_field_of_the_sdk_is_known_by_name(params, model):
    known = {*model.model_fields, *model.ignored, *model.not_supported}
    assert params.__required_keys__ | params.__optional_keys__ <= known
