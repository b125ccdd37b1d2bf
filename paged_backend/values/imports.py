"""Imports that take less processor time."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import LazyLoader
from types import ModuleType


@contextmanager
def when_used(name: str) -> Iterator[None]:
    """Import modules so that one that they import runs its code when its first name is read.

    Args:
        name: name of a module without a package, which stays as it is if it has been imported.
    """
    finder = _WhenUsed(name)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _WhenUsed(MetaPathFinder):
    """Finds one module, for which the lazy loader of the standard library stands at first."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module; None for any other module."""
        spec = PathFinder.find_spec(name, path, target) if name == self._name else None
        if spec is not None and spec.loader is not None:
            spec.loader = LazyLoader(spec.loader)
        return spec


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
