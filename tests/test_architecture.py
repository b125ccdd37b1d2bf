"""The directions of imports that keep the house in order."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "paged_backend"
VALUES = {
    "config",
    "engine_args",
    "errors",
    "flags",
    "histogram",
    "outputs",
    "request",
    "sampling_params",
    "validation",
}

BUNDLED = "paged_backend.checkpoint.bundled"  # a folder with a tokenizer

# A room of the package -> the rooms that it may import besides the values and itself.
MAY_IMPORT = {
    "core": set(),
    "checkpoint": set(),
    "demo": {"checkpoint", "launch"},
    "models": {"checkpoint"},
    "runner": {"core", "models"},
    "text": {"checkpoint"},
    "engine": {"core", "runner"},
    "llm": {"checkpoint", "engine", "text"},
    "process": {"checkpoint", "core", "engine"},
    "serving": {"process", "text"},
    "launch": set(),
    "top": set(),
    "plan": {"checkpoint"},
    "bench": {"checkpoint", "engine", "models"},
    "cli": {"bench", "demo", "launch", "plan", "top"},
}


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, at any depth."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.add(node.module)
    return names


def modules(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_rooms_import_only_what_they_may(name):
    allowed = MAY_IMPORT[name] | VALUES | {name}
    files = [path for path in modules(PACKAGE) if room(path) == name]
    assert files
    for path in files:
        for module in imports(path):
            if module.startswith("paged_backend."):
                assert module.split(".")[1] in allowed, f"{path} imports {module}"


def test_every_room_has_a_rule():
    rooms = {room(path) for path in modules(PACKAGE)} - {"__init__"}
    assert rooms == set(MAY_IMPORT) | VALUES


def test_policy_knows_no_tensors_and_only_serving_knows_triton():
    for path in modules(PACKAGE):
        names = {module.split(".")[0] for module in imports(path)}
        if room(path) in VALUES | {"core"}:
            assert not names & {"torch", "numpy"}, path
        if room(path) != "serving":
            assert "triton_python_backend_utils" not in names, path


def test_kernels_know_tensors_only():
    for path in modules(ROOT / "kernels"):
        names = {module.split(".")[0] for module in imports(path)}
        assert not names & {"paged_backend", "paged_client", "transformers"}, path
    users = {room(path) for path in modules(PACKAGE) if "paged_kernels" in path.read_text()}
    assert users <= {"bench", "models", "runner"}


def test_the_engine_knows_nothing_of_the_load_tester_and_the_bench_a_part_of_it():
    for path in modules(PACKAGE):
        used = {name for name in imports(path) if name.startswith("paged_loadtest")}
        assert not used or room(path) in {"bench", "cli", "plan", "top"}, path
        if room(path) == "bench":
            names = {name.split(".")[1] for name in used}
            assert names <= {"machine", "request", "workloads"}, path


def test_the_load_tester_knows_clients_and_values_only():
    for path in modules(ROOT / "loadtest" / "paged_loadtest"):
        names = imports(path)
        assert not {name.split(".")[0] for name in names} & {"torch", "paged_kernels"}, path
        for name in names:
            if name.startswith("paged_backend"):
                assert name.split(".")[1] in VALUES or name == BUNDLED, f"{path} imports {name}"


def test_the_client_stands_alone():
    for path in modules(ROOT / "client"):
        names = {module.split(".")[0] for module in imports(path)}
        assert not names & {"torch", "paged_backend", "transformers"}, path


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("paged_client", ["torch", "transformers", "paged_backend", "fastapi", "pydantic"]),
        ("paged_client.gateway", ["torch", "transformers", "tokenizers", "paged_backend"]),
        ("paged_backend.serving.front_end", ["torch", "transformers"]),
        ("paged_backend.cli", ["torch", "transformers", "tritonclient", "aiohttp", "matplotlib"]),
        ("paged_backend.plan.planner", ["torch", "transformers", "numpy"]),
        ("paged_loadtest.workloads", ["torch", "transformers", "tritonclient", "rich"]),
        ("paged_backend.llm", ["zmq", "msgspec", "tritonclient", "triton"]),
        ("paged_backend.bench.decode", ["zmq", "msgspec", "tritonclient", "aiohttp"]),
    ],
)
def test_imports_stay_light(module, absent):
    code = f"import sys, {module}; print(*(m for m in {absent} if m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
