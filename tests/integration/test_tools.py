"""Tool calls over Triton's own protocols, also through the death of engines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from demo_server import MODEL, Server
from paged_client import Answer, Client, Completion, CompletionBuilder, InvalidRequest
from tool_models import LOOKUP, MESSAGES, NOW, TOOLS
from valid_json import validate

pytestmark = pytest.mark.server

SAMPLED = {"temperature": 1.0, "seed": 4, "max_tokens": 1500}
NAMED = {"type": "function", "function": {"name": "lookup"}}
# Text that only arguments of a given length can have, so that a call takes many steps.
LONG = {
    "type": "function",
    "function": {
        "name": "write",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "minLength": 300, "maxLength": 300}},
            "required": ["text"],
            "additionalProperties": False,
        },
    },
}

CALL = {"tools": [LONG], "tool_choice": "required", "parallel_tool_calls": False}
DOCUMENT = {"structured_outputs": {"json": LONG["function"]["parameters"]}}


@pytest.fixture
def tools(tool_server: Server) -> Iterator[Client]:
    with Client(tool_server.running.grpc_url, MODEL, timeout=120) as client:
        yield client


def call(client: Client, choice: object = "required", **options: Any) -> Completion:
    arguments = {"tools": TOOLS, "tool_choice": choice, **SAMPLED, **options}
    return client.generate(MESSAGES, **arguments)


def check(completion: Completion) -> None:
    for answer in completion.answers:
        assert answer.finish_reason == "tool_calls"
        assert answer.text == ""
        for made in answer.tool_calls:
            schemas = {tool["function"]["name"]: tool["function"] for tool in TOOLS}
            schema = schemas[made.name].get("parameters", {"type": "object"})
            validate(json.loads(made.arguments), schema)


def test_required_calls_are_valid(tools: Client) -> None:
    completion = call(tools, n=4, parallel_tool_calls=False)
    check(completion)
    ids = [made.id for answer in completion.answers for made in answer.tool_calls]
    assert len(ids) == len(set(ids)) == 4


@pytest.mark.parametrize(
    "choice",
    [
        NAMED,
        {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [NAMED]},
        },
    ],
    ids=["named", "allowed"],
)
def test_a_choice_leaves_the_other_tools_out(tools: Client, choice: object) -> None:
    completion = call(tools, choice, n=4, parallel_tool_calls=False)
    check(completion)
    calls = [[made.name for made in answer.tool_calls] for answer in completion.answers]
    assert calls == [["lookup"]] * 4


def test_without_a_choice_the_model_decides(tools: Client) -> None:
    """The demo's weights know nothing of tools."""
    for choice in (None, "auto", "none"):
        answer = call(tools, choice, temperature=0, max_tokens=40).answers[0]
        assert answer.tool_calls == ()
        assert answer.text


def test_a_stream_has_the_parts_of_the_calls(tools: Client) -> None:
    """A part is sent when it is generated, unless parts before it wait on a busy machine."""
    whole = call(tools).answers[0]
    arguments = {"tools": TOOLS, "tool_choice": "required", **SAMPLED}
    parts = 0
    for _ in range(5):
        builder = CompletionBuilder()
        with tools.stream(MESSAGES, **arguments) as stream:
            chunks = list(stream)
        for chunk in chunks:
            builder.add(chunk)
        streamed = builder.build().answers[0]
        assert [(made.name, made.arguments) for made in streamed.tool_calls] == [
            (made.name, made.arguments) for made in whole.tool_calls
        ]
        assert chunks[-1].finish_reason == "tool_calls"
        parts = sum(bool(chunk.tool_calls) for chunk in chunks)
        if parts > 3:
            break
    assert parts > 3


@pytest.mark.parametrize("n", [1, 2])
def test_a_call_that_is_cut_leaves_no_fragment(tools: Client, n: int) -> None:
    """Neither by max_tokens nor by a stop string, in one response or in a stream."""
    options: dict[str, Any] = {**CALL, **SAMPLED, "n": n}
    whole = tools.generate(MESSAGES, **options)
    complete = [answer.tool_calls[0].arguments for answer in whole.answers]
    num_partial = 0
    for cut, reason in [
        *(({"max_tokens": limit}, "length") for limit in (1, 4, 7, 10, 13, 16, 30, 60)),
        *(({"stop": [word]}, "stop") for word in ("{", "name", '"arguments', ': "')),
    ]:
        builder = CompletionBuilder()
        for part in tools.stream(MESSAGES, **options | cut):
            builder.add(part)
        for completion in (tools.generate(MESSAGES, **options | cut), builder.build()):
            for answer, arguments in zip(completion.answers, complete, strict=True):
                assert (answer.text, answer.finish_reason) == ("", reason)
                assert len(answer.tool_calls) <= 1
                for made in answer.tool_calls:
                    assert made.name == "write"
                    assert arguments.startswith(made.arguments)
                    num_partial += 1
    assert num_partial


def test_over_http_with_fields_of_json(tool_server: Server) -> None:
    fields = {
        "messages": json.dumps(MESSAGES),
        "tools": json.dumps([LOOKUP]),
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "return_tool_calls": True,
        "return_finish_reason": True,
        "exclude_input_in_output": True,
        **SAMPLED,
    }
    status, body = tool_server.post("generate", fields)
    assert status == 200
    answer = json.loads(body)
    (made,) = json.loads(answer["tool_calls"])
    validate(json.loads(made["function"]["arguments"]), LOOKUP["function"]["parameters"])
    assert (answer["text_output"], answer["finish_reason"]) == ("", "tool_calls")


