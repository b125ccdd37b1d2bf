"""Clear errors for a full disk or a folder that cannot be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_backend.values.errors import ConfigError

_SHARED_MEMORY = "/dev/shm"
_LEAST_FREE = 2**20  # bytes; an instance of a model takes this much shared memory when it starts


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Turn an OSError in the block into a ConfigError that names the file, or else ``what``."""
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename or what
        raise ConfigError(f"cannot write {place}: {error.strerror or error}") from error


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder of mode 0700, and remove it at the end. Raises ConfigError if that fails."""
    with writing("a temporary folder"):
        folder = tempfile.TemporaryDirectory(prefix="paged-backend-")
    with folder as name:
        yield Path(name)


def shortage() -> str | None:
    """Describe why a server cannot write on this machine; None if it can."""
    for folder in (tempfile.gettempdir(), _SHARED_MEMORY):
        try:
            status = os.statvfs(folder)
        except OSError as error:
            return f"{folder}: {error.strerror}"
        free = status.f_bavail * status.f_frsize
        if free < _LEAST_FREE:
            return f"{folder} has only {free // 1024} KiB of free space"
        if not os.access(folder, os.W_OK | os.X_OK):
            return f"{folder} cannot be written by this user"
    return None
