"""Prompts become token ids, and token ids become the answers that the prompts would have had."""

from __future__ import annotations

import json
import os
import random
import threading
import time
import uuid
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from gateways import Gateway, running_gateway
from tool_models import NOW, TOOLS

pytestmark = pytest.mark.server

NUM_CHAINS = int(os.environ.get("CHAINS", "10"))  # 500 for a longer search
NUM_AT_ONCE = 8
NAMED = {"type": "function", "function": {"name": "lookup"}}
QUESTIONS = ["What does len do?", "What does os.path.join do?", "Hello!", "Look up sorted. " * 9]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}},
    "required": ["name"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "module", "schema": SCHEMA}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def events(body: bytes) -> list[dict[str, Any]]:
    """The objects of a stream, which must have ended."""
    lines = [line for line in body.decode().split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def merged(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The whole choices that a stream of chats consists of."""
    choices: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"content": "", "reasoning": "", "calls": [], "logprobs": [], "finish_reason": None}
    )
    for chunk in chunks:
        for part in chunk["choices"]:
            choice, delta = choices[part["index"]], part["delta"]
            assert choice["finish_reason"] is None
            choice["content"] += delta.get("content") or ""
            choice["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(choice["calls"]):
                    choice["calls"].append([call["function"]["name"], ""])
                choice["calls"][-1][1] += call["function"]["arguments"]
            choice["logprobs"] += (part["logprobs"] or {"content": []})["content"]
            choice["finish_reason"] = part["finish_reason"]
    return [choice for _, choice in sorted(choices.items())]


def whole(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The same of an answer that is no stream."""
    return [
        {
            "content": choice["message"]["content"] or "",
            "reasoning": choice["message"].get("reasoning") or "",
            "calls": [
                [call["function"]["name"], call["function"]["arguments"]]
                for call in choice["message"].get("tool_calls", ())
            ],
            "logprobs": (choice["logprobs"] or {"content": []})["content"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in sorted(response["choices"], key=lambda choice: choice["index"])
    ]


def answer_of(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[Any, Any]:
    """The choices of an answer to a chat, and its usage."""
    response = gateway.post(path, body)
    assert response.status == 200, response.body
    if not body.get("stream"):
        return whole(response.json), response.json["usage"]
    *chunks, last = events(response.body)
    assert last["choices"] == []
    return merged(chunks), last["usage"]


def random_chat(draw: random.Random) -> dict[str, Any]:
    """A chat with random options."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": draw.choice(QUESTIONS)}],
        "temperature": draw.choice([0, 1.0]),
        "seed": draw.randrange(1000),
        "max_tokens": draw.choice([1, 20, 60, 120]),
        "n": draw.choice([1, 1, 2]),
    }
    if draw.random() < 0.5:
        body |= {"logprobs": True, "top_logprobs": draw.choice([0, 1, 3])}
    if draw.random() < 0.3:
        body["stop"] = draw.choice(["e", [" the", "."]])
    if draw.random() < 0.4:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    constraint = draw.choice(["none", "tools", "tools", "schema"])
    if constraint == "tools":
        body |= {"tools": TOOLS, "tool_choice": draw.choice(["auto", "none", "required", NAMED])}
        body["parallel_tool_calls"] = draw.random() < 0.5
        if body["tool_choice"] in ("required", NAMED):
            body |= {"max_tokens": draw.choice([60, 200]), "temperature": 1.0}
    elif constraint == "schema":
        body["response_format"] = FORMAT
    return body


def test_the_chain_equals_direct_chats(tools_gateway: Gateway) -> None:
    """In text, reasoning, tools, finish reasons, logprobs and usage, streamed and not."""
    draw = random.Random(6)
    bodies = [random_chat(draw) | (STREAM if i % 2 else {}) for i in range(NUM_CHAINS)]
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        answers = list(pool.map(partial(answer_of_both, tools_gateway), bodies))
    seen: defaultdict[str, int] = defaultdict(int)
    for choice in (choice for choices in answers for choice in choices):
        seen["calls"] += bool(choice["calls"])
        seen["reasoning"] += bool(choice["reasoning"])
        seen["logprobs"] += bool(choice["logprobs"])
        seen[choice["finish_reason"]] += 1
    assert min(seen[name] for name in ("calls", "reasoning", "logprobs", "stop", "length")) > 0
    print(f"{NUM_CHAINS} chains equal direct chats: {dict(seen)}")


def answer_of_both(gateway: Gateway, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choices of a chat, which are those of its chain."""
    # Neither chat finds the blocks of the other.
    direct = answer_of(gateway, "/v1/chat/completions", body | {"cache_salt": "direct"})
    render = gateway.post("/v1/chat/completions/render", body | {"cache_salt": uuid.uuid4().hex})
    assert render.status == 200, render.body
    rendered = render.json | {"output_mode": "derender"}
    chained = answer_of(gateway, "/inference/v1/generate", rendered)
    for usage in (direct[1], chained[1]):
        usage.pop("prompt_tokens_details")  # how much of the prompt was cached
    assert chained == direct, body
    tokens_of_chain(gateway, rendered, direct[1]["completion_tokens"])
    return list(direct[0])


def tokens_of_chain(gateway: Gateway, rendered: dict[str, Any], num_tokens: int) -> None:
    """The same request returns as many token ids, streamed or not, and the same both times."""
    bodies = [rendered | {"output_mode": "tokens", "stream": stream} for stream in (False, True)]
    answers = [gateway.post("/inference/v1/generate", body) for body in bodies]
    first = {choice["index"]: choice["token_ids"] for choice in answers[0].json["choices"]}
    second: defaultdict[int, list[int]] = defaultdict(list)
    for chunk in events(answers[1].body):
        assert chunk["request_id"] == rendered["request_id"]
        for choice in chunk["choices"]:
            second[choice["index"]] += choice["token_ids"]
    assert first == second
    assert sum(map(len, first.values())) == num_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_texts_and_of_their_tokens(gateway: Gateway, stream: bool) -> None:
    body = {
        "prompt": ["def add(a, b):", "The sum of"],
        "max_tokens": 12,
        "logprobs": 2,
        "temperature": 0,
    }
    direct = gateway.post("/v1/completions", body).json
    rendered = gateway.post("/v1/completions/render", body).json
    assert len(rendered) == 2
    for one, choice in zip(rendered, direct["choices"], strict=True):
        response = gateway.post(
            "/inference/v1/generate", one | {"output_mode": "text", "stream": stream}
        )
        if stream:
            parts = [part for event in events(response.body) for part in event["choices"]]
        else:
            parts = response.json["choices"]
            assert response.json["usage"]["completion_tokens"] == 12
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"] == "length"
        assert sum(len(part["token_ids"]) for part in parts) == 12
        entries = [entry for part in parts for entry in part["logprobs"]["content"]]
        assert [entry["token"] for entry in entries] == choice["logprobs"]["tokens"]
        assert [entry["logprob"] for entry in entries] == choice["logprobs"]["token_logprobs"]


def test_log_probabilities_have_token_ids(gateway: Gateway) -> None:
    body = {
        "token_ids": [5, 6, 7],
        "sampling_params": {"max_tokens": 3, "logprobs": 2, "temperature": 0, "ignore_eos": True},
        "return_token_ids": True,
    }
    response = gateway.post("/inference/v1/generate", body | {"request_id": "mine"}).json
    assert (response["request_id"], response["output_mode"]) == ("mine", "tokens")
    assert response["prompt_token_ids"] == [5, 6, 7]
    (choice,) = response["choices"]
    assert "text" not in choice and choice["stop_reason"] is None
    entries = choice["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == choice["token_ids"]
    assert all(entry["top_logprobs"][0]["rank"] == 1 for entry in entries)
    first, *others = events(gateway.post("/inference/v1/generate", body | {"stream": True}).body)
    assert first["prompt_token_ids"] == [5, 6, 7]
    assert not any("prompt_token_ids" in event for event in others)


def test_a_stop_string_and_the_end_of_the_context(gateway: Gateway) -> None:
    """Without a limit, an answer may fill the context, as in chats."""
    sampling = {"temperature": 0, "ignore_eos": True, "stop": ["e"]}
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling, "output_mode": "derender"}
    (choice,) = gateway.post("/inference/v1/generate", body).json["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "e")
    assert choice["message"]["role"] == "assistant"


def open_request(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Send a request in a thread; returns the thread, and where its response will be."""
    result: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: result.update(response=gateway.post(path, body)))
    thread.start()
    return thread, result


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_aborted_by_its_id(gateway: Gateway, server: Any, stream: bool) -> None:
    sampling = {"max_tokens": 1800, "ignore_eos": True, "min_tokens": 1800}
    body = {"token_ids": [5, 6], "sampling_params": sampling, "request_id": "r1", "stream": stream}
    thread, result = open_request(gateway, "/inference/v1/generate", body)
    server.wait_for("num_requests_running", 1)
    assert gateway.post("/inference/v1/abort_requests", {"request_ids": ["other"]}).status == 200
    time.sleep(0.1)
    assert thread.is_alive()
    assert gateway.post("/inference/v1/abort_requests", {"request_ids": "r1"}).status == 200
    thread.join(30)
    response = result["response"]
    assert response.status == 200
    parts = events(response.body) if stream else [response.json]
    assert parts[-1]["choices"][0]["finish_reason"] == "abort"
    tokens = [token for part in parts for token in part["choices"][0]["token_ids"]]
    assert 0 < len(tokens) < 1800
    server.wait_for("kv_blocks_used", 0)


def test_a_tenant_cannot_abort_requests_of_another(server: Any) -> None:
    keys = "one one-key,two two-key"
    with running_gateway("--triton", server.running.grpc_url, keys=keys) as gateway:
        one, two = ({"Authorization": f"Bearer {name}-key"} for name in ("one", "two"))
        sampling = {"max_tokens": 600, "ignore_eos": True}
        body = {"token_ids": [5, 6], "sampling_params": sampling, "request_id": "r1"}
        result: list[Any] = []
        thread = threading.Thread(
            target=lambda: result.append(gateway.post("/inference/v1/generate", body, **one))
        )
        thread.start()
        server.wait_for("num_requests_running", 1)
        gateway.post("/inference/v1/abort_requests", {"request_ids": ["r1"]}, **two)
        thread.join(60)
        assert result[0].json["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_not_cached_is_given_back(gateway: Gateway, stream: bool) -> None:
    """At all routes that generate; the answer says how much was cached."""
    prompt = "What does the function do? " * 9
    salt = uuid.uuid4().hex
    chat = {"messages": [{"role": "user", "content": prompt}], "cache_salt": salt, "max_tokens": 2}
    asked = chat | {"cache_hit_threshold": 0.5} | (STREAM if stream else {})
    rendered = gateway.post("/v1/chat/completions/render", asked).json
    assert rendered["cache_hit_threshold"] == 0.5
    derendered = rendered | {"output_mode": "derender"}
    for is_cached in (False, True):
        for path, body in (
            ("/v1/chat/completions", asked),
            ("/inference/v1/generate", derendered),
        ):
            (choice,), usage = answer_of(gateway, path, body)
            assert choice["finish_reason"] == ("length" if is_cached else "cache_threshold")
            assert bool(choice["content"]) == is_cached
            assert usage["completion_tokens"] == (2 if is_cached else 0)
            num_cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert (num_cached > usage["prompt_tokens"] / 2) == is_cached
        gateway.post("/v1/chat/completions", chat)


def test_a_threshold_is_a_fraction(gateway: Gateway) -> None:
    body = {"prompt": "hello", "cache_hit_threshold": 1.5}
    response = gateway.post("/v1/completions", body)
    assert (response.status, response.error["param"]) == (400, "cache_hit_threshold")


@pytest.mark.parametrize(
    ("path", "body", "param", "problem"),
    [
        ("/inference/v1/generate", {}, "token_ids", "is missing"),
        ("/inference/v1/generate", {"token_ids": []}, "token_ids", "is empty"),
        ("/inference/v1/generate", {"token_ids": [-1]}, "token_ids", "must be a list of at most"),
        ("/inference/v1/generate", {"token_ids": [10**6]}, "token_ids", "must be from 0 to 2047"),
        ("/inference/v1/generate", {"token_ids": [1] * 9000}, "token_ids", "has 9000 "),
        ("/inference/v1/generate", {"token_ids": [1], "features": {"a": 1}}, "features", "is not"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"temperature": -1}},
            "sampling_params.temperature",
            "must be greater",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"temp": 1}},
            "sampling_params.temp",
            "is not known",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "output_mode": "speech"},
            "output_mode",
            "must be 'tokens', 'text' or 'derender'",
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "parse_context": {"tools": [NOW], "tool_choice": "sometimes"}},
            "tool_choice",
            "must be",
        ),
        (
            "/v1/chat/completions/render",
            {"messages": [{"role": "user", "content": "hi"}], "continue_final_message": True},
            "continue_final_message",
            "must be false",
        ),
        ("/v1/completions/render", {"prompt": "a", "echo": True}, "echo", "must be false"),
        ("/inference/v1/abort_requests", {}, "request_ids", "is missing"),
        ("/inference/v1/abort_requests", {"request_ids": ["a"] * 1025}, "request_ids", "at most"),
    ],
)
def test_a_wrong_body_is_refused(
    tools_gateway: Gateway, path: str, body: dict[str, Any], param: str, problem: str
) -> None:
    response = tools_gateway.post(path, body)
    assert response.status == 400
    assert response.error["param"] == param
    assert problem in response.error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions/render", "/inference/v1/generate"])
def test_a_body_that_is_too_large_is_refused(gateway: Gateway, path: str) -> None:
    assert gateway.post(path, b"[" + b"1," * 2**20).status == 413
