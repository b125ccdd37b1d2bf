"""Imports that take less time: what they leave behind, and what they refuse."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paged_backend.values.garbage import without_collections
from paged_backend.values.imports import import_alone, when_used


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package in a package: its code fails, and one of its modules needs it."""
    inner = tmp_path / "outer_of_test/inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text("raise RuntimeError('the code of a package')")
    (inner / "__init__.py").write_text("NAME = 'inner'")
    (inner / "other.py").write_text("VALUE = 7")
    (inner / "light.py").write_text("from .other import VALUE")
    (inner / "heavy.py").write_text("from . import NAME")
    monkeypatch.syspath_prepend(tmp_path)
    yield "outer_of_test.inner"
    for name in [name for name in sys.modules if name.startswith("outer_of_test")]:
        del sys.modules[name]


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


def run_alone(code: str) -> str:
    """What a new process prints that runs this code."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout


def test_a_module_runs_its_code_when_its_first_name_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "late_of_test.py").write_text("print('code runs')\nVALUE = 7")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(sys.meta_path)
    with when_used("late_of_test"):
        import late_of_test  # type: ignore[import-not-found]
    assert sys.meta_path == before
    assert capsys.readouterr().out == ""
    assert late_of_test.VALUE == 7
    assert capsys.readouterr().out == "code runs\n"


def test_a_process_that_renders_chats_does_not_load_numpy() -> None:
    code = """
import sys
from paged_backend.text.template_renderer import TemplateRenderer
messages = [{"role": "user", "content": "x"}]
request = {"chat_template": "{{ messages[0].content }}!", "messages": messages}
print(TemplateRenderer().render(request), "numpy.core" in sys.modules)
"""
    assert run_alone(code) == "x! False\n"


def test_chats_are_rendered_by_transformers_that_is_imported_later() -> None:
    code = (
        "from paged_backend.text import template_renderer as own\n"
        "import transformers\n"
        "from transformers.utils.chat_template_utils import render_jinja_template as render\n"
        "print(transformers.__version__ > '5', render is own._TEMPLATES.render_jinja_template)"
    )
    assert run_alone(code) == "True True\n"


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
        if not frozen:  # else the modules of all tests would be in each collection again
            gc.unfreeze()


def test_a_loaded_engine_has_almost_nothing_to_collect(tmp_path: Path) -> None:
    code = f"""
import gc, os
from pathlib import Path
from paged_backend.process import engine_loop
from paged_backend.process.lifetime import ProcessId
engine_loop.EngineLoop.run = lambda loop: print(len(gc.get_objects()) - len(gc.get_objects(0)))
folder = Path({str(tmp_path)!r})
engine_loop.serve('{{"model": "demo"}}', folder, ProcessId.of(os.getpid()), 0)
"""
    assert int(run_alone(code)) < 1000  # 90,000 otherwise
