"""The Messages API, asked with Anthropic's own client."""

from __future__ import annotations

import json

import pytest
from gateways import MODEL

pytestmark = pytest.mark.server

QUESTION = [{"role": "user", "content": "What does len do?"}]
LOOKUP = {
    "name": "lookup",
    "description": "Return the documentation of a function.",
    "input_schema": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "depth": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["name", "depth"],
        "additionalProperties": False,
    },
}
SERVER_TOOL = {"type": "web_search_20250305", "name": "web_search", "max_uses": 2}
CALL = {"tools": [LOOKUP], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
THINK = {"thinking": {"type": "enabled", "budget_tokens": 8}}


def create(claude, **options):
    sampling = {"temperature": 0, **options.pop("extra_body", {})}
    options = {"model": MODEL, "messages": QUESTION, "max_tokens": 60} | options
    return claude.messages.create(**options, extra_body=sampling)


def refused(claude, **options):
    from anthropic import BadRequestError  # which takes a second, in the process that uses it

    with pytest.raises(BadRequestError) as caught:
        create(claude, **options)
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    return body["error"]["message"]


def chat(api, messages, **options):
    return api.chat.completions.create(
        model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 60, **options}
    )


def test_a_text_is_the_text_of_a_chat(claude, tools_api):
    message = create(claude)
    expected = chat(tools_api, QUESTION)
    (block,) = message.content
    assert (block.type, block.text) == ("text", expected.choices[0].message.content)
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", MODEL)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens
    assert usage.output_tokens == expected.usage.completion_tokens


def test_the_system_is_text_or_blocks(claude, tools_api):
    blocks = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=00000;"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ]
    expected = chat(tools_api, [{"role": "system", "content": "Be brief."}, *QUESTION])
    for system in ("Be brief.", blocks):
        message = create(claude, system=system)
        assert message.content[0].text == expected.choices[0].message.content


def test_cached_tokens_are_counted_apart(claude):
    text = "A prompt of the Messages API that only this test has. " * 8
    messages = [{"role": "user", "content": text}]
    first, second = (create(claude, messages=messages, max_tokens=1).usage for _ in range(2))
    assert second.cache_read_input_tokens > 16 > first.cache_read_input_tokens
    assert (
        first.input_tokens + first.cache_read_input_tokens
        == second.input_tokens + second.cache_read_input_tokens
    )


def test_the_events_of_a_stream(claude):
    events = list(create(claude, stream=True))
    kinds = [event.type for event in events if event.type != "content_block_delta"]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    text = "".join(e.delta.text for e in events if e.type == "content_block_delta")
    whole = create(claude)
    assert text == whole.content[0].text
    delta = events[-2]
    assert delta.delta.stop_reason == "end_turn"
    assert delta.usage.output_tokens == whole.usage.output_tokens
    assert events[0].message.usage.output_tokens == 0
    assert events[0].message.id.startswith("msg_")


def test_the_client_puts_a_stream_together(claude):
    with claude.messages.stream(model=MODEL, messages=QUESTION, max_tokens=60) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert "".join(texts) == message.content[0].text and len(texts) > 1


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "lookup"}])
def test_a_required_call_is_a_call_of_the_tool(claude, choice):
    choice = {**choice, "disable_parallel_tool_use": True}
    message = create(claude, tools=[SERVER_TOOL, LOOKUP], tool_choice=choice)
    block = message.content[0]
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "lookup", "tool_use")
    assert set(block.input) == {"name", "depth"}


def test_without_a_choice_the_model_may_answer(claude):
    tools = [LOOKUP]
    for choice in ({"type": "auto"}, {"type": "none"}):
        message = create(claude, tools=tools, tool_choice=choice)
        assert message.stop_reason in ("end_turn", "max_tokens")


def test_a_streamed_call_is_the_whole_call(claude):
    whole = create(claude, **CALL).content[0]
    with claude.messages.stream(
        model=MODEL, messages=QUESTION, max_tokens=60, extra_body={"temperature": 0}, **CALL
    ) as stream:
        deltas = [e.partial_json for e in stream if e.type == "input_json"]
        message = stream.get_final_message()
    (block,) = message.content
    assert (block.name, block.input) == (whole.name, whole.input)
    assert len(deltas) > 1 and message.stop_reason == "tool_use"


