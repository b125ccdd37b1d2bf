"""Measures what constraints cost: one engine runs requests with and without them, in turn."""

from __future__ import annotations

from dataclasses import replace

from tqdm import tqdm

from paged_backend.engine.engine import Engine
from paged_backend.engine.worker import Worker
from paged_backend.tools.bench.comparison import Comparison, Pair
from paged_backend.tools.bench.engine_run import EngineFigures, run_engine
from paged_backend.tools.bench.environment import StolenTime
from paged_backend.tools.bench.measurements import Measurement, MeasurementPlan

WITHOUT = "without constraints"


class ConstraintCost:
    """Runs the trace of a plan with and without the constraints of its requests.

    Attributes:
        traces: the figures with constraints, of each round.
        comparisons: output tokens per second, and the inter-token latency of the requests that have
            no constraint, if there are any.
        stolen_share: stolen part of all CPU time during the rounds.
    """

    def __init__(self, engine: Engine, worker: Worker) -> None:
        self._engine, self._worker = engine, worker
        self.traces: list[EngineFigures] = []
        self.comparisons: list[Comparison] = []
        self.stolen_share = 0.0

    def run(self, plan: MeasurementPlan, rounds: int) -> None:
        """Measure; a short round without figures comes first."""
        self._with(plan.trace_in(2 * rounds).warm_up())
        self._without(plan.trace_in(2 * rounds + 1).warm_up())
        trace = plan.trace_in(0)
        rate = Comparison(trace.name, trace.label, is_rate=True)
        label = "ITL of the requests without constraint, median: s"
        itl = Comparison("unconstrained_itl", label, is_rate=False)
        stolen = StolenTime()
        for number in tqdm(range(rounds), unit="round", leave=False, disable=None):
            # Their prompts differ, so that neither run finds the other's in the prefix cache.
            ours = self._with(plan.trace_in(2 * number))
            other = self._without(plan.trace_in(2 * number + 1))
            self.traces.append(ours)
            rate.rounds.append(Pair(ours.output_tokens_per_s, other.output_tokens_per_s))
            if ours.median_itl_ms_unconstrained is not None:
                seconds = ours.median_itl_ms_unconstrained / 1e3, other.median_itl_ms / 1e3
                itl.rounds.append(Pair(*seconds))
        self.stolen_share = stolen.share()
        self.comparisons = [item for item in (rate, itl) if item.rounds]

    def _with(self, trace: Measurement) -> EngineFigures:
        return run_engine(self._engine, self._worker, trace.jobs, trace.at_once)

    def _without(self, trace: Measurement) -> EngineFigures:
        jobs = [replace(job, grammar="") for job in trace.jobs]
        return run_engine(self._engine, self._worker, jobs, trace.at_once)
