"""The Helm chart, rendered by a real helm."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
CHART = ROOT / "docker/helm/paged-backend"
VALUES = [CHART / "values.yaml", *sorted((CHART / "examples").glob("*.yaml"))]
RELEASE = "llm"
NAMESPACE = "models"

Manifest = dict[str, Any]  # one object of Kubernetes


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm; skips the test where there is none."""
    path = os.pathsep.join([str(ROOT / ".helm"), os.environ["PATH"]])
    program = shutil.which("helm", path=path)
    if program is None:
        pytest.skip("helm is not installed (make install fetches it)")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)


def template(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Render the chart."""
    return helm("template", RELEASE, str(CHART), "--namespace", NAMESPACE, *arguments)


@cache
def objects(values: Path, *flags: str) -> list[Manifest]:
    """Return what the chart renders with a file of values."""
    done = template("--values", str(values), *flags)
    assert done.returncode == 0, done.stderr
    return [manifest for manifest in yaml.safe_load_all(done.stdout) if manifest]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Return the objects of a kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return an object."""
    (found,) = (m for m in of_kind(manifests, kind) if m["metadata"]["name"] == name)
    return found


def pods(manifests: list[Manifest]) -> Iterator[Manifest]:
    """Yield a Pod for each template of one, with the labels that it will have."""
    for manifest in manifests:
        match manifest["kind"]:
            case "StatefulSet" | "Deployment":
                yield {"apiVersion": "v1", "kind": "Pod", **manifest["spec"]["template"]}
            case "LeaderWorkerSet":
                templates = manifest["spec"]["leaderWorkerTemplate"]
                for name in ("leaderTemplate", "workerTemplate"):
                    yield {"apiVersion": "v1", "kind": "Pod", **templates[name]}
            case "LLMInferenceService":
                spec = manifest["spec"]["template"]
                yield {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": spec}


def container(manifests: list[Manifest], name: str) -> Manifest:
    """Return the only container of this name."""
    (found,) = (
        c for pod in pods(manifests) for c in pod["spec"]["containers"] if c["name"] == name
    )
    return found
