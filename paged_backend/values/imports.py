"""Imports that take less processor time."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without_collections() -> Iterator[None]:
    """Import modules without garbage collections, at the start of a process.

    Imported modules stay, so collections among them find nothing. They take a sixth of the
    processor time of importing torch. What exists at the end is in no later collection either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def import_alone(name: str) -> ModuleType:
    """Import a module without the code of its packages, such as ``package/__init__.py``.

    A later import of the packages runs their code. The module must need nothing of its packages
    but other modules.

    Args:
        name: full name of the module.

    Raises:
        ImportError: there is no such module, or it needs the code of its packages.
    """
    parts = name.split(".")
    stand_ins = []
    try:
        for number in range(1, len(parts)):
            package = ".".join(parts[:number])
            if package not in sys.modules:
                sys.modules[package] = _without_code(package)
                stand_ins.append(package)
        return importlib.import_module(name)
    finally:
        for package in stand_ins:
            del sys.modules[package]


def _without_code(package: str) -> ModuleType:
    """Return a package that knows its folder and nothing else."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)
    return importlib.util.module_from_spec(spec)
