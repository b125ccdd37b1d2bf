"""The Responses API, asked with OpenAI's own client."""

from __future__ import annotations

import json
from typing import Literal

import openai
import pytest
from gateways import MODEL
from pydantic import BaseModel

pytestmark = pytest.mark.server

QUESTION = "What does len do?"
LOOKUP = {
    "type": "function",
    "name": "lookup",
    "description": "Return the documentation of a function.",
    "parameters": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "depth": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["name", "depth"],
        "additionalProperties": False,
    },
    "strict": True,
}
# What agents send beside functions; the server has none of these.
OTHER_TOOLS = [
    {"type": "web_search"},
    {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    {"type": "namespace", "name": "mcp", "tools": []},
]
SEED = {"seed": 5}
THINK = {"reasoning": {"effort": "high"}, "extra_body": {"thinking_token_budget": 8}}


class Function(BaseModel):
    module: Literal["os", "math"]
    is_builtin: bool


def create(api, **options):
    options = {
        "model": MODEL,
        "input": QUESTION,
        "temperature": 0,
        "max_output_tokens": 60,
    } | options
    return api.responses.create(**options)


def called(response):
    (call,) = [item for item in response.output if item.type == "function_call"]
    return call


def test_a_text_is_the_text_of_a_chat(tools_api):
    response = create(tools_api)
    chat = tools_api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_completion_tokens=60,
    )
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.error, response.store) == ("completed", None, False)
    assert response.id.startswith("resp_") and response.output[0].id.startswith("msg_")
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens


def test_instructions_and_developers_are_the_system(tools_api):
    developer = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    responses = [
        create(tools_api, input=developer),
        create(tools_api, input="Hi", instructions="Be brief."),
        create(tools_api, input=[{"type": "message", **message} for message in chat]),
    ]
    assert len({response.output_text for response in responses}) == 1
    expected = tools_api.chat.completions.create(
        model=MODEL, messages=chat, temperature=0, max_tokens=60
    )
    assert responses[0].output_text == expected.choices[0].message.content
    assert responses[1].instructions == "Be brief."


def test_a_stream_ends_with_the_response_that_its_events_spell(tools_api):
    events = list(create(tools_api, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    kinds = [event.type for event in events if event not in deltas]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in deltas)
    assert text == events[-1].response.output_text == create(tools_api).output_text
    assert len(deltas) > 3
    by_kind = {event.type: event for event in events}
    assert by_kind["response.created"].response.output == []
    assert by_kind["response.output_text.done"].text == text
    assert by_kind["response.output_item.done"].item == events[-1].response.output[0]
    assert events[-1].response.usage.output_tokens > 3


def test_the_client_puts_a_stream_together(tools_api):
    with tools_api.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        snapshots = [e.snapshot for e in stream if e.type == "response.output_text.delta"]
        response = stream.get_final_response()
    assert snapshots[-1] == response.output_text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "lookup"}])
def test_a_required_call_is_a_call_of_the_function(tools_api, choice):
    tools = [*OTHER_TOOLS, LOOKUP]
    response = create(tools_api, tools=tools, tool_choice=choice, parallel_tool_calls=False)
    call = called(response)
    assert (call.name, call.status, response.status) == ("lookup", "completed", "completed")
    arguments = json.loads(call.arguments)
    assert set(arguments) == {"name", "depth"} and isinstance(arguments["depth"], int)
    assert [tool.type for tool in response.tools] == ["function"]


def test_a_streamed_call_is_the_whole_call(tools_api):
    options = {"tools": [LOOKUP], "tool_choice": "required", "parallel_tool_calls": False}
    whole = called(create(tools_api, **options))
    events = list(create(tools_api, stream=True, **options))
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    (done,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    streamed = called(events[-1].response)
    assert len(deltas) > 1
    assert "".join(event.delta for event in deltas) == done.arguments == streamed.arguments
    assert (streamed.arguments, streamed.name) == (whole.arguments, whole.name)
    assert {event.item_id for event in deltas} == {streamed.id}


def test_the_client_puts_a_streamed_call_together(tools_api):
    options = {"tools": [LOOKUP], "tool_choice": "required", "parallel_tool_calls": False}
    with tools_api.responses.stream(
        model=MODEL, input=QUESTION, temperature=0, **options
    ) as stream:
        response = stream.get_final_response()
    assert set(called(response).parsed_arguments) == {"name", "depth"}


def test_the_result_of_a_call_is_in_the_next_prompt(tools_api):
    tools = {"tools": [LOOKUP], "tool_choice": "required", "parallel_tool_calls": False}
    first = create(tools_api, **tools)
    call = called(first)
    history = [
        {"role": "user", "content": QUESTION},
        *(item.to_dict() for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "Return the length."},
    ]
    second = create(tools_api, input=history, tools=[LOOKUP], tool_choice="none")
    chat = [
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
            ],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "Return the length."},
    ]
    expected = tools_api.chat.completions.create(
        model=MODEL, messages=chat, temperature=0, max_tokens=60
    )
    assert second.output_text == expected.choices[0].message.content
    assert second.usage.input_tokens == expected.usage.prompt_tokens


