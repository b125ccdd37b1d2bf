"""The formats of answers that chat templates show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paged_backend.checkpoint.bundled import BUNDLED_MODELS
from paged_backend.parsers.detection import response_format
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.errors import ConfigError

# What is typical of a template, and the formats.
TEMPLATES = {
    "{{ messages }}": ("", ""),
    '<think> {{ tools }} <tool_call>{"name": .., "arguments": ..}</tool_call>': ("hermes", "qwen3"),
    "<think> {{ tools }} <tool_call>\n<function=name>\n<parameter=a>": ("qwen3_coder", "qwen3"),
    "<think> <tool_call>{name}\n<arg_key>{key}</arg_key> {{ arguments }}": ("", "qwen3"),
    '<|start_header_id|> {{ tools }} {"name": function name, "parameters": ..}': (
        "llama3_json",
        "",
    ),
    "<|start_header_id|> {{ tools }} [func_name1(params_name1=..)]": ("pythonic", ""),
    "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }} [THINK]": ("mistral", "mistral"),
    "[TOOL_CALLS] [{{ tool_call.function | tojson }}": ("mistral_list", ""),
    "<|channel|>commentary to=functions.{{ name }} <|channel|>analysis": (
        "openai",
        "openai_gptoss",
    ),
    "<|tool_call>call:{{ name }} <|channel>thought": ("gemma4", "gemma4"),
    "<think> <｜tool▁call▁begin｜>name<｜tool▁sep｜>": ("deepseek_v31", "qwen3"),
    "<think> <｜tool▁call▁begin｜>function<｜tool▁sep｜>\n```json": ("deepseek_v3", "qwen3"),
    "<|start_header_id|> {{ messages }}": ("", ""),
}


@pytest.mark.parametrize("source", TEMPLATES)
def test_the_format_that_a_template_shows(source: str, tmp_path: Path) -> None:
    found = response_format(tmp_path, source, tool_parser="auto", reasoning_parser="auto")
    assert (found.tool_parser, found.reasoning_parser) == TEMPLATES[source]
    assert found.is_plain == (TEMPLATES[source] == ("", ""))


def test_the_bundled_models() -> None:
    found = {}
    for name, folder in BUNDLED_MODELS.items():
        template = load_tokenizer(folder).chat_template
        assert template is not None
        format = response_format(
            folder, template.source, tool_parser="auto", reasoning_parser="auto"
        )
        found[name] = (format.tool_parser, format.reasoning_parser)
    assert found == {"demo": ("", ""), "demo-tools": ("hermes", "qwen3")}


def test_options_take_precedence(tmp_path: Path) -> None:
    """Also over the checkpoint's own template, which must be valid only if it is used."""
    write_template(tmp_path, {"fields": 3})
    found = response_format(tmp_path, None, tool_parser="mistral", reasoning_parser="none")
    assert (found.tool_parser, found.reasoning_parser) == ("mistral", "")
    assert found.template is None


def write_template(folder: Path, template: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"response_template": template}))


def test_a_checkpoints_own_template(tmp_path: Path) -> None:
    template = {"start_anchor": "<|assistant|>", "fields": {"content": {}}}
    write_template(tmp_path, template)
    found = response_format(tmp_path, "{{ x }}", tool_parser="auto", reasoning_parser="auto")
    assert found.template is not None
    assert list(found.template.fields) == ["content"]
    assert not found.is_plain


@pytest.mark.parametrize("template", [3, {"fields": {}}, {"fields": {"a": {"open": ""}}}], ids=str)
def test_templates_that_cannot_be_used(template: object, tmp_path: Path) -> None:
    write_template(tmp_path, template)
    with pytest.raises(ConfigError, match="response_template"):
        response_format(tmp_path, None, tool_parser="auto", reasoning_parser="auto")
