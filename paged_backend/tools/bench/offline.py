"""Measures the engine in this process, and another engine in a separate process.

Both get the same tokens, greedily and without an end of sequence, in rounds: the engine measures
while the peer waits, then the peer while the engine waits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from paged_backend.checkpoint.hub import is_gguf, resolve_checkpoint
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.engine.engine import Engine
from paged_backend.engine.executors import open_executor
from paged_backend.engine.worker import Worker
from paged_backend.grammar.compiler import LlguidanceCompiler
from paged_backend.platforms.select import is_gpu
from paged_backend.tools.bench.comparison import Comparison, Pair
from paged_backend.tools.bench.constrained import Constraint
from paged_backend.tools.bench.constraint_cost import WITHOUT, ConstraintCost
from paged_backend.tools.bench.engine_run import EngineFigures, median_run, run_engine
from paged_backend.tools.bench.environment import StolenTime, environment
from paged_backend.tools.bench.measurements import TRACE, Job, Measurement, MeasurementPlan
from paged_backend.tools.bench.offline_report import OfflineReport, PeerReport
from paged_backend.tools.bench.peer_options import PeerOptions
from paged_backend.tools.bench.peer_process import PeerError, PeerProcess, PeerSettings
from paged_backend.tools.bench.prefix import PrefixFigures, time_prefix
from paged_backend.tools.bench.requests import prompt_ids
from paged_backend.tools.workloads import TokenizerContext, WorkloadOptions, make_requests
from paged_backend.values import engine_args
from paged_backend.values.errors import ConfigError

PREFIX_TOKENS = 448
SETTLE_SECONDS = 0.3  # OpenMP's threads spin for up to 0.2 s after their last product
# A peer may take this much longer than the engine before it counts as hanging.
LEAST_DEADLINE_SECONDS, DEADLINE_FACTOR = 120.0, 30.0


class OfflineBench:
    """Makes the measurements on one engine.

    Raises:
        ConfigError: the options or the checkpoint cannot be used.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._config = engine_args.from_mapping(options).config
        checkpoint = resolve_checkpoint(self._config)
        self._folder, self._tokenizer = checkpoint.model, str(checkpoint.tokenizer)
        self._worker = open_executor(self._config, self._folder)
        info = self._worker.info
        grammars = LlguidanceCompiler(self._tokenizer, info.vocab_size, info.eos_token_ids)
        self._engine = Engine(self._config, self._worker, grammars=grammars)

    def run(
        self,
        workload: WorkloadOptions,
        *,
        concurrency: int,
        rounds: int,
        peer: PeerOptions | None,
        constraint: Constraint | None = None,
    ) -> OfflineReport:
        """Measure the engine and the peer, and the engine's gain of a cached prefix.

        With a constraint, the engine is measured with and without it.

        Raises:
            ConfigError: the workload cannot be made, or does not fit the model or the peer.
            InvalidRequest: the constraint cannot be enforced.
            PeerError: the peer cannot be started.
        """
        if peer is not None and constraint is not None:
            raise ConfigError("structured outputs are measured without a peer: add --no-peer")
        if peer is not None and is_gguf(self._folder):
            raise ConfigError("GGUF files are measured without a peer: add --no-peer")
        jobs = self._jobs(workload, constraint)
        limits = self._engine.limits
        plan = MeasurementPlan(
            jobs, concurrency, limits.vocab_size, limits.max_model_len, self._config.seed
        )
        measured: Duel | ConstraintCost
        if constraint is None:
            measured = duel = self._duel(plan, rounds, peer)
            beside = None if peer is None else PeerReport(peer.name, duel.about, duel.problem)
        else:
            measured = ConstraintCost(self._engine, self._worker)
            measured.run(plan, rounds)
            beside = PeerReport(WITHOUT, {}, None)
        trace = median_run(measured.traces)
        return OfflineReport(
            model=self._folder.name,
            workload=asdict(workload),
            concurrency=concurrency,
            constraint=constraint,
            num_requests=len(jobs),
            num_constrained_requests=sum(bool(job.grammar) for job in jobs),
            prompt_tokens=sum(len(job.prompt) for job in jobs),
            output_tokens=trace.num_output_tokens,
            engine=trace,
            prefix=self._time_prefix(),
            peer=beside,
            comparisons=measured.comparisons,
            stolen_share=measured.stolen_share,
            environment=environment(self._worker.platform.device),
        )

    def _duel(self, plan: MeasurementPlan, rounds: int, peer: PeerOptions | None) -> Duel:
        """Run all rounds; the peer's process lives that long."""
        with ExitStack() as stack:
            process = None
            if peer is not None:
                process = stack.enter_context(PeerProcess(peer, self._settings(peer, plan)))
            duel = Duel(self._engine, self._worker, process)
            duel.warm_up(plan.round(rounds))
            duel.run(plan, rounds)
            return duel

    def _jobs(self, workload: WorkloadOptions, constraint: Constraint | None) -> list[Job]:
        limits = self._engine.limits
        material = TokenizerContext(limits.vocab_size, limits.max_model_len, self._tokenizer)
        requests = make_requests(workload, material)
        grammars = [""] * len(requests)
        if constraint is not None:
            grammars = constraint.grammars(len(requests), self._tokenizer, limits.vocab_size)
        return [
            Job(prompt_ids(request), request.max_tokens, grammar)
            for request, grammar in zip(requests, grammars, strict=True)
        ]

    def _time_prefix(self) -> PrefixFigures | None:
        rng = np.random.default_rng(self._config.seed)
        return time_prefix(self._engine, self._config, PREFIX_TOKENS, rng)

    def _settings(self, options: PeerOptions, plan: MeasurementPlan) -> PeerSettings:
        """Return the peer's settings.

        Raises:
            ConfigError: the peer does not run on the device, or not in the engine's dtype.
        """
        device, shape = self._worker.platform.device, load_model_config(self._folder)
        if is_gpu(device) and not options.kind.runs_on_gpu:
            raise ConfigError(f"--peer {options.name} runs on a CPU only; add --device cpu")
        dtype = options.dtype or self._worker.info.dtype
        options.check_dtype(dtype)
        measurements = plan.round(0)
        # Twice the need in float32: peers round up to blocks, and some keep old prefixes.
        kv_tokens = 2 * max(plan.max_model_len, *(sum(m.lengths) for m in measurements))
        numbers = sum(shape.kept_of(layer).numbers for layer in range(shape.num_layers))
        return PeerSettings(
            folder=str(self._folder),
            load_format=self._config.load_format,
            device=str(device),
            dtype=dtype,
            threads=torch.get_num_threads(),
            max_model_len=plan.max_model_len,
            max_seqs=max(m.at_once for m in measurements),
            longest=max(m.lengths[-1] for m in measurements),
            kv_bytes=kv_tokens * 4 * numbers,
        )


