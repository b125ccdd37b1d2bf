"""Restricts the memory through which tritonserver and its Python processes pass tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_FOLDER = "/dev/shm/"


def close_to_other_users() -> None:
    """Keep other users from opening the memory that this process shares with tritonserver.

    The server creates it with mode 0644 regardless of the umask, so that every user of the machine
    could read the prompts and answers in it. This must be called before the first request.
    """
    for path in _mapped():
        if path.stat().st_uid == os.getuid():
            path.chmod(0o600)


def _mapped() -> Iterator[Path]:
    """Return the shared-memory files that are mapped into this process and still have a name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    names = {
        _FOLDER + name for _, found, name in (line.partition(_FOLDER) for line in lines) if found
    }
    return (Path(name) for name in sorted(names) if Path(name).exists())
