"""Measures what a beam search costs: its time over that of as many samples, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paged_backend.tools.bench.comparison import Comparison, Pair
from paged_backend.tools.bench.in_turn import (
    ANSWER_TOKENS,
    REQUESTS_PER_SEQUENCE,
    TurnFigures,
    open_engine,
    random_prompt,
    rates_in_turn,
    run_requests,
)
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import option_error
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

HEADER = "width  requests at once  samples    beams  time of beams / time of samples"


@dataclass(frozen=True, slots=True)
class BeamsFigures(TurnFigures):
    """Tokens per second of all beams (`engine`) and of as many samples (`peer`)."""

    width: int

    @property
    def times(self) -> list[float]:
        """The time of the beams of each round, over that of the samples."""
        return [1 / ratio for ratio in self.comparison.ratios]

    def as_dict(self) -> dict[str, Any]:
        """Return the values to save, rounds included."""
        return {**TurnFigures.as_dict(self), "time": statistics.median(self.times)}

    def line(self) -> str:
        """Return a row for people."""
        times = self.times
        return (
            f"{self.width:5}  {self.at_once:16}  {self.comparison.peer or 0:7.0f}  "
            f"{self.comparison.engine:7.0f}  {statistics.median(times):.2f} "
            f"({min(times):.2f} to {max(times):.2f})"
        )


class BeamsBench:
    """An engine that searches and samples.

    Args:
        config: the engine's options.

    Raises:
        ConfigError: an option is wrong, or the model generates nothing.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._engine = open_engine(config)
        if self._engine.executor.info.pooling is not None:
            raise option_error("task", "must be generate: beams are answers")
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
                temperature=1.0, seed=0, n=width, max_tokens=ANSWER_TOKENS, ignore_eos=True
            )
            beams = replace(samples, temperature=0.0, seed=None, beam_width=width)
            for at_once in numbers:
                sides = [partial(self._run, params, at_once) for params in (beams, samples)]
                pairs = [Pair(*rates) for rates in rates_in_turn(sides, rounds)]
                label = f"beams, width {width}, {at_once} at once (tokens/s)"
                comparison = Comparison("beams", label, is_rate=True, rounds=pairs)
                yield BeamsFigures(comparison, at_once, width)

    def _run(self, params: SamplingParams, at_once: int, _: int) -> float:
        number = REQUESTS_PER_SEQUENCE * at_once
        return run_requests(self._engine, [self._request(params) for _ in range(number)], at_once)

    def _request(self, params: SamplingParams) -> Request:
        self._num_requests += 1
        prompt = random_prompt(self._num_requests, self._engine.limits.vocab_size)
        return Request(str(self._num_requests), prompt, params)
