"""The memory of tritonserver: its heap, and what it shares with its Python processes.

Each Python process of a server has a region: a file in /dev/shm, which the server removes at its
end. A server that is killed does not, and the prompts and answers in it would stay.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_FOLDER = Path("/dev/shm")
REGION_PREFIX = "triton_python_backend_shm_region_"  # the server's default
_REGION_WORD = 2  # index of the word of a stub's command line that names its region
# glibc raises its threshold for separate mappings to the size of the largest block that was freed,
# and never gives back most of what large responses took. A fixed threshold does.
_HEAP = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}


def heap_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a server, so that it gives the memory of large responses back.

    An operator's own settings in ``environment`` are kept.
    """
    return {name: value for name, value in _HEAP.items() if name not in environment}


def without_heap_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a child of the server that allocates large tensors all the time.

    With the server's setting, it would have to map and clear the memory of each of them.
    """
    return {name: value for name, value in environment.items() if _HEAP.get(name) != value}


def close_to_other_users() -> None:
    """Keep other users from opening the memory that this process shares with tritonserver.

    The server creates it with mode 0644 regardless of the umask, so that every user of the machine
    could read the prompts and answers in it. This must be called before the first request.
    """
    for path in map(Path, sorted(_mapped("self"))):
        with contextlib.suppress(FileNotFoundError):  # it has lost its name
            if path.stat().st_uid == os.getuid():
                path.chmod(0o600)


def own_region() -> str:
    """Return the name of the region that the server made for this process; empty without one."""
    words = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    name = words[_REGION_WORD] if len(words) > _REGION_WORD else ""
    return name if _is_name(name) and str(_FOLDER / name) in _mapped("self") else ""


def regions_with(prefix: str) -> list[str]:
    """Return the names of all regions that begin with ``prefix``."""
    return [path.name for path in _FOLDER.glob(f"{prefix}*")]


def remove_regions(names: Iterable[str], own: str = "") -> set[str]:
    """Remove regions of processes that have ended, and give their memory back.

    The caller knows that they belong to a server that has ended. A region stays if it belongs to
    another user, or if a process still maps it; this process's own mapping of ``own`` does not
    count. A process that has the file open but not mapped can read nothing afterwards, because
    the file is truncated to zero bytes.

    Returns:
        The names of the regions that stay.
    """
    found = [name for name in names if _is_name(name) and (_FOLDER / name).is_file()]
    if not found:
        return set()
    in_use = _mapped_by_any() if found != [own] else set()
    for name in found:
        if str(_FOLDER / name) not in in_use or name == own:
            with contextlib.suppress(OSError):  # another process removed it
                _remove(_FOLDER / name)
    return {name for name in found if (_FOLDER / name).exists()}


def _remove(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.getuid() and stat.S_ISREG(status.st_mode):
            path.unlink()
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name and not name.startswith(".")


def _mapped_by_any() -> set[str]:
    """Return the files in /dev/shm that any process that we can look into has mapped."""
    found: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user
                found |= _mapped(process.name)
    return found


def _mapped(process: str) -> set[str]:
    """Return the files in /dev/shm that a process has mapped."""
    return set(_names(Path(f"/proc/{process}/maps").read_text(errors="replace")))


def _names(maps: str) -> Iterator[str]:
    start = f"{_FOLDER}/"
    for line in maps.splitlines():
        _, found, name = line.partition(start)
        if found:
            yield start + name
