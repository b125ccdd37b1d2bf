"""The bundled model that calls a tool, over the wire: calls, results and reasoning."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from demo_server import MODEL, Server
from documented_commands import answer_of, curl_commands
from gateway.gateways import running_gateway
from paged_client import Answer, Client

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import start_server
from paged_backend.tools.demo import Question, load_questions
from paged_backend.tools.demo.lookup import QUESTIONS_FILE, TOOL

pytestmark = pytest.mark.server

THINKING = {"enable_thinking": True}


@pytest.fixture(scope="module")
def tools_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    write_model_repository(repository, MODEL, {"model": "demo-tools"}, instances=1)
    with start_server(repository) as running:
        yield Server(running)


@pytest.fixture
def tools(tools_server: Server) -> Iterator[Client]:
    with Client(tools_server.running.grpc_url, MODEL, timeout=120) as client:
        yield client


def some_questions() -> list[Question]:
    return load_questions(QUESTIONS_FILE)[::25]


def ask(
    client: Client, *messages: dict[str, Any], thinking: bool = False, **options: Any
) -> Answer:
    prompt: dict[str, Any] = {"messages": list(messages)}
    if thinking:
        prompt["chat_template_kwargs"] = THINKING
    given = {"tools": [TOOL], "temperature": 0, "max_tokens": 200, **options}
    return client.generate(prompt, parsed=True, **given).answers[0]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def history(answer: Answer) -> dict[str, Any]:
    """The answer as a message, as clients send it back."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in answer.tool_calls
    ]
    return {"role": "assistant", "content": answer.text or None, "tool_calls": calls}


def test_questions_are_looked_up_and_answered_from_the_result(tools: Client) -> None:
    for question in some_questions():
        called = ask(tools, user(question.question))
        (call,) = called.tool_calls
        assert (called.finish_reason, called.text) == ("tool_calls", "")
        assert (call.name, json.loads(call.arguments)) == ("lookup", {"name": question.name})
        result = {"role": "tool", "tool_call_id": call.id, "content": question.answer}
        answered = ask(tools, user(question.question), history(called), result)
        assert (answered.finish_reason, answered.text) == ("stop", question.answer)


def test_two_names_are_two_calls_unless_one_is_allowed(tools: Client) -> None:
    first, second = some_questions()[:2]
    both = user(f"What do {first.name} and {second.name} do?")
    calls = ask(tools, both, tool_choice="required").tool_calls
    assert 1 <= len(calls)
    assert len(ask(tools, both, parallel_tool_calls=False).tool_calls) == 1


def test_small_talk_needs_no_tool(tools: Client) -> None:
    answer = ask(tools, user("hello"))
    assert (answer.tool_calls, answer.finish_reason) == ((), "stop")
    assert answer.text


def test_reasoning_comes_before_a_call(tools: Client) -> None:
    for question in some_questions()[:4]:
        answer = ask(tools, user(question.question), thinking=True)
        assert answer.reasoning and "<" not in answer.reasoning
        assert answer.text == ""
        assert [json.loads(call.arguments) for call in answer.tool_calls] == [
            {"name": question.name}
        ]


def test_a_stream_of_reasoning_is_the_whole(tools: Client) -> None:
    question = some_questions()[0]
    prompt = {"messages": [user(question.question)], "chat_template_kwargs": THINKING}
    whole = ask(tools, user(question.question), thinking=True)
    with tools.stream(prompt, tools=[TOOL], temperature=0, max_tokens=200) as stream:
        chunks = list(stream)
    assert "".join(chunk.reasoning for chunk in chunks) == whole.reasoning
    last = max(place for place, chunk in enumerate(chunks) if chunk.reasoning)
    assert not any(chunk.text or chunk.tool_calls for chunk in chunks[:last])


@pytest.mark.parametrize("budget", [0, 3])
def test_a_budget_ends_the_reasoning(tools: Client, budget: int) -> None:
    question = some_questions()[0]
    answer = ask(tools, user(question.question), thinking=True, thinking_token_budget=budget)
    assert len(tools.tokenize(answer.reasoning, add_special_tokens=False)) <= budget + 1
    assert answer.tool_calls or answer.text


def test_a_constraint_begins_after_the_reasoning(tools: Client) -> None:
    digits = {"regex": "[0-9]{5}"}
    question = user("What does len do?")
    answer = ask(tools, question, thinking=True, tools=None, structured_outputs=digits)
    assert answer.reasoning
    assert answer.text.isdecimal() and len(answer.text) == 5


def test_an_effort_turns_reasoning_on_and_off(tools: Client) -> None:
    question = user("What does len do?")
    for effort, reasons in (("none", False), ("high", True)):
        prompt = {"messages": [question], "reasoning_effort": effort}
        answer = tools.generate(prompt, tools=[TOOL], temperature=0, max_tokens=100).answers[0]
        assert bool(answer.reasoning) == reasons
        assert answer.tool_calls


def test_the_demo_shows_a_call_and_a_constrained_answer() -> None:
    command = [Path(sys.executable).parent / "paged-backend", "demo", "tools"]
    wide = os.environ | {"COLUMNS": "250"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=wide)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'model   lookup {"name":"os.path.join"}' in done.stdout.replace(": ", ":")
    assert 'model   {"name": "os.path.join", "summary": "' in done.stdout


def test_the_curl_commands_of_the_documents_are_answered(
    tools_server: Server, server: Server, tmp_path: Path
) -> None:
    found = [command for command in curl_commands() if "embed" not in command]
    assert len(found) >= 5
    with running_gateway("--triton", server.running.grpc_url) as gateway:
        for documented in found:
            serving = tools_server if "tools" in documented else server
            body = answer_of(documented, serving.running.http_url, gateway.address, tmp_path)
            if not body:
                continue  # a later command reads the file that it has written
            answers = [
                json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line
            ]
            answer = answers[-1]
            if "choices" in answer:
                choice = answer["choices"][0]
                assert choice["message"]["content"] if "message" in choice else choice["token_ids"]
            else:
                text = "".join(part["text_output"] for part in answers)
                assert text.strip() or json.loads(answer["tool_calls"]), documented
                assert "<|im_start|>" not in text, documented  # the prompt of a chat
