"""The four measurements that an engine and its peer are compared by.

Every round has new prompts, so that no prefix cache knows them from the round before. Both sides
get the same tokens, and all that they report is the time until the last request has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

TRACE = "trace"
ALONE_PROMPT, ALONE_OUTPUT = 64, 128
FIRST_TOKEN_PROMPT = 512
PREFIX, SUFFIX, PREFIX_OUTPUT, PREFIX_REQUESTS = 448, 32, 32, 32
_WARM_UP_OUTPUT = 8


@dataclass(frozen=True, slots=True)
class Job:
    """A greedy request for exactly `max_tokens` tokens; only our engine knows grammars."""

    prompt: list[int]
    max_tokens: int
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Jobs to run, `at_once` of them at a time."""

    name: str
    label: str
    jobs: list[Job]
    at_once: int
    is_rate: bool  # the figure is output tokens per second, otherwise seconds
    # A job that runs before them and is not timed. While a side waits for the other one, it loses
    # its cache lines, and the host of a virtual machine may take its memory.
    wake_up: Job | None = None

    def figure(self, seconds: float) -> float:
        """Return the figure of a run that took `seconds`."""
        return sum(job.max_tokens for job in self.jobs) / seconds if self.is_rate else seconds

    @property
    def lengths(self) -> list[int]:
        """Tokens of prompt and output together of the longest requests at once, sorted."""
        return sorted(len(job.prompt) + job.max_tokens for job in self.jobs)[-self.at_once :]

    def warm_up(self) -> Measurement:
        """Return a short run of the same kind, with those jobs first that have a grammar."""
        jobs = [
            replace(job, max_tokens=min(job.max_tokens, _WARM_UP_OUTPUT))
            for job in sorted(self.jobs, key=lambda job: not job.grammar)[: self.at_once]
        ]
        return replace(self, jobs=jobs, wake_up=None)


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """Makes the measurements of each round; lengths shrink to fit a short model."""

    trace: Sequence[Job]
    concurrency: int
    vocab_size: int
    max_model_len: int
    seed: int

    def round(self, number: int) -> list[Measurement]:
        """Return the measurements of a round."""
        rng = np.random.default_rng([self.seed, number])
        measurements = (
            self.trace_in(number),
            self._alone(rng),
            self._first(rng),
            self._prefix(rng),
        )
        return [replace(item, wake_up=self._wake_up(rng)) for item in measurements]

    def trace_in(self, number: int) -> Measurement:
        """Return the trace of a round; in each round other tokens are shared in the same way."""
        jobs = [
            replace(job, prompt=[(token + number) % self.vocab_size for token in job.prompt])
            for job in self.trace
        ]
        label = f"trace, {self.concurrency} at once: output tokens/s"
        return Measurement(TRACE, label, jobs, self.concurrency, True)

    def _alone(self, rng: np.random.Generator) -> Measurement:
        output = min(ALONE_OUTPUT, self.max_model_len // 2)
        prompt = self._tokens(rng, min(ALONE_PROMPT, self.max_model_len - output))
        label = "one request alone: output tokens/s"
        return Measurement("one_request", label, [Job(prompt, output)], 1, True)

    def _first(self, rng: np.random.Generator) -> Measurement:
        prompt = self._tokens(rng, min(FIRST_TOKEN_PROMPT, self.max_model_len - 1))
        label = f"first token of a {len(prompt)}-token prompt: s"
        return Measurement("first_token", label, [Job(prompt, 1)], 1, False)

    def _prefix(self, rng: np.random.Generator) -> Measurement:
        output = min(PREFIX_OUTPUT, self.max_model_len // 4)
        suffix = min(SUFFIX, self.max_model_len // 4)
        prefix = self._tokens(rng, min(PREFIX, self.max_model_len - output - suffix))
        jobs = [Job(prefix + self._tokens(rng, suffix), output) for _ in range(PREFIX_REQUESTS)]
        label = f"{PREFIX_REQUESTS} requests on a {len(prefix)}-token prefix: s"
        return Measurement("common_prefix", label, jobs, PREFIX_REQUESTS, False)

    def _wake_up(self, rng: np.random.Generator) -> Job:
        output = min(_WARM_UP_OUTPUT, self.max_model_len // 2)
        return Job(self._tokens(rng, min(FIRST_TOKEN_PROMPT, self.max_model_len) - output), output)

    def _tokens(self, rng: np.random.Generator, count: int) -> list[int]:
        tokens: list[int] = rng.integers(self.vocab_size, size=count).tolist()
        return tokens
