"""What benchmarks share that run requests in an engine of this process, in turn with others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from paged_backend.engine.engine import Engine
from paged_backend.tools.bench.comparison import Comparison
from paged_backend.tools.bench.environment import environment
from paged_backend.values.json_file import write_json
from paged_backend.values.request import Request

REQUESTS_PER_SEQUENCE = 2
"""The number of requests of a round, for each that is open at once."""


class Figures(Protocol):
    """A row of figures."""

    def as_dict(self) -> dict[str, Any]:
        """Return the values to save, rounds included."""
        ...

    def line(self) -> str:
        """Return a row for people."""
        ...


def run_requests(engine: Engine, requests: Sequence[Request], at_once: int) -> float:
    """Run all requests, at most `at_once` at a time.

    Returns:
        The tokens of all completions, per second.
    """
    waiting = list(reversed(requests))
    unfinished: Counter[str] = Counter()  # completions by request_id
    started = time.perf_counter()
    while waiting or unfinished:
        while waiting and len(unfinished) < at_once:
            request = waiting.pop()
            engine.add_request(request)
            unfinished[request.request_id] = request.params.n
        for output in engine.step():
            if output.finish_reason is not None:
                unfinished[output.request_id] -= 1
        unfinished = +unfinished
    num_tokens = sum(request.params.n * (request.params.max_tokens or 0) for request in requests)
    return num_tokens / (time.perf_counter() - started)


def rates_and_ratio(comparison: Comparison) -> str:
    """Return cells for people: both rates, and the median of the ratios with their range."""
    ratios = comparison.ratios
    assert comparison.peer is not None
    median = sorted(ratios)[len(ratios) // 2]
    return (
        f"{comparison.peer:8.0f}  {comparison.engine:8.0f}  "
        f"{median:5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def save(path: Path, figures: Sequence[Figures], command: str) -> None:
    """Write the figures of a CPU and the environment as JSON."""
    values = {
        "command": command,
        "environment": environment(torch.device("cpu")),
        "figures": [row.as_dict() for row in figures],
    }
    write_json(path, values, indent=2)
