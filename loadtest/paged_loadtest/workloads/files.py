"""Files that a user brings."""

from __future__ import annotations

from pathlib import Path

from paged_backend.errors import ConfigError


def read_text(path: Path) -> str:
    """The whole file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: byte {error.start} is not UTF-8") from error
