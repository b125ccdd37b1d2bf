"""Measures what a beam search costs: its time over that of as many samples, in turn."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paged_backend.checkpoint.hub import resolve_checkpoint
from paged_backend.engine.engine import Engine
from paged_backend.engine.executors import open_executor
from paged_backend.tools.bench.comparison import Comparison, Pair
from paged_backend.tools.bench.in_turn import REQUESTS_PER_SEQUENCE, run_requests
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import option_error
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 128
_FIRST_TOKEN = 16  # ids below it may be special tokens
HEADER = "width  requests at once  samples    beams  time of beams / time of samples"


@dataclass(frozen=True, slots=True)
class BeamsFigures:
    """Tokens per second of all beams (`engine`) and of as many samples (`peer`)."""

    comparison: Comparison
    width: int
    at_once: int

    @property
    def times(self) -> list[float]:
        """The time of the beams of each round, over that of the samples."""
        return [1 / ratio for ratio in self.comparison.ratios]

    def as_dict(self) -> dict[str, Any]:
        """Return the values to save, rounds included."""
        values = {"width": self.width, "at_once": self.at_once, "time": self._time}
        return {**self.comparison.as_dict(), **values}

    def line(self) -> str:
        """Return a row for people."""
        return (
            f"{self.width:5}  {self.at_once:16}  {self.comparison.peer or 0:7.0f}  "
            f"{self.comparison.engine:7.0f}  {self._time:.2f} "
            f"({min(self.times):.2f} to {max(self.times):.2f})"
        )

    @property
    def _time(self) -> float:
        return statistics.median(self.times)


class BeamsBench:
    """An engine that searches and samples.

    Args:
        config: the engine's options.

    Raises:
        ConfigError: an option is wrong, or the model generates nothing.
    """

    def __init__(self, config: EngineConfig) -> None:
        executor = open_executor(config, resolve_checkpoint(config).model)
        if executor.info.pooling is not None:
            raise option_error("task", "must be generate: beams are answers")
        self._engine = Engine(config, executor)
        self._num_requests = 0

    def measure(
        self, widths: Sequence[int], numbers: Sequence[int], rounds: int
    ) -> Iterator[BeamsFigures]:
        """Yield the figures of each width and number of requests at once.

        Raises:
            InvalidRequest: a width is more than the options allow.
        """
        for width in widths:
            samples = SamplingParams(
                temperature=1.0, seed=0, n=width, max_tokens=_ANSWER_TOKENS, ignore_eos=True
            )
            beams = replace(samples, temperature=0.0, seed=None, beam_width=width)
            for at_once in numbers:
                label = f"beams, width {width}, {at_once} at once (tokens/s)"
                comparison = Comparison("beams", label, is_rate=True)
                for number in range(rounds + 1):
                    rates: dict[SamplingParams, float] = {}
                    for params in (samples, beams) if number % 2 else (beams, samples):
                        rates[params] = self._run(params, at_once)
                    if number:  # the first round captures graphs
                        comparison.rounds.append(Pair(rates[beams], rates[samples]))
                yield BeamsFigures(comparison, width, at_once)

    def _run(self, params: SamplingParams, at_once: int) -> float:
        number = REQUESTS_PER_SEQUENCE * at_once
        return run_requests(self._engine, [self._request(params) for _ in range(number)], at_once)

    def _request(self, params: SamplingParams) -> Request:
        self._num_requests += 1
        rng, vocab_size = random.Random(self._num_requests), self._engine.limits.vocab_size
        prompt = [rng.randrange(_FIRST_TOKEN, vocab_size) for _ in range(_PROMPT_TOKENS)]
        return Request(str(self._num_requests), prompt, params)
