"""The rules about imports and devices that keep the code in order, for any checkout.

Each function takes the root of a checkout and returns the violations it finds, as sentences.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

PACKAGES = {
    "paged_backend": "paged_backend",
    "paged_kernels": "kernels/paged_kernels",
    "paged_client": "client/paged_client",
    "paged_loadtest": "loadtest/paged_loadtest",
}
VALUES = "values"  # what every other package may import

# A folder of paged_backend, or a tool -> what it may import besides the values and itself.
MAY_IMPORT: dict[str, set[str]] = {
    "values": set(),
    "core": set(),
    "checkpoint": set(),
    "quantization": {"checkpoint", "sandbox"},
    "models": {"checkpoint", "quantization"},
    "sampling": {"core"},
    "platforms": {"checkpoint", "core", "models", "quantization", "sampling"},
    "executor": {"core"},
    "embeddings": set(),
    "engine": {
        "checkpoint",
        "core",
        "embeddings",
        "executor",
        "grammar",
        "models",
        "platforms",
        "quantization",
        "speculation",
        "text",
    },
    "speculation": {"core"},
    "sandbox": set(),
    "text": {"checkpoint", "sandbox"},
    "parsers": set(),
    "grammar": {"core", "parsers", "sandbox", "text"},
    "process": {"checkpoint", "core", "engine", "grammar"},
    "dynamo": {"grammar", "process"},
    "serving": {"checkpoint", "embeddings", "grammar", "parsers", "process", "text"},
    "launch": set(),
    "demo": {"checkpoint", "launch", "scrape"},
    "machine": set(),
    "scrape": set(),
    "workloads": {"checkpoint"},
    "top": {"scrape"},
    "plan": {"checkpoint", "quantization"},
    "quantize": {"checkpoint", "quantization"},
    "bench": {
        "checkpoint",
        "core",
        "demo",
        "engine",
        "executor",
        "grammar",
        "launch",
        "machine",
        "models",
        "platforms",
        "sampling",
        "text",
        "workloads",
    },
    "cli": {
        "bench",
        "demo",
        "dynamo",
        "engine",
        "launch",
        "plan",
        "quantize",
        "top",
        "workloads",
    },
}
# A platform -> the other platforms that it may import; `select` alone knows all of them.
PLATFORMS = {
    "portable": set(),
    "cpu": {"portable"},
    "gpu": {"portable"},
    "simulated": {"gpu", "portable"},
}
SIMULATED_BENCH = "paged_backend.tools.bench.simulated_device"  # nothing else can choose it
SELECT = "paged_backend.platforms.select"
DEVICE = "paged_backend.platforms.gpu.device"  # everything that torch.cuda does
# Third-party packages -> the only places in paged_backend that may import them.
RESERVED = {
    "paged_kernels": {"bench", "platforms"},
    "triton_python_backend_utils": {"serving"},
    "dynamo": {"dynamo"},
    "ray": {"engine"},
    "paged_client": {"cli", "demo", "process", "top"},
    "paged_loadtest": set(),
    "gguf": {"bench", "checkpoint"},
}
LOADTEST_USES = {"machine", "scrape", "workloads"}  # tools that the load tester may use

MIN_NAMEPLATE_WORDS = 16

Imports = dict[str, set[str]]
"""For each module, the full names of all modules that it imports."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the rules ask of a module; its syntax tree has hundred times as many objects."""

    docstring: str
    imports: list[tuple[str, str]]  # the modules, and what is imported from them
    decisions: list[int]  # lines that ask which device there is
    uses_of_torch_cuda: list[int]  # lines


@functools.cache
def _facts(text: str) -> _Facts:
    """Read a module, which the rules ask again and again, once."""
    tree = ast.parse(text)
    facts = _Facts(ast.get_docstring(tree) or "", [], [], [])
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            facts.imports.extend(_imports_of(node))
        if _is_decision(node):
            facts.decisions.append(node.lineno)
        if _names_torch_cuda(node):
            facts.uses_of_torch_cuda.append(node.lineno)
    facts.decisions.sort()
    facts.uses_of_torch_cuda.sort()
    return facts


