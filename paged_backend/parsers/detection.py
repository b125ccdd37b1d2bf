"""Finds out in which format a checkpoint writes its answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged_backend.parsers.formats import ResponseFormat
from paged_backend.parsers.template import load_template
from paged_backend.values.errors import ConfigError
from paged_backend.values.json_file import read_json_object

AUTO, NONE = "auto", "none"

# Texts in chat templates that tell a format; the first entry that has all of its texts applies.
_TOOL_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("", ("<tool_call>", "<arg_key>")),  # a format that is not known here
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("gemma4", ("<|tool_call>",)),
    ("openai", ("to=functions", "<|channel|>")),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_list", ("[TOOL_CALLS]",)),
    ("pythonic", ("func_name1(",)),
    ("llama3_json", ("<|start_header_id|>", "tools", '"parameters"')),
)
_REASONING_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>analysis",)),
    ("gemma4", ("<|channel>thought",)),
    ("mistral", ("[THINK]",)),
    ("qwen3", ("<think>",)),
)


def response_format(
    folder: Path, chat_template: str | None, *, tool_parser: str, reasoning_parser: str
) -> ResponseFormat:
    """Return the format of a checkpoint's answers.

    Args:
        folder: folder of the checkpoint's tokenizer. A ``response_template`` in its configuration
            is used unless an option names a format.
        chat_template: chat template of the checkpoint, if it has one.
        tool_parser: the option ``tool_call_parser``.
        reasoning_parser: the option ``reasoning_parser``.

    Raises:
        ConfigError: the checkpoint's template cannot be used.
    """
    source = chat_template or ""
    template = None
    if tool_parser == reasoning_parser == AUTO:
        template = _own_template(folder)
    return ResponseFormat(
        _detected(_TOOL_SIGNS, source) if tool_parser == AUTO else _named(tool_parser),
        _detected(_REASONING_SIGNS, source)
        if reasoning_parser == AUTO
        else _named(reasoning_parser),
        template,
    )


def _named(parser: str) -> str:
    return "" if parser == NONE else parser


def _detected(signs: tuple[tuple[str, tuple[str, ...]], ...], source: str) -> str:
    return next((name for name, texts in signs if all(text in source for text in texts)), "")


def _own_template(folder: Path) -> Any:
    """Return the checkpoint's ``response_template``; None if it has none."""
    file = folder / "tokenizer_config.json"
    template = read_json_object(file).get("response_template") if file.exists() else None
    if template is None:
        return None
    if not isinstance(template, dict):
        raise ConfigError(f"{file}: response_template must be an object")
    try:
        return load_template(template)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
