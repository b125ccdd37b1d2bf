"""Tool calls through the gateway, asked with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from demo_server import Server
from gateways import MODEL, Gateway, running_gateway
from pydantic import BaseModel, Field
from tool_models import LOOKUP, MESSAGES, NOW, TOOLS

pytestmark = pytest.mark.server

NAMED = {"type": "function", "function": {"name": "lookup"}}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 800}


class lookup(BaseModel):  # the name of the tool
    """Look up the documentation of a name."""

    name: str = Field(max_length=20)
    lines: int


@pytest.fixture(scope="module")
def gateway(tool_server: Server) -> Iterator[Gateway]:
    with running_gateway("--triton", tool_server.running.grpc_url) as running:
        yield running


@pytest.fixture(scope="module")
def api(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.sdk() as api:
        yield api


def chat(api: openai.OpenAI, messages: list[Any] = MESSAGES, **options: Any) -> Any:
    given = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    given = {**given, **SAMPLED, **options}
    return api.chat.completions.create(model=MODEL, messages=messages, **given)


def test_a_call_and_its_result(api: openai.OpenAI) -> None:
    choice = chat(api, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "lookup")
    assert json.loads(call.function.arguments)["lines"] in range(1, 100)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It joins paths."}
    answer = chat(api, [*MESSAGES, choice.message, result], tool_choice="none").choices[0]
    assert answer.message.tool_calls is None
    assert answer.message.content


def test_a_cut_call_and_its_result(api: openai.OpenAI, gateway: Gateway) -> None:
    """What the gateway wrote is accepted back, and the prompt has it as the model wrote it."""
    calls = []
    for limit in range(20, 60, 8):
        choice = chat(api, tool_choice=NAMED, max_tokens=limit).choices[0]
        assert choice.finish_reason == "length"
        calls += [(choice.message, call) for call in choice.message.tool_calls or ()]
    message, call = next(pair for pair in calls if pair[1].function.arguments)
    arguments = call.function.arguments
    with pytest.raises(ValueError, match="."):
        json.loads(arguments)
    result = {"role": "tool", "tool_call_id": "another", "content": "It was cut."}
    for answer in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        messages = [*MESSAGES, answer, result]
        assert chat(api, messages, tool_choice="none", max_tokens=1).usage.prompt_tokens
    body = {"messages": [*MESSAGES, message.model_dump(), result]}
    tokens = gateway.post("/tokenize", body).json["tokens"]
    prompt = gateway.post("/detokenize", {"tokens": tokens}).json["prompt"]
    assert f'{{"name": "lookup", "arguments": {arguments}}}' in prompt


@pytest.mark.parametrize("arguments", ["null", " ", "\n", "", "[1]", "{"])
def test_arguments_of_other_servers(api: openai.OpenAI, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert chat(api, messages, tool_choice="none", max_tokens=1).usage.prompt_tokens


def test_streamed_parts_are_the_call(api: openai.OpenAI) -> None:
    (whole,) = chat(api).choices[0].message.tool_calls
    chunks = [chunk.choices[0] for chunk in chat(api, stream=True)]
    assert chunks[0].delta.role == "assistant"
    parts = [part for chunk in chunks for part in chunk.delta.tool_calls or ()]
    assert (parts[0].id is not None, parts[0].type) == (True, "function")
    assert {part.index for part in parts} == {0}
    assert all(part.id is None and part.function.name is None for part in parts[1:])
    arguments = "".join(part.function.arguments for part in parts)
    assert (parts[0].function.name, arguments) == (whole.function.name, whole.function.arguments)
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


def test_the_clients_helper_parses_arguments(api: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(lookup)
    assert tool["function"]["strict"]
    completion = api.chat.completions.parse(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", **SAMPLED
    )
    for call in completion.choices[0].message.tool_calls or ():
        assert isinstance(call.function.parsed_arguments, lookup)


def test_the_clients_helper_follows_a_stream(api: openai.OpenAI) -> None:
    options = {**SAMPLED, "tool_choice": NAMED, "parallel_tool_calls": False}
    tools = [openai.pydantic_function_tool(lookup)]
    with api.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=tools, **options
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {
        "tool_calls.function.arguments.delta",
        "tool_calls.function.arguments.done",
    } <= kinds
    (call,) = final.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, lookup)


def test_several_answers_have_calls_of_their_own(api: openai.OpenAI) -> None:
    choices = chat(api, n=3).choices
    ids = [call.id for choice in choices for call in choice.message.tool_calls]
    assert len(ids) == len(set(ids)) == 3


def test_allowed_tools_and_parallel_calls(api: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "now"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    message = chat(api, tool_choice=choice).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["now"]


def test_without_a_call_the_answer_is_text(api: openai.OpenAI) -> None:
    for options in ({"tool_choice": "auto"}, {"tool_choice": "none"}, {"tools": openai.omit}):
        if "tools" in options:
            options["tool_choice"] = options["parallel_tool_calls"] = openai.omit
        choice = chat(api, temperature=0, max_tokens=40, **options | {}).choices[0]
        assert choice.message.tool_calls is None
        assert choice.message.content


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": [LOOKUP], "tool_choice": "some"}, "tool_choice"),
        ({"tools": 3}, "tools"),
        ({"tools": [{}] * 600}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content"),
        (
            {"messages": [*MESSAGES, {"role": "tool", "tool_call_id": 3, "content": ""}]},
            "messages[1].tool_call_id",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"functions": [{}]}, "functions"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ],
    ids=str,
)
def test_mistakes_name_the_field(gateway: Gateway, body: dict[str, Any], param: str) -> None:
    response = gateway.post("/v1/chat/completions", {"messages": MESSAGES, **body})
    assert (response.status, response.error["param"]) == (400, param), response.body


def test_no_effort_is_what_such_a_model_makes(api: openai.OpenAI) -> None:
    choice = chat(api, tool_choice="none", max_tokens=5, reasoning_effort="none").choices[0]
    assert choice.message.content