def test_the_result_of_a_call_is_in_the_next_prompt(claude, tools_api):
    first = create(claude, **CALL)
    (use,) = first.content
    result = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "text", "text": "Return the length."}],
        "cache_control": {"type": "ephemeral"},
    }
    content = [result, {"type": "text", "text": "In short?"}]
    messages = [*QUESTION, first.to_param(), {"role": "user", "content": content}]
    second = create(claude, messages=messages, tools=[LOOKUP], tool_choice={"type": "none"})
    function = {"name": use.name, "arguments": first.content[0].model_dump_json(include={"input"})}
    function["arguments"] = function["arguments"].removeprefix('{"input":').removesuffix("}")
    expected = chat(
        tools_api,
        [
            *QUESTION,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": use.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": use.id, "content": "Return the length."},
            {"role": "user", "content": "In short?"},
        ],
    )
    assert second.content[0].text == expected.choices[0].message.content
    usage = second.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == expected.usage.prompt_tokens


def test_thinking_is_a_block_before_the_text(claude):
    message = create(claude, **THINK)
    thinking, text = message.content
    assert (thinking.type, text.type) == ("thinking", "text")
    assert thinking.thinking and thinking.signature == "" and text.text


def test_streamed_thinking_is_the_whole_thinking(claude):
    whole = create(claude, **THINK)
    events = list(create(claude, stream=True, **THINK))
    deltas = [e.delta for e in events if e.type == "content_block_delta"]
    thinking = "".join(d.thinking for d in deltas if d.type == "thinking_delta")
    text = "".join(d.text for d in deltas if d.type == "text_delta")
    assert (thinking, text) == (whole.content[0].thinking, whole.content[1].text)
    starts = [e.content_block.type for e in events if e.type == "content_block_start"]
    assert starts == ["thinking", "text"]


def test_thinking_can_be_sent_back_and_be_disabled(claude):
    first = create(claude, **THINK)
    redacted = {"type": "redacted_thinking", "data": "x"}
    said = {"role": "assistant", "content": [redacted, *first.to_param()["content"]]}
    messages = [*QUESTION, said, {"role": "user", "content": "More?"}]
    second = create(claude, messages=messages, thinking={"type": "disabled"})
    assert [block.type for block in second.content] == ["text"]


def test_an_answer_can_be_begun(claude):
    whole = create(claude).content[0].text
    begun = {"role": "assistant", "content": whole[:10]}
    rest = create(claude, messages=[*QUESTION, begun]).content[0].text
    assert not rest.startswith(whole[:10])
    assert rest.split()[-1] == whole.split()[-1]


def test_max_tokens_cut_an_answer(claude):
    message = create(claude, max_tokens=3)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_named(claude, stream):
    text = create(claude).content[0].text
    stop = text[4:12]
    options = {"messages": QUESTION, "stop_sequences": ["never", stop], "max_tokens": 60}
    if stream:
        with claude.messages.stream(
            model=MODEL, extra_body={"temperature": 0}, **options
        ) as events:
            message = events.get_final_message()
    else:
        message = create(claude, **options)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_without_a_stop_sequence_none_is_named(claude):
    message = create(claude, stop_sequences=["never"])
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


def test_an_answer_of_a_schema(claude):
    schema = LOOKUP["input_schema"]
    config = {"format": {"type": "json_schema", "schema": schema}, "effort": "high"}
    message = create(claude, output_config=config, max_tokens=1000)
    assert set(json.loads(message.content[0].text)) == {"name", "depth"}


def test_tokens_are_those_of_the_prompt_with_its_tools(claude):
    prompt = {"model": MODEL, "messages": QUESTION, "system": "Be brief."}
    with_tools = {**prompt, "tools": [SERVER_TOOL, LOOKUP]}
    counts = []
    for body in (prompt, with_tools):
        usage = claude.messages.create(**body, max_tokens=1).usage
        count = claude.messages.count_tokens(**body).input_tokens
        assert count == usage.input_tokens + usage.cache_read_input_tokens
        counts.append(count)
    assert counts[1] > counts[0] + 20
    none = claude.messages.count_tokens(**with_tools, tool_choice={"type": "none"})
    assert none.input_tokens == counts[0]


