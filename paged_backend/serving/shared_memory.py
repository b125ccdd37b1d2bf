"""The memory through which tritonserver and its Python processes pass tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_FOLDER = "/dev/shm/"


def close_to_other_users() -> None:
    """Let only this user open the memory that this process shares with tritonserver.

    The server makes it with mode 0644 whatever the umask is, so that every user of the machine
    could read the prompts and answers in it. Must be called before the first request.
    """
    for path in _mapped():
        if path.stat().st_uid == os.getuid():
            path.chmod(0o600)


def _mapped() -> Iterator[Path]:
    """The files of shared memory that are mapped into this process and still have a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {
        _FOLDER + name for _, found, name in (line.partition(_FOLDER) for line in lines) if found
    }
    return (Path(name) for name in sorted(names) if Path(name).exists())
