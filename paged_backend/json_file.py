"""Reads JSON files that users provide."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paged_backend.errors import ConfigError
from paged_backend.validation import shorten


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file is missing, unreadable, or holds no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {shorten(values)}")
    return values
