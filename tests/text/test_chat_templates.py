"""Prompts equal those of transformers, wherever a model has its chat templates."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from gguf_vocabulary import write_vocabulary
from sample_tokenizers import KINDS
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paged_backend.text.chat import Chat, ChatTemplate
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, InvalidRequest

NUM_CONVERSATIONS = examples(250)
ROLES = "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>"
CALLS = (
    "{% for call in message.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}"
)
END = (
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
)
PART = "{% for part in {} %}{% if part.type == 'text' %}({{ part.text }}){% endif %}{% endfor %}"
TEXT = ROLES + "{{ message.content | trim }}" + CALLS + END
PARTS = ROLES + PART.replace("{}", "message['content']") + CALLS + END
EITHER = (
    ROLES
    + "{% set content = message.content %}{% if content is string %}{{ content | trim }}{% else %}"
    + PART.replace("{}", "content")
    + "{% endif %}"
    + CALLS
    + END
)
MACRO = (
    "{% macro show(value) %}"
    + PART.replace("{}", "value")
    + "{% endmacro %}"
    + ROLES
    + "{{ show(message.content) }}"
    + CALLS
    + END
)
MIXED = (
    ROLES
    + "{% if message.role == 'user' %}"
    + PART.replace("{}", "message.content")
    + "{% elif message.content %}{{ '[' + message.content + ']' }}{% endif %}"
    + CALLS
    + END
)
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
Fit = Callable[[str, Any], Any]
"""Returns the content that transformers needs for a role, from the content that a client gives."""


def parts_of(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def text_of(content: Any) -> Any:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


TEMPLATES: dict[str, tuple[str, Fit]] = {
    "text": (TEXT, lambda role, content: text_of(content)),
    "parts": (PARTS, lambda role, content: parts_of(content)),
    "either": (EITHER, lambda role, content: content),
    "macro": (MACRO, lambda role, content: parts_of(content)),
    "mixed": (MIXED, lambda role, content: (parts_of if role == "user" else text_of)(content)),
}
Layout = Callable[[Path, dict[str, Any], str, str], None]
"""Writes the templates default and tool_use into a folder or its tokenizer_config.json."""


def in_a_list(folder: Path, config: dict[str, Any], default: str, tool_use: str) -> None:
    templates = {"rag": "x", "default": default, "tool_use": tool_use}
    config["chat_template"] = [{"name": n, "template": t} for n, t in templates.items()]


def in_files(folder: Path, config: dict[str, Any], default: str, tool_use: str) -> None:
    config["chat_template"] = "not this one"
    (folder / "chat_template.jinja").write_text(default)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tool_use)


def in_one_file(folder: Path, config: dict[str, Any], default: str, tool_use: str) -> None:
    config["chat_template"] = [{"name": "default", "template": "not this one"}]
    (folder / "chat_template.jinja").write_text(default)


def in_the_config(folder: Path, config: dict[str, Any], default: str, tool_use: str) -> None:
    config["chat_template"] = default


LAYOUTS: dict[str, Layout] = {
    "list": in_a_list,
    "files": in_files,
    "file": in_one_file,
    "config": in_the_config,
}


def write_tokenizer(folder: Path) -> dict[str, Any]:
    """Write a tokenizer whose prompts begin with bos; returns its tokenizer_config.json."""
    tokenizer = KINDS["byte_level"]()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    config: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    return config


def write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """A conversation as a client sends it, with contents in both forms."""

    def text() -> str:
        words = ["a", " b ", "日本", "👩‍👩‍👧", "<|user|>", "{{ x }}", "\n", '"', "\\", "'text': "]
        return "".join(rng.choices(words, k=rng.randint(0, 6)))

    def content() -> Any:
        if rng.random() < 0.5:
            return text()
        return [{"type": "text", "text": text()} for _ in range(rng.randint(1, 3))]

    messages = [{"role": "system", "content": content()}] if rng.random() < 0.5 else []
    for turn in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": content()})
        if rng.random() < 0.4:
            arguments = {"name": text(), "lines": [turn, None, {"x": True}]}
            call = {"id": f"call{turn:05}", "type": "function"}
            call["function"] = {"name": "find", "arguments": arguments}
            messages.append({"role": "assistant", "tool_calls": [call]})
            if rng.random() < 0.5:
                messages[-1]["content"] = rng.choice([None, content()])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content()})
        if rng.random() < 0.7:
            messages.append({"role": "assistant", "content": content()})
    return messages


def as_sent(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the arguments of calls as text, as OpenAI's clients send them."""
    sent: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for message in sent:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return sent


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("text", layout) for layout in LAYOUTS),
        ("parts", "files"),
        ("either", "list"),
        ("macro", "file"),
        ("mixed", "config"),
    ],
)
def test_random_conversations(name: str, layout: str, tmp_path: Path) -> None:
    template, fit = TEMPLATES[name]
    config = write_tokenizer(tmp_path)
    LAYOUTS[layout](tmp_path, config, template, "TOOLS" + template)
    write_config(tmp_path, config)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.chat_template is not None
    rng = random.Random(f"{name} {layout}")
    for _ in range(NUM_CONVERSATIONS):
        messages = conversation(rng)
        tools = [TOOL] if rng.random() < 0.5 else None
        rendered = ours.chat_template.render(Chat(messages=as_sent(messages)), tools or ())
        for message in messages:
            if message.get("content") is not None:
                message["content"] = fit(message["role"], message["content"])
        options = {"tools": tools, "add_generation_prompt": True}
        assert rendered == theirs.apply_chat_template(messages, tokenize=False, **options)
        ids = ours.encode(rendered, add_special_tokens=False)
        assert ids == theirs.apply_chat_template(messages, return_dict=False, **options)
        assert ids.count(ours.token_id("<s>")) == 1


