"""The circumstances that a figure depends on besides the options of its command."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def circumstances(packages: Iterable[str]) -> dict[str, str]:
    """Date, code, machine and versions; `GIT_COMMIT` names the code where git cannot."""
    commit = os.environ.get("GIT_COMMIT") or output_of(
        "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"
    )
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit or "unknown",
        "device": _cpu_name(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **_versions(packages),
    }


def output_of(*command: str) -> str:
    """What a command prints; nothing where it fails or is not installed."""
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


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