class Duel:
    """Runs the measurements of each round on the engine, then on the peer."""

    def __init__(self, engine: Engine, worker: Worker, peer: PeerProcess | None) -> None:
        self._engine, self._worker, self._peer = engine, worker, peer
        self._comparisons: dict[str, Comparison] = {}
        self.traces: list[EngineFigures] = []  # figures of the engine in each round
        self.about = {} if peer is None else peer.about
        self.problem: str | None = None  # why the peer was given up
        self.stolen_share = 0.0  # stolen part of all CPU time during the rounds

    @property
    def comparisons(self) -> list[Comparison]:
        """The measurements, each with the figures of all rounds."""
        return list(self._comparisons.values())

    def warm_up(self, measurements: Sequence[Measurement]) -> None:
        """Run short versions of the measurements on both."""
        for measurement in measurements:
            short = measurement.warm_up()
            self._run_peer(short, self._run_engine(short).seconds)

    def run(self, plan: MeasurementPlan, rounds: int) -> None:
        """Measure; the last round is the one in which the peer fails."""
        stolen = StolenTime()
        with tqdm(total=rounds, unit="round", leave=False, disable=None) as bar:
            for number in range(rounds):
                for measurement in plan.round(number):
                    self._measure(measurement)
                bar.update()
                if self.problem is not None:
                    break
        self.stolen_share = stolen.share()

    def _measure(self, measurement: Measurement) -> None:
        figures = self._run_engine(measurement)
        if measurement.name == TRACE:
            self.traces.append(figures)
        seconds = self._run_peer(measurement, figures.seconds)
        comparison = self._comparisons.setdefault(
            measurement.name, Comparison(measurement.name, measurement.label, measurement.is_rate)
        )
        engine = figures.output_tokens_per_s if measurement.is_rate else figures.seconds
        peer = None if seconds is None else measurement.figure(seconds)
        comparison.rounds.append(Pair(engine, peer))

    def _run_engine(self, measurement: Measurement) -> EngineFigures:
        if measurement.wake_up is not None:
            run_engine(self._engine, self._worker, [measurement.wake_up], 1)
        figures = run_engine(self._engine, self._worker, measurement.jobs, measurement.at_once)
        self._settle()
        return figures

    def _run_peer(self, measurement: Measurement, engine_seconds: float) -> float | None:
        """Return the peer's seconds; None if there is no peer any more."""
        if self._peer is None:
            return None
        deadline = LEAST_DEADLINE_SECONDS + DEADLINE_FACTOR * engine_seconds
        try:
            if measurement.wake_up is not None:
                self._peer.run([measurement.wake_up], 1, deadline)
            seconds = self._peer.run(measurement.jobs, measurement.at_once, deadline)
        except PeerError as error:
            self._peer, self.problem = None, str(error)
            return None
        self._settle()
        return seconds

    def _settle(self) -> None:
        if self._peer is not None:
            time.sleep(SETTLE_SECONDS)
