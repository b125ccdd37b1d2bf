"""Chat templates of a model and of its options, over Triton's own protocol."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from demo_server import MODEL, Server
from effort import ALL
from paged_client import Client, InvalidRequest
from pipelines import OWN, write_part_of_pipeline
from tool_models import LOOKUP, TEMPLATE

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import start_server

pytestmark = pytest.mark.server

PARTS = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }};{% endif %}{% endfor %}<|end|>{% endfor %}"
)
MINE = "{% for m in messages %}<|{{ m.role }}|>{{ tone }} {{ m.content }}<|end|>{% endfor %}"
NO_DEFAULT = "no-default"
OF_OPTIONS = "of-options"
QUESTION = "What does len do?"


@pytest.fixture(scope="module")
def template_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with templates by name, and one with a template of an option.

    With everything that can be tried, one without a default, too.
    """
    folder = tmp_path_factory.mktemp("models")
    repository = tmp_path_factory.mktemp("repository")
    named = [{"name": "default", "template": PARTS}, {"name": "tool_use", "template": TEMPLATE}]
    for name, templates in ((MODEL, named), (NO_DEFAULT, named[1:]))[: 2 if ALL else 1]:
        shutil.copytree(MODEL_DIR, folder / name)
        file = folder / name / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": templates}))
        write_model_repository(repository, name, {"model": str(folder / name)}, instances=1)
    options: dict[str, Any] = {
        "model": str(folder / MODEL),
        "chat_template": "mine.jinja",
        "default_chat_template_kwargs": {"tone": "Kindly:"},
    }
    write_part_of_pipeline(repository, OF_OPTIONS, options, OWN)
    (repository / OF_OPTIONS / "1" / "mine.jinja").write_text(MINE)
    with start_server(repository) as running:
        yield Server(running)


def prompt(template_server: Server, model: str, messages: list[Any], **options: Any) -> str:
    with Client(template_server.running.grpc_url, model, timeout=60) as client:
        return client.detokenize(client.tokenize(messages, **options))


@pytest.mark.parametrize(
    "content", [QUESTION, [{"type": "text", "text": QUESTION}], [{"type": "text", "text": "x"}]]
)
def test_a_template_that_reads_parts(template_server: Server, content: Any) -> None:
    text = content if isinstance(content, str) else content[0]["text"]
    messages = [{"role": "system", "content": content}, {"role": "user", "content": content}]
    assert (
        prompt(template_server, MODEL, messages)
        == f"<|system|>{text};<|end|><|user|>{text};<|end|>"
    )


def test_a_template_for_tools(template_server: Server) -> None:
    """It renders requests with tools, and shows in which format the model calls them."""
    messages = [{"role": "user", "content": QUESTION}]
    with_tools = prompt(template_server, MODEL, messages, tools=[LOOKUP])
    assert '"name": "lookup"' in with_tools and f"<|user|>{QUESTION}<|end|>" in with_tools
    assert prompt(template_server, MODEL, messages) == f"<|user|>{QUESTION};<|end|>"
    with Client(template_server.running.grpc_url, MODEL, timeout=120) as client:
        answer = client.generate(
            messages, tools=[LOOKUP], tool_choice="required", temperature=0, max_tokens=60
        ).answers[0]
    assert answer.tool_calls[0].name == "lookup"


@pytest.mark.thorough
def test_without_a_default_only_requests_with_tools_are_rendered(template_server: Server) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    assert "lookup" in prompt(template_server, NO_DEFAULT, messages, tools=[LOOKUP])
    with pytest.raises(InvalidRequest, match="messages: cannot be used: none .* name one of tool"):
        prompt(template_server, NO_DEFAULT, messages)


def test_a_template_of_an_option(template_server: Server) -> None:
    """The model and the first step of its pipeline use it."""
    messages = [{"role": "user", "content": [{"type": "text", "text": QUESTION}, "x"]}]
    text = f"<|user|>Kindly: {QUESTION}\nx<|end|>"
    assert prompt(template_server, OF_OPTIONS, messages) == text
    with pytest.raises(InvalidRequest, match="^tools: cannot be used"):
        prompt(template_server, OF_OPTIONS, messages, tools=[LOOKUP])
    answers = []
    for model in (OF_OPTIONS, "llm"):
        with Client(template_server.running.grpc_url, model, timeout=60) as client:
            answers += [client.generate(messages, temperature=0, max_tokens=8).token_ids]
            answers += [client.generate(text, temperature=0, max_tokens=8).token_ids]
    assert len(set(answers)) == 1


@pytest.mark.parametrize("arguments", ['{"name": "os.pa', "null", " ", "[1]"])
def test_a_history_with_a_call_that_was_cut(template_server: Server, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "another", "content": [{"type": "text", "text": "cut"}]},
    ]
    shown = "{}" if arguments in ("null", " ") else arguments
    text = prompt(template_server, MODEL, messages, tools=[LOOKUP])
    assert f'{{"name": "lookup", "arguments": {shown}}}\n</tool_call><|end|>' in text
    assert "<|tool|>cut<|end|>" in text