def test_the_default_template_is_missing(tmp_path: Path) -> None:
    config = write_tokenizer(tmp_path)
    config["chat_template"] = [{"name": "tool_use", "template": TEXT}]
    write_config(tmp_path, config)
    template = load_tokenizer(tmp_path).chat_template
    assert template is not None
    chat = Chat(messages=[{"role": "user", "content": "x"}])
    assert template.render(chat, [TOOL]).startswith("<s><|user|>x")
    with pytest.raises(
        InvalidRequest, match="is its default; the option chat_template .* tool_use"
    ):
        template.render(chat)


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_a_template_of_a_processor_is_the_last_choice(file: str, tmp_path: Path) -> None:
    config = write_tokenizer(tmp_path)
    config.pop("chat_template", None)
    write_config(tmp_path, config)
    (tmp_path / file).write_text(json.dumps({"chat_template": "processor"}))
    assert source(load_tokenizer(tmp_path)) == "processor"
    write_config(tmp_path, config | {"chat_template": "tokenizer"})
    assert source(load_tokenizer(tmp_path)) == "tokenizer"


@pytest.mark.parametrize("value", [3, ["x"], [{"name": "default"}], {"default": 3}])
def test_damaged_templates(value: Any, tmp_path: Path) -> None:
    write_config(tmp_path, write_tokenizer(tmp_path) | {"chat_template": value})
    with pytest.raises(ConfigError, match="chat_template must be a string, or a list of objects"):
        load_tokenizer(tmp_path)


def test_templates_of_a_gguf_file(tmp_path: Path) -> None:
    path = write_vocabulary(
        tmp_path / "m.gguf",
        KINDS["byte_level"](),
        "qwen2",
        chat_template=[
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "with {{ tools[0].function.name }}"},
        ],
    )
    template = load_tokenizer(path).chat_template
    assert template is not None
    chat = Chat(messages=[{"role": "user", "content": "x"}])
    assert [template.render(chat), template.render(chat, [TOOL])] == ["plain", "with find"]


def source(tokenizer: Tokenizer) -> str:
    assert tokenizer.chat_template is not None
    return tokenizer.chat_template.source


def user_prompt(tokenizer: Tokenizer, **fields: Any) -> str:
    assert tokenizer.chat_template is not None
    chat = Chat(messages=[{"role": "user", "content": "x"}], **fields)
    return tokenizer.chat_template.render(chat)


def test_the_option_is_a_file_a_template_or_a_name(tmp_path: Path) -> None:
    config = write_tokenizer(tmp_path)
    in_a_list(tmp_path, config, "the default", "with tools")
    write_config(tmp_path, config)
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}from a file")
    for value, wanted in (
        (str(file), "{{ bos_token }}from a file"),
        ("{{ eos_token }}literal", "{{ eos_token }}literal"),
        ("rag", "x"),
        ("tool_use", "with tools"),
        (None, "x\nthe default\nwith tools"),
    ):
        tokenizer = load_tokenizer(tmp_path, EngineConfig(chat_template=value))
        assert source(tokenizer) == wanted
    with pytest.raises(ConfigError, match="one of the model's templates: default, rag, tool_use"):
        load_tokenizer(tmp_path, EngineConfig(chat_template="mine"))


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("a\n{% for %}", r"Expected an expression.*\(line 2\)"),
        ("{{ messages | nothing }}", r"No filter named 'nothing'.*\(line 1\)"),
        ("{% if x %}", "Unexpected end of template"),
    ],
)
def test_a_template_of_the_option_is_checked_at_load(
    source: str, problem: str, tmp_path: Path
) -> None:
    write_config(tmp_path, write_tokenizer(tmp_path))
    (tmp_path / "mine.jinja").write_text(source)
    for value in (str(tmp_path / "mine.jinja"), source):
        message = rf"option chat_template names a template that cannot be used: .*{problem}"
        with pytest.raises(ConfigError, match=message) as caught:
            load_tokenizer(tmp_path, EngineConfig(chat_template=value))
        assert "\n" not in str(caught.value)


