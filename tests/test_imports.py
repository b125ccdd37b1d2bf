"""Imports that take less time: what they leave behind, and what they refuse."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from paged_backend.values.imports import import_alone, without_collections


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package in a package: its code fails, and one of its modules needs it."""
    inner = tmp_path / "outer_of_test/inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("raise RuntimeError('the code of a package')")
    (inner / "__init__.py").write_text("NAME = 'inner'")
    (inner / "other.py").write_text("VALUE = 7")
    (inner / "light.py").write_text("from .other import VALUE")
    (inner / "heavy.py").write_text("from . import NAME")
    monkeypatch.syspath_prepend(tmp_path)
    return "outer_of_test.inner"


def test_a_module_is_imported_without_the_code_of_its_packages(package: str) -> None:
    assert import_alone(f"{package}.light").VALUE == 7
    assert package not in sys.modules
    with pytest.raises(RuntimeError, match="the code of a package"):
        __import__("outer_of_test")


@pytest.mark.parametrize("module", ["heavy", "absent"])
def test_a_module_that_is_absent_or_needs_its_package_is_an_error(
    package: str, module: str
) -> None:
    with pytest.raises(ImportError):
        import_alone(f"{package}.{module}")
    assert package not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="absent_package"):
        import_alone("absent_package.module")


def test_chats_are_rendered_by_transformers_that_is_imported_later() -> None:
    code = (
        "from paged_backend.text import template_renderer as own\n"
        "import transformers\n"
        "from transformers.utils.chat_template_utils import render_jinja_template as render\n"
        "print(transformers.__version__ > '5', render is own._TEMPLATES.render_jinja_template)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True True\n"


def test_what_is_imported_without_collections_is_in_none() -> None:
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ZeroDivisionError), without_collections():
            assert not gc.isenabled()
            kept = [[]]
            raise ZeroDivisionError
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
        assert not any(kept is other for other in gc.get_objects())
    finally:
        gc.unfreeze()
