"""Installs our backends into a server's backend directory, for models without a model.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from paged_backend.launch.storage import writing
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

BACKEND_NAMES = ("paged", "vllm")

_IMPORT = "from paged_backend.serving.model import TritonPythonModel"
_MODEL = f'''\
"""What tritonserver runs for each model of this backend; the code is in the installed package."""

{_IMPORT}

__all__ = ["TritonPythonModel"]
'''

_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")


def install_backend(directory: Path, names: Sequence[str] = BACKEND_NAMES) -> list[Path]:
    """Create a folder for each backend name in a backend directory; returns the folders.

    A second call changes nothing. Raises ConfigError for a directory that cannot be written, an
    invalid name, and a folder with another backend; nothing is written in these cases.
    """
    if not directory.is_dir():
        raise ConfigError(f"no folder at {directory}: give the backend directory of a tritonserver")
    folders = [directory / _checked(name) for name in names]
    for folder in folders:
        _check_vacant(folder)
    with writing(directory):
        for folder in folders:
            folder.mkdir(exist_ok=True)
            (folder / "model.py").write_text(_MODEL)
    return folders


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"backend name {shorten(name)}: use lowercase letters, digits and '_', starting with "
            "a letter or a digit"
        )
    if name == "python":
        raise ConfigError("backend name python is taken by the server's own backend")
    return name


def _check_vacant(folder: Path) -> None:
    """Refuse a folder that has anything but our file and Python's cache."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is there already and is not a folder")
    others = sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")
    if not others:
        return
    model = folder / "model.py"
    if others != ["model.py"] or not model.is_file() or _IMPORT not in model.read_text():
        raise ConfigError(
            f"{folder} holds another backend ({', '.join(others[:4])}): move it away first"
        )
