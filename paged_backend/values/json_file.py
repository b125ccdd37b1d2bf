"""Reads JSON files that users provide, of bounded size and nesting, and writes JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paged_backend.values.errors import ConfigError
from paged_backend.values.regular_file import read_text
from paged_backend.values.validation import is_deeper, shorten

MAX_JSON_BYTES = 2**24  # a list of 100,000 layers takes half of it
MAX_JSON_DEPTH = 32  # levels of arrays and objects; files of models have up to 6


def read_json_object(path: Path, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: the file.
        max_bytes: the largest size that is accepted.

    Raises:
        ConfigError: see `read_json`; or the file holds no JSON object.
    """
    values = read_json(path, max_bytes)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {shorten(values)}")
    return values


def read_json(path: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON value from a file.

    Raises:
        ConfigError: the file is missing, unreadable, not a regular file, too large, holds no JSON,
            or is nested deeper than `MAX_JSON_DEPTH` levels.
    """
    text = read_text(path, max_bytes)
    try:
        values = json.loads(text)
    except RecursionError as error:
        raise _too_deep(path) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if is_deeper(values, MAX_JSON_DEPTH):
        raise _too_deep(path)
    return values


def write_json(path: Path, values: Any, *, indent: int | None = None) -> None:
    """Write a file atomically: a reader, or a run that is killed, finds the old or the new values.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(values, indent=indent) + "\n", encoding="utf-8")
    part.replace(path)


def _too_deep(path: Path) -> ConfigError:
    return ConfigError(f"{path} must be nested at most {MAX_JSON_DEPTH} levels deep")
