"""Runs jobs on the engine in this process, and collects its figures."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paged_backend.engine.engine import Engine
from paged_backend.engine.worker import Worker
from paged_backend.tools.bench.measurements import Job
from paged_backend.tools.bench.requests import greedy
from paged_backend.values.outputs import SequenceOutput


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The engine's figures for one run of jobs."""

    seconds: float
    num_output_tokens: int
    output_tokens_per_s: float
    # Fraction of the step time for scheduling, batching, sampling and bookkeeping. None on a GPU,
    # where they overlap with the model.
    outside_model_share: float | None
    kv_utilization: float  # filled fraction of the slots in used blocks, mean over steps
    num_steps: int
    num_preemptions: int
    median_ttft_ms: float
    median_itl_ms: float
    num_forced_tokens: int  # that a structured output forced, without sampling
    median_itl_ms_unconstrained: float | None  # None if all requests are constrained


def median_run(runs: Iterable[EngineFigures]) -> EngineFigures:
    """Return the run with the median rate."""
    ranked = sorted(runs, key=lambda figures: figures.output_tokens_per_s)
    return ranked[(len(ranked) - 1) // 2]


def run_engine(engine: Engine, worker: Worker, jobs: Sequence[Job], at_once: int) -> EngineFigures:
    """Run all jobs, at most `at_once` of them at a time."""
    runner = worker.model_runner
    before, model_before = engine.stats(), runner.model_seconds
    clock = StepClock()
    started = time.perf_counter()
    _run(engine, clock, jobs, at_once)
    seconds = time.perf_counter() - started
    after = engine.stats()
    num_tokens = after.num_generation_tokens - before.num_generation_tokens
    unconstrained = [str(index) for index, job in enumerate(jobs) if not job.grammar]
    return EngineFigures(
        seconds=seconds,
        num_output_tokens=num_tokens,
        output_tokens_per_s=num_tokens / seconds,
        outside_model_share=_rest(model_before, runner.model_seconds, clock.stepping),
        kv_utilization=statistics.fmean(clock.utilization or [0.0]),
        num_steps=after.num_steps - before.num_steps,
        num_preemptions=after.num_preemptions - before.num_preemptions,
        median_ttft_ms=statistics.median(clock.ttft) * 1e3,
        median_itl_ms=statistics.median(clock.itl_of(map(str, range(len(jobs))))) * 1e3,
        num_forced_tokens=after.num_forced_tokens - before.num_forced_tokens,
        median_itl_ms_unconstrained=(
            statistics.median(clock.itl_of(unconstrained)) * 1e3 if unconstrained else None
        ),
    )


def _run(engine: Engine, clock: StepClock, jobs: Sequence[Job], at_once: int) -> None:
    waiting = deque(enumerate(jobs))
    num_open = 0
    while waiting or num_open:
        while waiting and num_open < at_once:
            index, job = waiting.popleft()
            clock.submitted(str(index))
            engine.add_request(greedy(str(index), job.prompt, job.max_tokens, job.grammar))
            num_open += 1
        num_open -= sum(output.finish_reason is not None for output in clock.time(engine))


class StepClock:
    """Measures step times, TTFT and ITL, in seconds."""

    def __init__(self) -> None:
        self.stepping = 0.0  # total over all steps
        self.ttft: list[float] = []
        self.utilization: list[float] = []  # after each step, while blocks are in use
        self._submitted: dict[str, float] = {}
        self._last_token: dict[str, float] = {}
        self._itl: defaultdict[str, list[float]] = defaultdict(list)

    def submitted(self, name: str) -> None:
        """Record that a request is submitted to the engine now."""
        self._submitted[name] = time.perf_counter()

    def time(self, engine: Engine) -> list[SequenceOutput]:
        """Run one step of the engine and record its times."""
        started = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        self.stepping += now - started
        stats = engine.stats()
        if stats.num_used_blocks:
            self.utilization.append(stats.utilization)
        for output in outputs:
            self._take(output.request_id, now)
        return outputs

    def itl_of(self, names: Iterable[str]) -> list[float]:
        """Return all ITLs of these requests; zero if there are none."""
        return [itl for name in names for itl in self._itl.get(name, ())] or [0.0]

    def _take(self, name: str, now: float) -> None:
        if name in self._last_token:
            self._itl[name].append(now - self._last_token[name])
        else:
            self.ttft.append(now - self._submitted[name])
        self._last_token[name] = now


def _rest(before: float | None, after: float | None, total: float) -> float | None:
    """The fraction of `total` seconds outside the interval between two readings of a clock."""
    return None if before is None or after is None else 1 - (after - before) / total
