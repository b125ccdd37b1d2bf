"""Reads the chat templates of a checkpoint, from the files that `transformers` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paged_backend.values.errors import ConfigError
from paged_backend.values.json_file import MAX_JSON_BYTES, read_json_object
from paged_backend.values.regular_file import read_text

DEFAULT, TOOL_USE = "default", "tool_use"
CONFIG_FILE = "tokenizer_config.json"
_TEMPLATE_FILE = "chat_template.jinja"
_FOLDER = "additional_chat_templates"
_SUFFIX = ".jinja"
# Older files of processors, which their tokenizers do not read.
_PROCESSOR_FILES = ("chat_template.json", "processor_config.json")


def read_templates(folder: Path) -> dict[str, str]:
    """Return the chat templates of a folder by their names; a single one is ``default``.

    As in `transformers`, files of templates take precedence over all that ``tokenizer_config.json``
    has. A template that only a processor's file has is the last choice.

    Raises:
        ConfigError: a file cannot be read.
    """
    templates = _files(folder)
    for file in (CONFIG_FILE, *_PROCESSOR_FILES):
        if not templates and (folder / file).exists():
            templates = _entries(folder / file)
    return templates


def read_template(file: Path) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: it cannot be read, is not a regular file, is too large, or is not UTF-8.
    """
    return read_text(file, MAX_JSON_BYTES)


def _files(folder: Path) -> dict[str, str]:
    files = {
        file.name.removesuffix(_SUFFIX): file
        for file in sorted((folder / _FOLDER).glob(f"*{_SUFFIX}"))
    }
    if (folder / _TEMPLATE_FILE).exists():
        files.setdefault(DEFAULT, folder / _TEMPLATE_FILE)
    return {name: read_template(file) for name, file in files.items()}


def _entries(file: Path) -> dict[str, str]:
    """Return the templates under the key ``chat_template``: one, a list of several, or by name."""
    value: Any = read_json_object(file).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    entries: list[tuple[Any, Any]] | None = None
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        entries = [(entry.get("name"), entry.get("template")) for entry in value]
    if entries is None or not all(isinstance(text, str) for entry in entries for text in entry):
        raise ConfigError(
            f"{file}: chat_template must be a string, or a list of objects with name and template"
        )
    return dict(entries)