@pytest.mark.parametrize("model", ["llm", "llm_bls"])
def test_in_pipelines(tool_server: Server, tools: Client, model: str) -> None:
    expected = call(tools).answers[0]
    with Client(tool_server.running.grpc_url, model, timeout=60) as pipeline:
        made = call(pipeline).answers[0]
        text = pipeline.generate(MESSAGES, parsed=True, temperature=0, max_tokens=30).text
        unparsed = pipeline.generate(MESSAGES, temperature=0, max_tokens=30).text
    assert [part.arguments for part in made.tool_calls] == [
        part.arguments for part in expected.tool_calls
    ]
    assert (made.text, made.finish_reason) == ("", "tool_calls")
    assert text == unparsed != ""


def test_results_of_tools_are_part_of_the_prompt(tools: Client) -> None:
    history = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "It joins paths."},
    ]
    prompt = tools.detokenize(tools.tokenize(history))
    assert '{"name": "now", "arguments": {}}' in prompt
    assert "<|tool|>It joins paths." in prompt
    assert tools.generate(history, tools=TOOLS, max_tokens=3).num_input_tokens > len(prompt) / 8


def test_calls_and_constrained_text_exclude_each_other(tools: Client) -> None:
    """What is no call follows the schema."""
    answer = call(tools, "auto", structured_outputs={"regex": "[0-9]{7}"}).answers[0]
    assert bool(answer.tool_calls) != answer.text.isdecimal()


def kill_engine(server: Server) -> None:
    """Kill the engine, or the next one as soon as there is one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in psutil.process_iter(["cmdline"]):
            if f"--server {server.running.pid}-" in " ".join(process.info["cmdline"] or []):
                process.kill()
                return
        time.sleep(0.01)
    raise AssertionError("no engine is there to be killed")


@pytest.mark.parametrize("num_kills", [1, pytest.param(10, marks=pytest.mark.soak)])
@pytest.mark.parametrize("constraint", [CALL, DOCUMENT], ids=["call", "document"])
def test_engines_that_die_in_mid_answer_change_nothing(
    tool_server: Server, tools: Client, constraint: dict[str, Any], num_kills: int
) -> None:
    arguments = {**constraint, **SAMPLED}
    expected = long_text(tools.generate(MESSAGES, parsed=True, **arguments).answers[0])
    for _ in range(num_kills):
        with tools.stream(MESSAGES, parsed=True, n=4, **arguments) as stream:
            builder = CompletionBuilder()
            for number, chunk in enumerate(stream):
                builder.add(chunk)
                if number == 80:  # each of the four has begun its text
                    kill_engine(tool_server)
        texts = [long_text(answer) for answer in builder.build().answers]
        assert texts[0] == expected
        assert len(set(texts)) == 4


def long_text(answer: Answer) -> str:
    """The text of a complete call or document of the schema of `LONG`."""
    assert answer.finish_reason in ("stop", "tool_calls")
    written = answer.tool_calls[0].arguments if answer.tool_calls else answer.text
    document = json.loads(written)
    validate(document, LONG["function"]["parameters"])
    return str(document["text"])


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "not a list": ({"tools": {"a": 1}}, "tools: must be a list"),
    "no object": ({"tools": [3]}, r"tools\[0\]: must be an object"),
    "no function": ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type: must be function"),
    "no name": (
        {"tools": [{"type": "function", "function": {}}]},
        r"tools\[0\].function.name: must have 1 to 128",
    ),
    "twice": ({"tools": [NOW, NOW]}, r"tools\[1\].function.name: now is there twice"),
    "too many": ({"tools": [NOW] * 600}, "tools: at most 512"),
    "parameters": ({"tools": [function(parameters=3)]}, r"tools\[0\].function.parameters: must be"),
    "no object's": (
        {"tools": [function(parameters={"type": "array"})]},
        r"tools\[0\].function.parameters.type: must be object",
    ),
    "strict": (
        {"tools": [NOW, function(parameters={"not": {}}, strict=True)]},
        r"tools\[1\].function.parameters: .*not",
    ),
    "endless": (
        {"tools": [function(parameters={"$ref": "#"}, strict=True)]},
        r"tools\[0\].function.parameters",
    ),
    "items": (
        {
            "tools": [
                function(
                    parameters={"properties": {"a": {"type": "array", "minItems": 2**63}}},
                    strict=True,
                )
            ]
        },
        r"tools\[0\].function.parameters: .*minItems",
    ),
    "long": (
        {"tools": [function(parameters={"description": "x" * 140_000})]},
        "tools: the parameters have over",
    ),
    "choice": ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice: must be one of none, auto"),
    "kind": ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice: must be none"),
    "unknown": (
        {"tools": [NOW], "tool_choice": NAMED},
        "tool_choice.function.name: names no tool of the request: 'lookup'",
    ),
    "without tools": ({"tool_choice": "required"}, "tool_choice: needs tools"),
    "min_tokens": ({"tools": TOOLS, "min_tokens": 3}, "min_tokens: must be 0"),
    "budget": (
        {"thinking_token_budget": 3},
        "thinking_token_budget: cannot be used: the model does not reason",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_field(tools: Client, name: str) -> None:
    fields, problem = BAD[name]
    with pytest.raises(InvalidRequest, match=f"^{problem}"):
        tools.generate(MESSAGES, **fields)


def test_a_model_without_tools_refuses_them_by_name(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="^tools: cannot be used: the format of this model's"):
        client.generate(MESSAGES, tools=TOOLS)
    assert client.generate(MESSAGES, parsed=True, temperature=0).text
