"""Opens files that users provide: regular ones of bounded size, so that reading them ends.

A folder of a checkpoint may hold a pipe, a socket or a link to a device under any name, and a read
of one of them can wait or go on forever. Links to regular files are followed: the cache of the
Hugging Face Hub consists of them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from paged_backend.values.errors import ConfigError


def check_regular(path: Path, max_bytes: int | None = None) -> None:
    """Check a file that a library opens by its path.

    Args:
        path: the file; a link is followed.
        max_bytes: the largest size that is accepted; None for no limit.

    Raises:
        ConfigError: the file is missing, not a regular file, or larger.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    _check(path, status, max_bytes)


def open_regular(path: Path, max_bytes: int | None = None) -> BinaryIO:
    """Open a file for reading; this never waits.

    Args:
        path: the file; a link is followed.
        max_bytes: the largest size that is accepted; None for no limit.

    Raises:
        ConfigError: the file is missing, unreadable, not a regular file, or larger.
    """
    check_regular(path, max_bytes)  # before it is opened, which may act on a device
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        _check(path, os.fstat(descriptor), max_bytes)
    except ConfigError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a whole file, as long as its size says.

    Raises:
        ConfigError: the file is missing, unreadable, not a regular file, or larger.
    """
    with open_regular(path, max_bytes) as stream:
        try:
            return stream.read(os.fstat(stream.fileno()).st_size)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def read_text(path: Path, max_bytes: int) -> str:
    """Read a whole file of text.

    Raises:
        ConfigError: see `read_regular`; or the file is not UTF-8.
    """
    try:
        return read_regular(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not valid UTF-8 at byte {error.start}") from error


def _check(path: Path, status: os.stat_result, max_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} must be a regular file, but is {_kind(status.st_mode)}")
    if max_bytes is not None and status.st_size > max_bytes:
        raise ConfigError(f"{path} must have at most {max_bytes} bytes, but has {status.st_size}")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"
