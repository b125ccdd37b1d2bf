"""The environment that a measurement depends on besides the command's options."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def circumstances(packages: Iterable[str]) -> dict[str, str]:
    """Return date, commit, machine and versions; the variable `GIT_COMMIT` overrides git."""
    commit = os.environ.get("GIT_COMMIT") or output_of(
        "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"
    )
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit or "unknown",
        "device": cpu_property("model name") or platform.machine(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **_versions(packages),
    }


def output_of(*command: str) -> str:
    """Return the stdout of a command; empty if it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _versions(packages: Iterable[str]) -> dict[str, str]:
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def cpu_property(name: str) -> str:
    """Return a property of the first processor, such as its flags; empty if it has none."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return ""
