"""The rules of `architecture.py` hold, and each catches a violation of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import architecture
import pytest

ROOT = Path(__file__).parent.parent
RULES = [
    architecture.cycles,
    architecture.folder_cycles,
    architecture.loose_modules,
    architecture.missing_nameplates,
    architecture.wrong_directions,
    architecture.wrong_platforms,
    architecture.wrong_libraries,
    architecture.device_decisions,
    architecture.uses_of_torch_cuda,
]
Rule = Callable[[Path], list[str]]


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_holds(rule: Rule) -> None:
    assert rule(ROOT) == []


def test_every_module_has_a_rule() -> None:
    rooms = {architecture._room(name) for name in architecture.modules(ROOT)} - {None}
    assert rooms == set(architecture.MAY_IMPORT)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copy")
    for folder in architecture.PACKAGES.values():
        ignored = shutil.ignore_patterns("__pycache__", "model")
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored)
    return root


@pytest.mark.parametrize(
    ("rule", "file", "line", "message"),
    [
        (
            architecture.cycles,
            "paged_backend/core/sequence.py",
            "from paged_backend.core.scheduler import Scheduler",
            "paged_backend.core.scheduler -> ",
        ),
        (
            architecture.cycles,
            "paged_backend/values/errors.py",
            "def f():\n    import paged_backend.values.config",
            "paged_backend.values.errors",
        ),
        (
            architecture.folder_cycles,
            "paged_backend/text/tokenizer.py",
            "def f():\n    import paged_backend.grammar.client",
            "grammar -> text -> grammar",
        ),
        (
            architecture.wrong_directions,
            "paged_backend/core/scheduler.py",
            "import paged_backend.engine.worker",
            "paged_backend.core.scheduler imports paged_backend.engine.worker",
        ),
        (
            architecture.wrong_directions,
            "paged_backend/models/decoder.py",
            "from paged_backend.platforms.portable import layers",
            "paged_backend.models.decoder imports paged_backend.platforms.portable.layers",
        ),
        (
            architecture.wrong_directions,
            "paged_backend/process/wire.py",
            "from paged_backend.serving.requests import answer",
            "paged_backend.process.wire imports paged_backend.serving.requests.answer",
        ),
        (
            architecture.wrong_platforms,
            "paged_backend/platforms/portable/linear.py",
            "from paged_backend.platforms.gpu.transfer import Transfer",
            "paged_backend.platforms.portable.linear imports paged_backend.platforms.gpu.transfer",
        ),
        (
            architecture.wrong_platforms,
            "paged_backend/engine/worker.py",
            "from paged_backend.platforms.cpu.platform import CpuPlatform",
            "paged_backend.engine.worker imports paged_backend.platforms.cpu.platform",
        ),
        (
            architecture.wrong_libraries,
            "paged_backend/core/block_pool.py",
            "import torch",
            "paged_backend.core.block_pool imports torch",
        ),
        (
            architecture.wrong_libraries,
            "paged_backend/engine/engine.py",
            "import triton_python_backend_utils",
            "paged_backend.engine.engine imports triton_python_backend_utils",
        ),
        (
            architecture.wrong_libraries,
            "kernels/paged_kernels/attention_params.py",
            "import paged_backend.values.request",
            "paged_kernels.attention_params imports paged_backend.values.request",
        ),
        (
            architecture.wrong_libraries,
            "client/paged_client/__init__.py",
            "import torch.nn",
            "paged_client imports torch.nn",
        ),
        (
            architecture.wrong_libraries,
            "loadtest/paged_loadtest/timeline.py",
            "import paged_backend.engine.engine",
            "paged_loadtest.timeline imports paged_backend.engine.engine",
        ),
        (
            architecture.wrong_libraries,
            "paged_backend/tools/top/source.py",
            "import paged_loadtest.bench",
            "paged_backend.tools.top.source imports paged_loadtest.bench",
        ),
        (
            architecture.device_decisions,
            "paged_backend/sampling/draws.py",
            'def f(x): return x.device.type == "cpu"',
            "paged_backend.sampling.draws, line",
        ),
        (
            architecture.device_decisions,
            "paged_backend/engine/worker.py",
            "def f(x): return x.is_cuda",
            "paged_backend.engine.worker, line",
        ),
        (
            architecture.device_decisions,
            "paged_backend/tools/bench/decode.py",
            'import os\nos.environ.get("TRITON_INTERPRET")',
            "paged_backend.tools.bench.decode, line",
        ),
        (
            architecture.uses_of_torch_cuda,
            "paged_backend/platforms/gpu/transfer.py",
            "def f(event: torch.cuda.Event): ...",
            "paged_backend.platforms.gpu.transfer, line",
        ),
        (
            architecture.uses_of_torch_cuda,
            "paged_backend/platforms/gpu/batch.py",
            "from torch import cuda",
            "paged_backend.platforms.gpu.batch, line",
        ),
        (
            architecture.uses_of_torch_cuda,
            "paged_backend/tools/bench/decode.py",
            "import torch.cuda.graphs",
            "paged_backend.tools.bench.decode, line",
        ),
    ],
)
def test_a_violation_is_caught(copy: Path, rule: Rule, file: str, line: str, message: str) -> None:
    path = copy / file
    before = path.read_text()
    path.write_text(f"{before}\n{line}\n")
    try:
        found = rule(copy)
    finally:
        path.write_text(before)
    assert found and any(message in violation for violation in found)


def test_a_package_without_a_docstring_is_found(copy: Path) -> None:
    path = copy / "paged_backend/core/__init__.py"
    before = path.read_text()
    path.write_text('"""Schedules."""')
    try:
        found = architecture.missing_nameplates(copy)
    finally:
        path.write_text(before)
    assert found == ["paged_backend.core has no docstring of 16 words"]


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("paged_client", ["torch", "transformers", "paged_backend", "fastapi", "pydantic"]),
        ("paged_client.gateway", ["torch", "transformers", "tokenizers", "paged_backend"]),
        ("paged_backend.serving.requests.front_end", ["torch", "transformers", "tritonclient"]),
        (
            "paged_backend.text.template_renderer",
            ["torch", "transformers", "transformers.utils"],
        ),
        ("paged_backend.cli", ["torch", "transformers", "tritonclient", "aiohttp", "matplotlib"]),
        ("paged_backend.tools.plan.planner", ["torch", "transformers", "numpy"]),
        ("paged_backend.tools.workloads", ["torch", "transformers", "tritonclient", "rich"]),
        (
            "paged_backend.engine.llm, paged_backend.tools.bench.decode",
            ["zmq", "msgspec", "tritonclient", "triton", "llguidance", "gguf", "aiohttp"],
        ),
    ],
)
def test_imports_stay_light(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print(*(m for m in {absent} if m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_a_process_that_only_completes_a_configuration_imports_no_front_end() -> None:
    absent = ["paged_backend.serving.requests.front_end", "tokenizers", "zmq", "jinja2"]
    code = (
        "import sys, types\n"
        "sys.modules['triton_python_backend_utils'] = types.ModuleType('of the server')\n"
        "from paged_backend.serving.model import TritonPythonModel\n"
        f"print(TritonPythonModel.__name__, *(m for m in {absent} if m in sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "TritonPythonModel\n"
