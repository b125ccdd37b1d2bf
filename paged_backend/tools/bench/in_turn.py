"""What benchmarks share that run requests in an engine of this process, in turn with others."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paged_backend.checkpoint.hub import resolve_checkpoint
from paged_backend.engine.engine import Engine
from paged_backend.engine.executors import open_executor
from paged_backend.platforms.select import resolve_device
from paged_backend.tools.bench.comparison import Comparison
from paged_backend.tools.bench.environment import environment
from paged_backend.values.config import EngineConfig
from paged_backend.values.json_file import write_json
from paged_backend.values.request import Request

REQUESTS_PER_SEQUENCE = 2
"""The number of requests of a round, for each that is open at once."""

PROMPT_TOKENS, ANSWER_TOKENS = 64, 128
FIRST_TOKEN = 16  # ids below it may be special tokens


@dataclass(frozen=True, slots=True)
class TurnFigures:
    """Tokens per second of one side (`engine`) and of the other (`peer`), over all rounds."""

    comparison: Comparison
    at_once: int

    def as_dict(self) -> dict[str, Any]:
        """Return the values to save, rounds included."""
        names = [spec.name for spec in fields(self) if spec.name != "comparison"]
        return {**self.comparison.as_dict(), **{name: getattr(self, name) for name in names}}

    def line(self) -> str:
        """Return a row for people: both rates, and the median of the ratios with their range."""
        ratios, peer = self.comparison.ratios, self.comparison.peer
        assert peer is not None
        median = sorted(ratios)[len(ratios) // 2]
        return (
            f"{self.comparison.name:8} {self.at_once:7}  {peer:8.0f}  "
            f"{self.comparison.engine:8.0f}  "
            f"{median:5.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def open_engine(config: EngineConfig) -> Engine:
    """Load the checkpoint of these options.

    Raises:
        ConfigError: the options or the checkpoint cannot be used.
    """
    return Engine(config, open_executor(config, resolve_checkpoint(config).model))


def random_prompt(seed: int, vocab_size: int) -> list[int]:
    """Return `PROMPT_TOKENS` random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(PROMPT_TOKENS)]


def rates_in_turn(
    sides: Sequence[Callable[[int], float]], rounds: int
) -> Iterator[tuple[float, ...]]:
    """Yield the rates of all sides in each round; another side is the first one each time.

    Args:
        sides: measure a rate in the round of a number.
        rounds: number of rounds, after one that captures graphs and does not count.
    """
    for number in range(rounds + 1):
        first = number % len(sides)
        order = [*range(first, len(sides)), *range(first)]
        rates = {index: sides[index](number) for index in order}
        if number:
            yield tuple(rates[index] for index in range(len(sides)))


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


def save(path: Path, figures: Sequence[TurnFigures], command: str, device: str) -> None:
    """Write the figures and the environment as JSON; `device` is the engine's option."""
    values = {
        "command": command,
        "environment": environment(resolve_device(device)),
        "figures": [row.as_dict() for row in figures],
    }
    write_json(path, values, indent=2)