def test_a_template_of_the_option_that_takes_too_long_is_refused_at_load(tmp_path: Path) -> None:
    write_config(tmp_path, write_tokenizer(tmp_path))
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match="option chat_template names .* cannot be used: .*took"):
        load_tokenizer(tmp_path, EngineConfig(chat_template=loop))


def test_a_broken_template_of_the_model_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = write_tokenizer(tmp_path)
    in_a_list(tmp_path, config, "{{ messages[0].content }}", "{% for %}")
    write_config(tmp_path, config)
    load_tokenizer(tmp_path).prepare_chat()
    deadline = time.monotonic() + 60
    while not caplog.text and time.monotonic() < deadline:
        time.sleep(0.1)
    assert "a chat template of the model cannot be used: tool_use: Expected" in caplog.text
    assert len(caplog.records) == 1


def test_a_model_without_a_template_gets_one_by_the_option(tmp_path: Path) -> None:
    config = write_tokenizer(tmp_path)
    config.pop("chat_template", None)
    write_config(tmp_path, config)
    assert load_tokenizer(tmp_path).chat_template is None
    options = EngineConfig(chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert user_prompt(load_tokenizer(tmp_path, options)) == "<s>x"
    with pytest.raises(ConfigError, match="or the name of one of the model's templates, which has"):
        load_tokenizer(tmp_path, EngineConfig(chat_template="default"))


def test_default_arguments_yield_to_those_of_a_request(tmp_path: Path) -> None:
    source = "{{ bos_token }}{{ tone }} {{ enable_thinking }}"
    write_config(tmp_path, write_tokenizer(tmp_path))
    options = EngineConfig(
        chat_template=source, default_chat_template_kwargs={"tone": "kind", "enable_thinking": True}
    )
    tokenizer = load_tokenizer(tmp_path, options)
    assert user_prompt(tokenizer) == "<s>kind True"
    assert user_prompt(tokenizer, chat_template_kwargs={"tone": "rude"}) == "<s>rude True"
    assert user_prompt(tokenizer, reasoning_effort="none") == "<s>kind False"


@pytest.mark.parametrize(
    ("source", "effort", "prompt"),
    [
        ("{{ reasoning_effort }} {{ enable_thinking }} {{ thinking }}", "none", "none False False"),
        ("{{ reasoning_effort }} {{ enable_thinking }}", "high", "high True"),
        ("{{ thinking }}", "minimal", "False"),
        (
            "Mind your reasoning_effort{{ enable_thinking }}",
            "low",
            "Mind your reasoning_effortTrue",
        ),
    ],
)
def test_an_effort_is_given_as_each_argument_that_a_template_takes(
    source: str, effort: str, prompt: str
) -> None:
    chat = Chat(messages=[{"role": "user", "content": "x"}], reasoning_effort=effort)
    assert ChatTemplate(source, {}).render(chat) == prompt


def test_words_of_a_template_are_no_arguments() -> None:
    chat = Chat(messages=[{"role": "user", "content": "x"}], reasoning_effort="high")
    template = ChatTemplate("You have no tools today, no thinking.", {})
    with pytest.raises(InvalidRequest, match="^tools: cannot be used"):
        template.render(chat, [TOOL])
    with pytest.raises(InvalidRequest, match="^reasoning_effort: can only be none"):
        template.render(chat)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"chat_template": "missing/mine.jinja"}, "chat_template names no file: 'missing/mine.jin"),
        ({"chat_template": "mine.jinja"}, "chat_template names no file: 'mine.jinja'"),
        ({"chat_template": ""}, "chat_template must be a file, a template or a name"),
        ({"chat_template_content_format": "parts"}, "must be one of auto, string, openai"),
        ({"default_chat_template_kwargs": {"tools": []}}, "must not hold tools"),
        ({"default_chat_template_kwargs": {"x": {1}}}, "must be a JSON object: Object of type set"),
        ({"default_chat_template_kwargs": "x"}, "must be a JSON object or null, got 'x'"),
    ],
    ids=str,
)
def test_wrong_options_are_named(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)
    assert problem in str(caught.value)
