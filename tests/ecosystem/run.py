"""Runs other projects' clients against a real server, each in a separate environment.

``make ecosystem`` runs every script of the folder ``scenarios``; names after
``python tests/ecosystem/run.py`` select some of them. A script lists its packages as inline script
metadata (PEP 723), the tool itself first. It finds the server in the variables of `variables_of`,
prints what it has checked, and fails with an exception. The environments are kept in
``.ecosystem``, so that a second run starts at once.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paged_backend.checkpoint.bundled import TOOLS_MODEL_DIR
from paged_backend.launch.repository import write_pipeline
from paged_backend.launch.server_process import RunningServer, start_server
from paged_backend.tools.demo import load_questions
from paged_backend.tools.demo.lookup import QUESTIONS_FILE

TESTS = Path(__file__).resolve().parents[1]
SCENARIOS = Path(__file__).with_name("scenarios")
ENVIRONMENTS = TESTS.parent / ".ecosystem"
MODEL = "paged_llm"
TIMEOUT_S = 600
_METADATA = re.compile(r"(?m)^# /// script$\n((?:^#(?: .*)?$\n)+)^# ///$")

sys.path.insert(0, str(TESTS))
from gateway.gateways import running_gateway  # noqa: E402


@dataclass(frozen=True)
class Result:
    """The result of a scenario."""

    name: str
    version: str
    problem: str  # empty if it passed
    seconds: float


def main(names: list[str]) -> int:
    """Run the scenarios of these names, or all; return 1 if one fails, else 0."""
    scripts = sorted(SCENARIOS.glob("*.py"))
    chosen = [script for script in scripts if not names or script.stem in names]
    results = []
    with serve() as variables:
        for script in chosen:
            print(f"== {script.stem}", flush=True)
            results.append(run(script, variables))
    table = Table("client", "version", "result", "seconds")
    for result in results:
        table.add_row(
            result.name, result.version, result.problem or "passes", f"{result.seconds:.0f}"
        )
    Console().print(table)
    return 1 if any(result.problem for result in results) else 0


@contextmanager
def serve() -> Iterator[dict[str, str]]:
    """Serve the bundled model with tools behind all interfaces."""
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        write_pipeline(repository, MODEL, {"model": "demo-tools"}, instances=1)
        with (
            start_server(repository) as server,
            running_gateway("--triton", server.grpc_url) as gateway,
        ):
            yield variables_of(server, gateway.address)


def variables_of(server: RunningServer, gateway: str) -> dict[str, str]:
    """Return the variables that tell a scenario where the server is and what it can be asked."""
    question = load_questions(QUESTIONS_FILE)[0]
    return {
        "OPENAI_BASE_URL": f"http://{gateway}/v1",
        "OPENAI_API_BASE": f"http://{gateway}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": f"http://{gateway}",
        "ANTHROPIC_API_KEY": "none",
        "TRITON_HTTP": server.http_url,
        "TRITON_GRPC": server.grpc_url,
        "MODEL": MODEL,
        "TOKENIZER": str(TOOLS_MODEL_DIR),
        "QUESTION": question.question,
        "NAME": question.name,
        "RESULT": question.answer,
        "NO_PROXY": "127.0.0.1,localhost",
    }


def run(script: Path, variables: Mapping[str, str]) -> Result:
    """Run one scenario in its environment, which is made if it is not there."""
    metadata = metadata_of(script)
    started = time.monotonic()
    try:
        python = environment(script.stem, metadata["dependencies"])
    except subprocess.CalledProcessError as error:
        return Result(script.stem, "", f"cannot be installed: {error}", 0)
    version = version_of(python, metadata["dependencies"][0])
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    try:
        done = subprocess.run(
            [python, "-P", script], env={**os.environ, **variables, "PATH": path}, timeout=TIMEOUT_S
        )
        problem = f"fails with status {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"not done after {TIMEOUT_S} s"
    return Result(script.stem, version, problem, time.monotonic() - started)


def metadata_of(script: Path) -> dict[str, Any]:
    """Return the inline metadata of a script (PEP 723)."""
    found = _METADATA.search(script.read_text())
    if found is None:
        raise ValueError(f"{script} has no inline metadata")
    return tomllib.loads(re.sub(r"(?m)^# ?", "", found[1]))


def environment(name: str, dependencies: list[str]) -> Path:
    """Return the interpreter of an environment with these packages."""
    folder = ENVIRONMENTS / name
    wanted = json.dumps(dependencies)
    python, installed = folder / "bin" / "python", folder / "installed.json"
    if not installed.exists() or installed.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *dependencies], check=True)
        installed.write_text(wanted)
    return python


def version_of(python: Path, dependency: str) -> str:
    """Return the installed version of a dependency, with its name."""
    name = re.split(r"[\[<>=~! ]", dependency)[0]
    code = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return f"{name} {done.stdout.strip()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