def test_what_agents_send_beside_that_is_accepted(claude):
    message = create(
        claude,
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "adaptive"},
        extra_body={"context_management": {"edits": []}, "top_k": 5, "top_p": 0.9},
        extra_headers={"anthropic-beta": "context-management-2025-06-27"},
    )
    assert message.content


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


def test_a_beam_search_returns_its_best_answer(claude, tools_api):
    beams = {"extra_body": {"beam_width": 3, "length_penalty": 0.5, "early_stopping": True}}
    wanted = chat(tools_api, QUESTION, max_tokens=24, **beams).choices[0].message.content
    (block,) = create(claude, max_tokens=24, **beams).content
    assert block.text == wanted
    events = create(claude, max_tokens=24, **beams, stream=True)
    deltas = [event.delta.text for event in events if event.type == "content_block_delta"]
    assert "".join(deltas) == wanted
    assert refused(claude, **beams, **CALL).startswith("beam_width")
    assert refused(claude, **beams, stop_sequences=["x"]).startswith("stop_sequences")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "x y", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [LOOKUP], "tool_choice": {"type": "tool", "name": "y"}}, "tool_choice"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, "mcp_servers"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ],
)
def test_errors_name_the_field(claude, options, field):
    assert refused(claude, **options).startswith(field)


def test_a_result_needs_no_call(claude):
    result = {"type": "tool_result", "tool_use_id": "none", "content": "x"}
    assert create(claude, messages=[{"role": "user", "content": [result]}]).content


@pytest.mark.parametrize("limit", [12, 20, 28, 36])
def test_a_cut_call_is_accepted_back(claude, limit):
    """The blocks of an answer may be anything that the gateway wrote before it was cut."""
    message = create(claude, **CALL, **THINK, max_tokens=limit)
    assert message.stop_reason == "max_tokens"
    with claude.messages.stream(
        model=MODEL,
        messages=QUESTION,
        max_tokens=limit,
        extra_body={"temperature": 0},
        **CALL,
        **THINK,
    ) as stream:
        streamed = stream.get_final_message()
    contents = [
        [block.model_dump(exclude_none=True) for block in found.content]
        for found in (message, streamed)
    ]
    assert contents[0] == contents[1]  # the client completes what was cut, as the gateway does
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "cut off"}
        for block in contents[0]
        if block["type"] == "tool_use"
    ]
    turns = [{"role": "assistant", "content": contents[0]}]
    turns.append({"role": "user", "content": [*results, {"type": "text", "text": "x"}]})
    assert create(claude, messages=[*QUESTION, *turns], max_tokens=1).usage.output_tokens == 1


def test_other_errors_have_the_format_too(claude, tools_gateway):
    from anthropic import NotFoundError

    with pytest.raises(NotFoundError) as caught:
        create(claude, model="none")
    assert caught.value.body["error"]["type"] == "not_found_error"
    response = tools_gateway.post("/v1/messages", b"{")
    assert (response.status, response.json["type"]) == (400, "error")


def test_the_operator_decides_how_many_stop_strings_there_are(tools_gateway):
    """On each of the APIs that have them; the model's server takes 40, more than by default."""
    for path, name, more in (
        ("/v1/messages", "stop_sequences", {"messages": QUESTION}),
        ("/v1/chat/completions", "stop", {"messages": QUESTION}),
        ("/v1/completions", "stop", {"prompt": "x"}),
    ):
        body = {"max_tokens": 1, **more}
        stops = [f"never {number}" for number in range(41)]
        assert tools_gateway.post(path, body | {name: stops[:40]}).status == 200
        refused = tools_gateway.post(path, body | {name: stops})
        assert refused.status == 400
        assert f"{name}: at most 40 strings" in refused.error["message"]
