"""Measures what speculation gains or costs: requests with it and without it, in turn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.engine.engine import Engine
from paged_backend.sampling.sampler import Sampler
from paged_backend.tools.bench.comparison import Comparison, Pair
from paged_backend.tools.bench.in_turn import (
    REQUESTS_PER_SEQUENCE,
    TurnFigures,
    open_engine,
    rates_in_turn,
    run_requests,
)
from paged_backend.tools.bench.speculation_traces import ANSWER_TOKENS, Trace, traces
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SpeculationFigures(TurnFigures):
    """Tokens per second with speculation (`engine`) and without it (`peer`), over all rounds."""

    tokens_per_step: float  # for each sequence, with speculation
    accepted_share: float  # part of the drafts that were right

    def line(self) -> str:
        """Return a row for people."""
        rates = TurnFigures.line(self)
        return f"{rates}  {self.tokens_per_step:6.2f}  {self.accepted_share:8.0%}"


DRAFT_CHANCE = 0.8
"""The chance that a draft of a draft model is right if those before it are."""

_MAX_AT_ONCE = 512
_NUM_ANSWERS = REQUESTS_PER_SEQUENCE * _MAX_AT_ONCE  # answers that a GPU keeps: those of a round

HEADER = "trace    at once   without      with  ratio              tokens/step  accepted"


class SpeculationBench:
    """An engine that speculates, for requests that want it and for others.

    Steps compute the whole model, and sample. The tokens of the traces then replace what was
    sampled, because the model would answer something else. A draft model is computed, too, and
    draws these tokens or others.

    Args:
        config: the engine's options; `speculative_config` says how to speculate.
        draft_chance: the chance that a draft of a draft model is right if those before it are.

    Raises:
        ConfigError: `speculative_config` is missing, or an option is wrong.
    """

    def __init__(self, config: EngineConfig, draft_chance: float = DRAFT_CHANCE) -> None:
        if config.speculative_config is None:
            raise option_error("speculative_config", 'is needed, such as {"method": "suffix"}')
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(config, name) > 1:  # each rank samples
                raise option_error(name, "can only be 1 here")
        self._draft_chance = draft_chance
        self._models: list[Give] = []  # the model, and what draws drafts
        self._engine = self._open(config)
        self._num_requests = 0

    def measure(
        self, kinds: Sequence[str], numbers: Sequence[int], rounds: int
    ) -> Iterator[SpeculationFigures]:
        """Yield the figures of each kind of trace with each number of requests at once.

        Raises:
            ConfigError: a number is too large, or a sequence cannot be as long as a trace.
        """
        if max(numbers) > _MAX_AT_ONCE:
            raise ConfigError(f"--concurrency: must be at most {_MAX_AT_ONCE}, got {max(numbers)}")
        for kind in kinds:
            for at_once in numbers:
                before = self._engine.stats()
                sides = [partial(self._run, kind, at_once, side) for side in (False, True)]
                pairs = [Pair(rate, plain) for plain, rate in rates_in_turn(sides, rounds)]
                after = self._engine.stats()
                drafted = after.num_draft_tokens - before.num_draft_tokens
                accepted = after.num_accepted_tokens - before.num_accepted_tokens
                generated = after.num_generation_tokens - before.num_generation_tokens
                # Half of the tokens were generated without speculation.
                tokens_per_step = generated / (generated - 2 * accepted)
                label = f"{kind}, {at_once} at once (tokens/s)"
                comparison = Comparison(kind, label, is_rate=True, rounds=pairs)
                accepted_share = accepted / max(drafted, 1)
                yield SpeculationFigures(comparison, at_once, tokens_per_step, accepted_share)

    def _open(self, config: EngineConfig) -> Engine:
        """Load the model; its steps sample the tokens that `self._models` are given."""
        engine = open_engine(config)
        executor: Any = engine.executor
        runner = executor.model_runner
        runners = [runner.main, runner.draft] if hasattr(runner, "draft") else [runner]
        self._models = [_answering(each, executor.info.eos_token_ids) for each in runners]
        return engine

    def _run(self, kind: str, at_once: int, speculate: bool, number: int) -> float:
        """Run the traces of a round, at most `at_once` at a time; returns tokens per second."""
        vocab_size = self._engine.limits.vocab_size
        jobs = traces(kind, REQUESTS_PER_SEQUENCE * at_once, vocab_size, number)
        longest = max(len(job.prompt) + len(job.answer) for job in jobs)
        if longest > self._engine.limits.max_model_len:
            problem = f"must be at least {longest} for these traces"
            raise option_error("max_model_len", problem)
        requests = [self._request(job, speculate) for job in jobs]
        return run_requests(self._engine, requests, at_once)

    def _request(self, job: Trace, speculate: bool) -> Request:
        self._num_requests += 1
        rng, chance = random.Random(self._num_requests), self._draft_chance
        # A neighbor of a token is another one.
        guess = [token if rng.random() < chance else token - 1 for token in job.answer]
        for give, answer in zip(self._models, (job.answer, guess), strict=False):
            give(self._num_requests, len(job.prompt), answer)
        params = SamplingParams(
            temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, seed=self._num_requests
        )
        # Nothing of a run before may be found: neither blocks of the prompt nor the answer.
        name = str(self._num_requests)
        return Request(name, job.prompt, params, name, speculate=speculate)


class Give(Protocol):
    """Gives a device an answer."""

    def __call__(self, seed: int, start: int, answer: list[int]) -> None:
        """Set the answer of the request with a seed, whose prompt has `start` tokens."""


def give_to(answers: dict[int, list[int]]) -> Give:
    """Return a function that sets an answer of a dictionary, by seed."""

    def give(seed: int, start: int, answer: list[int]) -> None:
        answers[seed] = answer

    return give


def _answering(runner: Any, eos_token_ids: tuple[int, ...]) -> Give:
    """Let the runner of a model answer with what the returned function gives it."""
    if hasattr(runner, "give_answers"):  # a GPU, which samples in its graphs
        give: Give = runner.give_answers(_NUM_ANSWERS, ANSWER_TOKENS).give
        return give
    answers: dict[int, list[int]] = {}
    runner.sampler = _GivenTokens(eos_token_ids, answers)
    return give_to(answers)


class _GivenTokens(Sampler):
    """Samples, and then returns the tokens of given answers.

    Args:
        eos_token_ids: end tokens of the model.
        answers: token ids by the seed of a request.
    """

    def __init__(self, eos_token_ids: tuple[int, ...], answers: Mapping[int, list[int]]) -> None:
        super().__init__(frozenset(eos_token_ids))
        self._answers = answers

    def sample(self, logits: Tensor, samples: Sequence[SampleSpec]) -> list[int]:
        """See :meth:`~paged_backend.sampling.sampler.Sampler.sample`."""
        super().sample(logits, samples)
        return [self._answers[spec.params.seed or 0][spec.num_output_tokens] for spec in samples]
