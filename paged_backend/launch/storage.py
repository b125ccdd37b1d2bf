"""Writes of the launcher, and clear errors for a full disk or a folder that cannot be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_backend.errors import ConfigError

_SHARED_MEMORY = "/dev/shm"
_LEAST_FREE = 2**20  # bytes; an instance of a model takes as much shared memory when it starts


@contextmanager
def writing(what: object) -> Iterator[None]:
    """Turn an OSError of the block into a ConfigError that names the file, or else ``what``."""
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename or what
        raise ConfigError(f"cannot write {place}: {error.strerror or error}") from error


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A new folder of mode 0700, removed in the end. Raises ConfigError where there can be none."""
    with writing("a temporary folder"):
        folder = tempfile.TemporaryDirectory(prefix="paged-backend-")
    with folder as name:
        yield Path(name)


def shortage() -> str | None:
    """What keeps a server from writing on this machine; None where nothing does."""
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