def test_a_result_needs_no_call(tools_api):
    output = {"type": "function_call_output", "call_id": "none", "output": "x"}
    assert create(tools_api, input=[{"role": "user", "content": "x"}, output]).output_text


@pytest.mark.parametrize("limit", [12, 20, 28, 36])
def test_a_cut_call_is_accepted_back(tools_api, limit):
    """The items of an answer may be anything that the gateway wrote before it was cut."""
    options = {"tools": [LOOKUP], "tool_choice": "required", "max_output_tokens": limit}
    response = create(tools_api, **options, **THINK)
    assert response.status == "incomplete"
    items = [item.model_dump(exclude_none=True) for item in response.output]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "cut off"}
        for item in response.output
        if item.type == "function_call"
    ]
    question = {"role": "user", "content": QUESTION}
    history = [question, *items, *results, question]
    assert create(tools_api, input=history, max_output_tokens=1).usage.output_tokens == 1


def test_reasoning_is_an_item_before_the_text(tools_api):
    response = create(tools_api, **THINK)
    reasoning, message = response.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert reasoning.content[0].text and message.content[0].text
    assert response.reasoning.effort == "high"


def test_streamed_reasoning_is_the_whole_reasoning(tools_api):
    whole = create(tools_api, **THINK)
    events = list(create(tools_api, stream=True, **THINK))
    deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
    (done,) = [e for e in events if e.type == "response.reasoning_text.done"]
    assert "".join(deltas) == done.text == whole.output[0].content[0].text
    assert events[-1].response.output_text == whole.output_text
    added = [e.item.type for e in events if e.type == "response.output_item.added"]
    assert added == ["reasoning", "message"]


def test_reasoning_can_be_sent_back(tools_api):
    first = create(tools_api, **THINK)
    items = [item.to_dict() for item in first.output]
    history = [{"role": "user", "content": QUESTION}, *items, {"role": "user", "content": "More?"}]
    assert create(tools_api, input=history).status == "completed"


def test_a_text_is_of_the_client_s_class(tools_api):
    response = tools_api.responses.parse(
        model=MODEL, input="Name a function.", text_format=Function, extra_body=SEED
    )
    assert isinstance(response.output_parsed, Function)
    assert response.text.format.type == "json_schema"


def test_a_streamed_text_is_of_the_client_s_class(tools_api):
    with tools_api.responses.stream(
        model=MODEL, input="Name a function.", text_format=Function, extra_body=SEED
    ) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Function)


def test_a_text_can_be_any_json_object(tools_api):
    json_object = {"format": {"type": "json_object"}}
    response = create(tools_api, text=json_object, max_output_tokens=20)
    assert response.output_text.startswith("{")


def test_a_cut_response_is_incomplete(tools_api):
    response = create(tools_api, max_output_tokens=3)
    assert response.status == response.output[0].status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage.output_tokens == 3
    *_, item, last = create(tools_api, max_output_tokens=3, stream=True)
    assert (item.type, item.item.status) == ("response.output_item.done", "incomplete")
    assert (last.type, last.response.status) == ("response.incomplete", "incomplete")
    assert last.response.output_text == response.output_text


def test_metadata_comes_back_and_nothing_is_stored(tools_api):
    response = create(tools_api, metadata={"job": "7"}, store=True, user="u", include=[])
    assert (response.metadata, response.store) == ({"job": "7"}, False)
    with pytest.raises(openai.NotFoundError):
        tools_api.responses.retrieve(response.id)


def test_a_beam_search_returns_its_best_answer(tools_api):
    beams = {"extra_body": {"beam_width": 3, "length_penalty": 0.5, "early_stopping": True}}
    chat = tools_api.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=24, **beams
    )
    wanted = chat.choices[0].message.content
    assert create(tools_api, max_output_tokens=24, **beams).output_text == wanted
    events = create(tools_api, max_output_tokens=24, **beams, stream=True)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == wanted
    tools = {"tools": [LOOKUP], "tool_choice": "required"}
    for options, param in (({"temperature": 0.5}, "temperature"), (tools, "beam_width")):
        with pytest.raises(openai.BadRequestError) as caught:
            create(tools_api, **beams, **options)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"extra_body": {"max_tokens": 5}}, "max_tokens"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"tools": [LOOKUP, LOOKUP], "tool_choice": "required"}, "tools[1].name"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}},
            "text.format.schema",
        ),
    ],
)
def test_errors_name_the_field(tools_api, options, param):
    with pytest.raises(openai.BadRequestError) as caught:
        create(tools_api, **options)
    assert caught.value.param == param
