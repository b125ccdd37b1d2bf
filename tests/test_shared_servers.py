"""Files of tests that use one server are one piece of work for pytest-xdist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from shared_servers import FILES_OF, SharedServerScheduling

TESTS = Path(__file__).parent
# Names of fixtures that need the first one.
NEEDED_BY = {
    "embedder": {"embedder"},
    "pipeline": {"pipeline"},
    "tool_server": {"tool_server"},
    "tools_gateway": {"tools_gateway", "tools_api", "claude"},
}


def arguments_of(file: Path) -> set[str]:
    """The arguments of the tests and fixtures of a file."""
    functions = (node for node in ast.parse(file.read_text()).body if hasattr(node, "args"))
    return {argument.arg for function in functions for argument in function.args.args}


@pytest.mark.parametrize("fixture", FILES_OF)
def test_all_files_that_use_a_server_are_listed(fixture: str) -> None:
    found = {
        str(file.relative_to(TESTS))
        for file in TESTS.rglob("test_*.py")
        if "mark.server" in file.read_text() and arguments_of(file) & NEEDED_BY[fixture]
    }
    assert found == set(FILES_OF[fixture])


def test_listed_files_run_together_and_others_by_themselves() -> None:
    scheduling = object.__new__(SharedServerScheduling)
    for fixture, files in FILES_OF.items():
        assert {scheduling._split_scope(f"tests/{file}::test_x[1]") for file in files} == {fixture}
    assert scheduling._split_scope("tests/test_x.py::test_y[a::b]") == "tests/test_x.py"