def modules(root: Path) -> dict[str, Path]:
    """Every module of the four packages, by its full name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


def imports(root: Path) -> Imports:
    """All imports at any depth: within functions and for type checkers, too."""
    known = modules(root)
    return {name: set(_imported(path.read_text(), known)) for name, path in known.items()}


def _imported(text: str, known: dict[str, Path]) -> Iterator[str]:
    for module, name in _facts(text).imports:
        submodule = f"{module}.{name}"
        yield submodule if name and submodule in known else module


def _imports_of(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """Return the modules that a statement imports, and what it imports from them."""
    if isinstance(node, ast.Import):
        return [(alias.name, "") for alias in node.names]
    return [] if node.module is None else [(node.module, alias.name) for alias in node.names]


def cycles(root: Path) -> list[str]:
    """Modules that import each other, directly or by way of others."""
    return _cycles(imports(root))


def folder_cycles(root: Path) -> list[str]:
    """Folders of paged_backend whose modules import each other, directly or by way of others."""
    graph: Imports = {}
    for name, names in imports(root).items():
        room = _room(name)
        if room is not None:
            others = {_room(other) for other in names} - {None, room}
            graph.setdefault(room, set()).update(str(other) for other in others)
    return _cycles(graph)


def loose_modules(root: Path) -> list[str]:
    """Modules of paged_backend that are in no folder."""
    files = (root / "paged_backend").glob("*.py")
    return [path.name for path in files if path.name != "__init__.py"]


def _cycles(graph: Imports) -> list[str]:
    state: dict[str, str] = {}
    found: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        state[name] = "open"
        for other in sorted(graph[name] & set(graph)):
            if state.get(other) == "open":
                found.append(" -> ".join((*path[path.index(other) :], other)))
            elif other not in state:
                visit(other, (*path, other))
        state[name] = "done"

    for name in sorted(graph):
        if name not in state:
            visit(name, (name,))
    return found


def missing_nameplates(root: Path) -> list[str]:
    """Packages whose docstring does not say in two sentences what lives there."""
    found = []
    for name, path in modules(root).items():
        if path.name == "__init__.py":
            if len(_facts(path.read_text()).docstring.split()) < MIN_NAMEPLATE_WORDS:
                found.append(f"{name} has no docstring of {MIN_NAMEPLATE_WORDS} words")
    return found


def wrong_directions(root: Path) -> list[str]:
    """Imports that go against the layers."""
    found = []
    for name, names in imports(root).items():
        room = _room(name)
        if room is None:
            continue
        allowed = MAY_IMPORT.get(room, set()) | {VALUES, room}
        for other in sorted(names):
            target = _room(other)
            if target is not None and target not in allowed:
                found.append(f"{name} imports {other}")
    return found


def wrong_platforms(root: Path) -> list[str]:
    """Platforms that import each other, and modules that choose a platform by themselves."""
    found = []
    for name, names in imports(root).items():
        own = _platform(name)
        for other in sorted(names):
            target = _platform(other)
            if target is None or name == SELECT:
                continue
            if target == "simulated" and name == SIMULATED_BENCH:
                continue
            if own is None or target not in PLATFORMS[own] | {own}:
                found.append(f"{name} imports {other}")
    return found


def wrong_libraries(root: Path) -> list[str]:
    """Modules that import a third-party package that is reserved for others."""
    found = []
    for name, names in imports(root).items():
        package, room = name.split(".")[0], _room(name)
        for other in sorted(names):
            library = other.split(".")[0]
            if package == "paged_backend" and room not in RESERVED.get(library, {room}):
                found.append(f"{name} imports {other}")
            if room in (VALUES, "core") and library in ("torch", "numpy"):
                found.append(f"{name} imports {other}")
            if not _may_use(package, room, other):
                found.append(f"{name} imports {other}")
    return found


def _may_use(package: str, room: str | None, other: str) -> bool:
    """Whether a package may import a module that is not its own."""
    library = other.split(".")[0]
    if package == "paged_kernels":
        return library not in ("paged_backend", "paged_client", "transformers")
    if package == "paged_client":
        return library not in ("torch", "paged_backend", "transformers")
    if package == "paged_loadtest":
        if library == "paged_backend":
            return _room(other) in {VALUES} | LOADTEST_USES
        return library not in ("torch", "paged_kernels")
    return True


def device_decisions(root: Path) -> list[str]:
    """Code of paged_backend that asks which device there is, outside of the two places for it."""
    return _lines_of_others(root, {SELECT, DEVICE}, lambda facts: facts.decisions)


def uses_of_torch_cuda(root: Path) -> list[str]:
    """Code of paged_backend outside of `platforms/gpu/device.py` that names `torch.cuda`."""
    return _lines_of_others(root, {DEVICE}, lambda facts: facts.uses_of_torch_cuda)


def _lines_of_others(
    root: Path, exempt: set[str], lines_of: Callable[[_Facts], list[int]]
) -> list[str]:
    """The lines that are found in modules of paged_backend, except in those that are exempt."""
    found = []
    for name, path in modules(root).items():
        if name.split(".")[0] == "paged_backend" and name not in exempt:
            found += [f"{name}, line {line}" for line in lines_of(_facts(path.read_text()))]
    return found


def _is_decision(node: ast.AST) -> TypeGuard[ast.expr]:
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        return any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)
    if isinstance(node, ast.Attribute):
        return node.attr in ("is_cuda", "is_available")
    return isinstance(node, ast.Constant) and node.value == "TRITON_INTERPRET"


def _names_torch_cuda(node: ast.AST) -> TypeGuard[ast.expr | ast.stmt]:
    if isinstance(node, ast.Attribute):
        owner = node.value
        return node.attr == "cuda" and isinstance(owner, ast.Name) and owner.id == "torch"
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        names = [".".join(filter(None, pair)) for pair in _imports_of(node)]
        return any(name.startswith("torch.cuda") for name in names)
    return False


def _room(name: str) -> str | None:
    """The package or module of paged_backend that a module belongs to."""
    package, *rest = name.split(".")
    if rest[:1] == ["tools"]:  # each tool has its own rules
        rest = rest[1:]
    return rest[0] if package == "paged_backend" and rest else None


def _platform(name: str) -> str | None:
    parts = name.split(".")
    if parts[:2] == ["paged_backend", "platforms"] and len(parts) > 2 and parts[2] in PLATFORMS:
        return parts[2]
    return None
