"""The circumstances that a figure depends on besides the engine's code."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = ("torch", "triton", "transformers", "numpy")
_COPIES = 20  # timed; as many before them bring the memory's clock up


def environment(device: torch.device) -> dict[str, str]:
    """Date, code, machine and versions; `GIT_COMMIT` names the code where git cannot."""
    commit = os.environ.get("GIT_COMMIT") or _output_of(
        "git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"
    )
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": commit or "unknown",
        **_device(device),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        **_versions(),
    }


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written ones counted, of a copy far larger than any cache.

    The buffers are 2 GiB, or a quarter of what is left on a small GPU, and 256 MiB on a CPU.
    """
    source = torch.arange(_buffer_bytes(device) // 8, device=device)  # int64
    target = torch.empty_like(source)
    for _ in range(_COPIES):
        target.copy_(source)
    seconds = statistics.median(_copy_seconds(target, source) for _ in range(_COPIES))
    bandwidth = 2 * source.nbytes / seconds
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return bandwidth


def _buffer_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 2**28
    free, _ = torch.cuda.mem_get_info(device)
    return min(2**31, free // 4)


def _copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    if source.device.type == "cpu":
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in its library
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in its library
    begin.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _device(device: torch.device) -> dict[str, str]:
    if device.type == "cpu":
        return {"device": _cpu_name()}
    driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": driver.partition("\n")[0] or "unknown",
        "cuda": str(torch.version.cuda),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _output_of(*command: str) -> str:
    """What a command prints; nothing where it fails or is not installed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
