"""Reads files given by the user."""

from __future__ import annotations

from pathlib import Path

from paged_backend.values.errors import ConfigError


def read_text(path: Path) -> str:
    """Read a whole UTF-8 file.

    Raises:
        ConfigError: the file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: byte {error.start} is not UTF-8") from error
