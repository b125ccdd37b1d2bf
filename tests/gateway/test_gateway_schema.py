"""The gateway's fields have the ranges that the engine checks."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

import pytest
from paged_client.gateway.errors import ApiError
from paged_client.gateway.messages_api.schema import MessagesRequest
from paged_client.gateway.responses_api.schema import ResponsesRequest
from paged_client.gateway.schema.chat_completions import ChatRequest
from paged_client.gateway.schema.chat_messages import MAX_DOCUMENTS
from paged_client.gateway.schema.completions import CompletionRequest
from paged_client.gateway.schema.generation import GenerateRequest, SamplingFields
from pydantic import ValidationError

from paged_backend.values.request import RequestOptions
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.validation import Rule

LOGITS = {"return_context_logits", "return_generation_logits"}  # in tensors only, not in JSON
RULES: dict[str, Rule] = {
    spec.name: spec.metadata["rule"]
    for cls in (SamplingParams, RequestOptions)
    for spec in fields(cls)
    if "rule" in spec.metadata and spec.name not in LOGITS
}
# The gateway maps a negative seed to the seed with the same 64 bits, its highest temperature is
# that of OpenAI's API, an echo may have no tokens, `logprobs` of a chat is a flag, an empty salt is
# the same as none, and the engine drops a `thinking_token_budget` of -1 before it checks the range.
DIFFERENT = {
    ("thinking_token_budget", "low"),
    ("seed", "low"),
    ("temperature", "high"),
    ("max_tokens", "low", CompletionRequest),
    ("logprobs", "high", ChatRequest),
    ("logprobs", "low", ChatRequest),
}


def bounds(model: type[GenerateRequest], name: str) -> dict[str, Any]:
    """The limits of a field, under the names of `Rule`."""
    found: dict[str, Any] = {}
    for item in model.model_fields[name].metadata:
        for ours, theirs in (("low", "ge"), ("high", "le"), ("above", "gt"), ("max_length",) * 2):
            if getattr(item, theirs, None) is not None:
                found[ours] = getattr(item, theirs)
        if getattr(item, "lt", None) is not None:
            found["high"] = item.lt - 1
    return found


def test_every_field_of_the_engine_is_known_to_the_gateway() -> None:
    missing = set(RULES) - set(CompletionRequest.model_fields)
    assert missing == set()


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize("name", sorted(RULES))
def test_ranges_are_equal(model: type[GenerateRequest], name: str) -> None:
    ours, theirs = RULES[name], bounds(model, name)
    for limit in ("low", "high", "above", "max_length"):
        if not {(name, limit), (name, limit, model)} & DIFFERENT:
            assert theirs.get(limit) == getattr(ours, limit), limit


@pytest.mark.parametrize(
    ("seed", "expected"), [(-1, None), (None, None), (0, 0), (-2, 2**64 - 2), (2**64 - 1,) * 2]
)
def test_minus_one_is_no_seed(seed: int | None, expected: int | None) -> None:
    assert CompletionRequest(prompt="x", seed=seed).engine_fields().get("seed") == expected
    if seed is None or seed >= -1:
        assert SamplingParams(seed=seed).seed == expected
        assert SamplingParams.from_mapping({"seed": seed}).seed == expected


SAMPLING = [
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "n", "min_tokens"),
]
BODIES: list[tuple[type[SamplingFields], dict[str, Any]]] = [
    (ChatRequest, {"messages": [{"role": "user", "content": "x"}]}),
    (CompletionRequest, {"prompt": "x"}),
    (ResponsesRequest, {"input": "x"}),
    (MessagesRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
]


@pytest.mark.parametrize(
    ("model", "body"), BODIES, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_a_client_leaves_out_is_left_to_the_model(
    model: type[SamplingFields], body: dict[str, Any]
) -> None:
    """The model may have its own defaults, so an explicit neutral value must be sent."""
    known = [name for name in SAMPLING if name in model.model_fields]
    for values in (body, body | dict.fromkeys(known)):
        sent = model.model_validate(values).engine_fields()
        assert not sent.keys() & set(SAMPLING)
        limit = {CompletionRequest: 16, MessagesRequest: 5}.get(model)  # those of the protocols
        assert sent["max_tokens"] == limit
    neutral = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert neutral.items() <= model.model_validate(body | neutral).engine_fields().items()


@pytest.mark.parametrize(("budget", "expected"), [(-1, None), (0, 0), (7, 7)])
def test_minus_one_is_no_limit_on_the_reasoning(budget: int, expected: int | None) -> None:
    fields = CompletionRequest(prompt="x", thinking_token_budget=budget).engine_fields()
    found = RequestOptions.take_from(fields)
    assert found.thinking_token_budget == expected
    with pytest.raises(ValidationError, match="thinking_token_budget"):
        CompletionRequest(prompt="x", thinking_token_budget=-2)


NEUTRAL: dict[str, Any] = {
    "documents": [],
    "session_id": "s",
    "mm_payload": {},
    "kv_transfer_params": {},
    "stream_options": {"include_usage": True, "include_obfuscation": False},
}


def test_fields_without_effect_are_taken_and_others_refused_by_name() -> None:
    messages = [{"role": "user", "content": "x"}]
    plain = ChatRequest.model_validate({"messages": messages})
    neutral = ChatRequest.model_validate({"messages": messages, **NEUTRAL})
    nulls = ChatRequest.model_validate({"messages": messages, **dict.fromkeys(NEUTRAL)})
    for body in (neutral, nulls):
        assert body.engine_fields() | {"prompt": body.routed()} == (
            plain.engine_fields() | {"prompt": plain.routed()}
        )
    for name, value in (
        ("mm_payload", {"x": 1}),
        ("kv_transfer_params", {"x": 1}),
        ("stream_options", {"include_obfuscation": True}),
    ):
        with pytest.raises(ValidationError, match="is not supported yet"):
            ChatRequest.model_validate({"messages": messages, name: value})


def test_constraints_are_encoded_once_for_all_prompts() -> None:
    schema = {"properties": {f"name{i}": {"type": "string"} for i in range(3)}}
    fields_: dict[str, Any] = {
        "structured_outputs": {"json": schema},
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "guided_json": schema,
        "guided_decoding": {"json": schema},
    }
    for name, value in fields_.items():
        body = CompletionRequest.model_validate({"prompt": ["a", "b"], name: value})
        first, second = body.engine_fields()[name], body.engine_fields()[name]
        assert first is second and json.loads(first) == value
        assert SamplingParams(**{name: first}) == SamplingParams(**{name: value})
    with pytest.raises(ApiError, match="guided_json"):
        CompletionRequest.model_validate({"prompt": "a", "guided_json": {"const": math.inf}})


def test_documents_of_a_chat_reach_its_template() -> None:
    documents = [{"title": "a", "text": "b"}]
    body = {"messages": [{"role": "user", "content": "x"}], "documents": documents}
    assert ChatRequest.model_validate(body).routed()["documents"] == documents
    assert "documents" not in ChatRequest.model_validate(body | {"documents": []}).routed()
    with pytest.raises(ValidationError, match="documents"):
        ChatRequest.model_validate(body | {"documents": documents * (MAX_DOCUMENTS + 1)})
