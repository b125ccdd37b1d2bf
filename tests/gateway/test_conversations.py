"""Requests of the Responses and Messages APIs as the engine gets them; no server is needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from paged_client.gateway.bodies import read_body
from paged_client.gateway.errors import ApiError
from paged_client.gateway.messages_api.schema import CountTokensRequest, MessagesRequest
from paged_client.gateway.responses_api.schema import ResponsesRequest
from paged_client.gateway.schema.chat_completions import ChatRequest

RECORDED = json.loads((Path(__file__).parent / "recorded_requests.json").read_text())
BODIES = {
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
}
SCHEMA = {"type": "object", "properties": {}}
CALL = {"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}


def response(**fields: Any) -> ResponsesRequest:
    return read_body(json.dumps({"input": "x", **fields}).encode(), ResponsesRequest)


def message(**fields: Any) -> MessagesRequest:
    user = {"role": "user", "content": "x"}
    body = {"max_tokens": 5, "messages": [user], **fields}
    return read_body(json.dumps(body).encode(), MessagesRequest)


def chat(**fields: Any) -> ChatRequest:
    return read_body(json.dumps(fields).encode(), ChatRequest)


def messages_of(body: ResponsesRequest | MessagesRequest) -> list[dict[str, Any]]:
    prompt = body.routed()
    assert isinstance(prompt, dict)
    return prompt["messages"]


@pytest.mark.parametrize("request_", RECORDED, ids=lambda request: request["name"])
def test_recorded_requests_are_read(request_):
    body = read_body(json.dumps(request_["body"]).encode(), BODIES[request_["path"]])
    assert body.routed()["messages"] == request_["messages"]
    options = body.tool_options if request_["path"] != "/v1/responses" else body.engine_fields()
    names = [tool["function"]["name"] for tool in options.get("tools", [])]
    assert names == request_["tools"]


def test_what_the_assistant_did_between_two_turns_is_one_message():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": "{}"},
        {"type": "ghost_snapshot", "ghost_commit": {}},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
    ]
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "s"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "c1", "name": "lookup", "input": {}},
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "found", "is_error": True}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    expected = [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "I look.",
            "tool_calls": [CALL],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "found"},
    ]
    assert messages_of(response(input=items)) == messages_of(message(messages=turns)) == expected


CUT = '{"name": "os.pa'


@pytest.mark.parametrize("arguments", [CUT, "null", " ", "", "[1]", "日"])
def test_arguments_of_a_cut_call_stay_as_they_are(arguments):
    call = {"type": "function_call", "call_id": "c1", "name": "lookup", "arguments": arguments}
    use = {"type": "tool_use", "id": "c1", "name": "lookup", "input": arguments}
    turns = [{"role": "assistant", "content": [use]}]
    for messages in (messages_of(response(input=[call])), messages_of(message(messages=turns))):
        assert messages[0]["tool_calls"][0]["function"]["arguments"] == arguments


def test_results_need_no_call():
    """A history may be shortened, or its ids changed by what stands between client and gateway."""
    result = {"role": "tool", "tool_call_id": "c1", "content": "x"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "x"}
    assert messages_of(response(input=[output])) == [result]
    turn = {"role": "user", "content": [RESULT]}
    assert messages_of(message(messages=[turn])) == [result]
    nothing = {"type": "function_call_output", "call_id": "c1", "output": None}
    assert messages_of(response(input=[nothing])) == [result | {"content": ""}]


def test_answers_without_text_are_read():
    user = {"role": "user", "content": "x"}
    for content in (None, []):
        answer = {"role": "assistant", "content": content}
        merged = [{"role": "user", "content": "x\n\nx"}]
        assert messages_of(message(messages=[user, answer, user])) == merged
        expected = merged if content is None else [user, answer | {"content": ""}, user]
        assert messages_of(response(input=[user, answer, user])) == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "reasoning", "reasoning": "hm", "extras": {}},  # LangChain's
        {"type": "reasoning", "text": "hm", "summary": []},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "text", "text": "hm"}]},
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},  # Mistral's
    ],
    ids=str,
)
def test_reasoning_is_read_in_the_form_of_each_library(fields):
    turns = [{"role": "assistant", "content": [fields, {"type": "text", "text": "x"}]}]
    expected = {"role": "assistant", "reasoning_content": "hm", "content": "x"}
    assert messages_of(message(messages=turns)) == [expected]
    (part, _) = chat(messages=turns).routed()["messages"][0]["content"]
    name = "thinking" if fields["type"] == "thinking" else "text"
    assert part == {"type": fields["type"], name: "hm"}
    if fields["type"] == "reasoning":
        answer = {"role": "assistant", "content": "x"}
        assert messages_of(response(input=[fields, answer])) == [expected]


def test_reasoning_without_a_text_is_left_out_and_other_values_are_named():
    encrypted = {"type": "reasoning", "summary": [], "encrypted_content": "abc"}
    text = {"type": "text", "text": "x"}
    turns = [{"role": "assistant", "content": [encrypted, text]}]
    assert chat(messages=turns).routed()["messages"][0]["content"] == [text]
    assert messages_of(response(input=[encrypted, {"role": "user", "content": "x"}])) == [
        {"role": "user", "content": "x"}
    ]
    wrong = {"type": "reasoning", "summary": [3]}
    turns = [{"role": "assistant", "content": [wrong]}]
    for read, field in (
        (lambda: chat(messages=turns), "messages[0].content[0].summary"),
        (lambda: message(messages=turns), "messages[0].content[0].summary"),
        (lambda: response(input=[wrong]), "input[0].summary"),
    ):
        with pytest.raises(ApiError) as caught:
            read()
        assert caught.value.body["error"]["param"] == field


def test_a_refusal_is_text():
    part = {"type": "refusal", "refusal": "no"}
    answer = {"type": "message", "role": "assistant", "content": [part], "status": "completed"}
    assert messages_of(response(input=[answer])) == [{"role": "assistant", "content": "no"}]


CALLED = {"name": "f", "arguments": "{}"}
CHATS = [
    ({"content": None, "refusal": "no"}, {"content": "no"}),
    ({"content": None, "reasoning": "hm"}, {"content": None, "reasoning_content": "hm"}),
    ({"content": "", "tool_calls": [], "function_call": None, "audio": None}, {"content": ""}),
    ({"content": "x", "refusal": None, "annotations": [], "name": "n"}, {"name": "n"}),
    (
        {"content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"content": [{"type": "output_text", "text": "x"}]},
    ),
    (
        {"content": [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "x"}]},
        {"content": [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "x"}]},
    ),
    (
        {"content": ["a", {"type": "text", "text": None}, {"type": "text", "text": "b", "id": 3}]},
        {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ),
    (
        {"content": [{"type": "reasoning", "text": "hm"}, {"type": "reasoning_text", "text": "m"}]},
        {"content": [{"type": "reasoning", "text": "hm"}, {"type": "reasoning_text", "text": "m"}]},
    ),
    (
        {"content": "x", "parsed": {"a": 1}, "id": "1", "created": 3, "finish_reason": "stop"},
        {"role": "assistant", "content": "x"},
    ),
    (
        {"content": "x", "images": None, "thinking": "hm", "tool_plan": "p", "cache_control": {}},
        {"role": "assistant", "content": "x"},
    ),
    (
        {"tool_calls": [{"function": CALLED | {"parsed_arguments": {}}, "extra_content": {}}]},
        {"tool_calls": [{"type": "function", "function": CALLED}]},
    ),
    (
        {"role": "tool", "content": "x", "is_error": False, "status": "completed"},
        {"role": "tool", "content": "x"},
    ),
    (
        {"tool_calls": [{"function": {"name": "f", "arguments": CUT}}]},
        {"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": CUT}}]},
    ),
    (
        {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}]},
        {
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
            ]
        },
    ),
]


@pytest.mark.parametrize(("answer", "expected"), CHATS, ids=str)
def test_what_an_assistant_said_is_read(answer, expected):
    body = {"messages": [{"role": "assistant", **answer}]}
    (read,) = read_body(json.dumps(body).encode(), ChatRequest).routed()["messages"]
    assert {name: read[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("message_", "param"),
    [
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": [{"type": "refusal"}]}, "messages[0].content[0].refusal"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "x", "text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "contnt": "x"}, "messages[0].content"),
        ({"role": "user", "content": "x", "images": ["aQ=="]}, "messages[0].images"),
        ({"role": "assistant", "function_call": {}}, "messages[0].function_call"),
        ({"role": "user", "content": [3]}, "messages[0].content[0]"),
    ],
)
def test_errors_of_a_chat_name_the_field(message_, param):
    with pytest.raises(ApiError) as caught:
        read_body(json.dumps({"messages": [message_]}).encode(), ChatRequest)
    assert caught.value.body["error"]["param"] == param


def test_texts_around_results_stay_in_order():
    use = {"type": "tool_use", "id": "c1", "name": "lookup", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": ""}
    content = [{"type": "text", "text": "a"}, result, {"type": "text", "text": "b"}]
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": content}]
    roles = [(m["role"], m["content"]) for m in messages_of(message(messages=turns))]
    assert roles == [("assistant", ""), ("user", "a"), ("tool", ""), ("user", "b")]


def test_instructions_are_one_message_at_the_beginning_and_else_of_the_user():
    items = [
        {"role": "developer", "content": "B"},
        {"role": "user", "content": "x"},
        {"role": "developer", "content": "C"},
    ]
    roles = [
        (m["role"], m["content"]) for m in messages_of(response(instructions="A", input=items))
    ]
    assert roles == [("system", "A\n\nB"), ("user", "x\n\nC")]


def test_an_answer_that_the_client_has_begun_goes_on():
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "It"}]
    prompt = message(messages=turns).routed()
    assert (prompt["continue_final_message"], prompt["add_generation_prompt"]) == (True, False)
    use = {"type": "tool_use", "id": "c1", "name": "lookup", "input": {}}
    turns[1]["content"] = [use]
    assert "continue_final_message" not in message(messages=turns).routed()


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
            },
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                },
            },
        ),
    ],
)
def test_choices_of_a_response(choice, expected):
    tool = {"type": "function", "name": "f", "parameters": SCHEMA, "strict": None}
    sampling = response(tools=[tool, {"type": "shell"}], tool_choice=choice).engine_fields()
    assert sampling["tool_choice"] == expected
    function = {"name": "f", "parameters": SCHEMA}
    assert sampling["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            {
                "tool_choice": {"type": "function", "function": {"name": "f"}},
                "parallel_tool_calls": False,
            },
        ),
    ],
)
def test_choices_of_a_message(choice, expected):
    tool = {"name": "f", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}}
    options = message(tools=[tool, {"type": "bash_20250124", "name": "bash"}], tool_choice=choice)
    function = {"name": "f", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    assert options.tool_options == {"tools": tools, **expected}


def test_tools_of_which_none_is_a_function_are_no_tools():
    search = {"type": "web_search", "name": "web_search"}
    assert message(tools=[search], tool_choice={"type": "auto"}).tool_options == {}
    assert response(tools=[search], tool_choice="auto").engine_fields().keys() == {"max_tokens"}


def test_sampling_of_a_message():
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    body = message(
        stop_sequences=["\n"],
        thinking=thinking,
        top_k=3,
        temperature=0.5,
        metadata={"user_id": "u"},
    )
    assert body.engine_fields() == {
        "max_tokens": 5,
        "stop": ["\n"],
        "thinking_token_budget": 1024,
        "top_k": 3,
        "temperature": 0.5,
    }
    on = {"enable_thinking": True, "thinking": True}
    assert body.routed()["chat_template_kwargs"] == on
    assert "chat_template_kwargs" not in message(thinking={"type": "adaptive"}).routed()


def test_formats_of_a_response():
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    assert response(text={"format": form, "verbosity": "low"}).engine_fields()[
        "response_format"
    ] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
    }
    assert "response_format" not in response(text={"format": {"type": "text"}}).engine_fields()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": 3}]},
            "input[0].arguments",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"instructon": "x"}, "instructon"),
    ],
)
def test_errors_of_a_response_name_the_field(fields, param):
    with pytest.raises(ApiError) as caught:
        response(**fields).engine_fields()
    assert caught.value.body["error"]["param"] == param


RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"stop": ["x"]}, "stop"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [RESULT]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"tools": [{"name": "f", "input_schema": "x"}]}, "tools[0].input_schema"),
    ],
)
def test_errors_of_a_message_name_the_field(fields, param):
    with pytest.raises(ApiError) as caught:
        message(**fields).engine_fields()
    assert caught.value.body["error"]["param"] == param


def test_a_prediction_is_passed_on_as_one_text() -> None:
    messages = [{"role": "user", "content": "Edit it."}]
    parts = [{"type": "text", "text": "a, "}, {"type": "text", "text": "b"}]
    for content in ("a, b", parts):
        read = chat(messages=messages, prediction={"type": "content", "content": content})
        assert read.engine_fields()["prediction"] == "a, b"
    assert "prediction" not in chat(messages=messages, prediction=None).engine_fields()
    with pytest.raises(ApiError, match="prediction"):
        chat(messages=messages, prediction={"type": "content", "content": 5})
