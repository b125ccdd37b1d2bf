"""Measures the engine in this process, and static-batch ``transformers.generate`` as its peer.

Both get the same requests in the same order. The engine keeps ``concurrency`` requests in flight;
the peer runs batches of the same number, padded to the longest prompt, until the last request has
its tokens. Only requested tokens count. Structured outputs constrain the engine's requests only.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from paged_backend import engine_args
from paged_backend.checkpoint.hub import resolve_model
from paged_backend.engine import Engine
from paged_backend.grammar.compiler import GrammarCompiler
from paged_backend.outputs import SequenceOutput
from paged_backend.tools.bench.constrained import Constraint
from paged_backend.tools.bench.environment import environment
from paged_backend.tools.bench.prefix import PrefixFigures, time_prefix
from paged_backend.tools.bench.requests import drain, greedy, prompt_ids
from paged_backend.tools.bench.transformers_peer import TransformersPeer
from paged_backend.tools.workloads import TokenizerContext, WorkloadOptions, make_requests
from paged_backend.tools.workloads.request import Request
from paged_backend.worker import Worker

PREFIX_TOKENS = 448
WARM_UP_SEED = 2**31  # a seed that a user is unlikely to choose


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The engine's figures for the workload."""

    seconds: float
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


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """The figures of one run, and the environment in which they were measured."""

    model: str
    workload: dict[str, Any]
    concurrency: int
    constraint: Constraint | None
    num_requests: int
    num_constrained_requests: int
    prompt_tokens: int
    output_tokens: int
    engine: EngineFigures
    peer_output_tokens_per_s: float | None
    prefix: PrefixFigures | None  # None: prefix caching is off
    environment: dict[str, str]

    @property
    def speedup(self) -> float | None:
        """The engine's output tokens per second divided by the peer's."""
        if self.peer_output_tokens_per_s is None:
            return None
        return self.engine.output_tokens_per_s / self.peer_output_tokens_per_s

    def print(self) -> None:
        """Write a table to the terminal."""
        table = Table(title=f"bench offline: {self.model}", show_header=False)
        for name, value in self._rows():
            table.add_row(name, value)
        Console().print(table)

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        values = asdict(self) | {"speedup": self.speedup}
        path.write_text(json.dumps(values, indent=2) + "\n")

    def _rows(self) -> Iterator[tuple[str, str]]:
        engine = self.engine
        yield "requests, at once", f"{self.num_requests}, {self.concurrency}"
        if self.constraint is not None:
            yield from self._constraint_rows(self.constraint)
        yield "prompt, output tokens", f"{self.prompt_tokens}, {self.output_tokens}"
        yield "duration", f"{engine.seconds:.2f} s in {engine.num_steps} steps"
        yield "output tokens/s", f"{engine.output_tokens_per_s:.1f}"
        if self.peer_output_tokens_per_s is not None:
            yield "transformers static batch", f"{self.peer_output_tokens_per_s:.1f} tokens/s"
            yield "ratio", f"{self.speedup:.2f}"
        yield "median TTFT, ITL", f"{engine.median_ttft_ms:.1f} ms, {engine.median_itl_ms:.2f} ms"
        if engine.outside_model_share is not None:
            yield "step time outside the model", f"{engine.outside_model_share:.2%}"
        yield "KV utilization", f"{engine.kv_utilization:.2%} of allocated slots"
        yield "preemptions", str(engine.num_preemptions)
        if self.prefix is not None:
            yield self._prefix_row(self.prefix)

    def _constraint_rows(self, constraint: Constraint) -> Iterator[tuple[str, str]]:
        yield "constrained requests", f"{self.num_constrained_requests} ({constraint.kind})"
        yield "forced tokens", str(self.engine.num_forced_tokens)
        itl_ms = self.engine.median_itl_ms_unconstrained
        if itl_ms is not None:
            yield "median ITL of the other requests", f"{itl_ms:.2f} ms"

    def _prefix_row(self, prefix: PrefixFigures) -> tuple[str, str]:
        length = prefix.prefix_tokens + prefix.suffix_tokens
        return (
            f"TTFT with {prefix.prefix_tokens} of {length} tokens cached",
            f"{prefix.ttft_ms_cached:.1f} ms, {1 / prefix.speedup:.3f} of "
            f"{prefix.ttft_ms_without:.1f} ms without",
        )


class OfflineBench:
    """Makes the measurements on one engine.

    Raises:
        ConfigError: the options or the checkpoint cannot be used.
    """

    def __init__(self, options: Mapping[str, Any], *, threads: int) -> None:
        if threads:
            torch.set_num_threads(threads)
        self._config = engine_args.from_mapping(options).config
        self._folder = resolve_model(self._config.model)
        self._worker = Worker(self._config, self._folder)
        self._tokenizer = self._config.tokenizer or str(self._folder)
        info = self._worker.info
        grammars = GrammarCompiler(self._tokenizer, info.vocab_size, info.eos_token_ids)
        self._engine = Engine(self._config, self._worker, grammars=grammars)

    def run(
        self,
        workload: WorkloadOptions,
        *,
        concurrency: int,
        peer: bool,
        constraint: Constraint | None = None,
    ) -> OfflineReport:
        """Measure the engine and the peer on the workload, and the gain of a cached prefix.

        Raises:
            ConfigError: the workload cannot be made, or does not fit the model.
            InvalidRequest: the constraint cannot be enforced.
        """
        requests = make_requests(workload, self._material())
        grammars = [""] * len(requests)
        if constraint is not None:
            grammars = constraint.grammars(
                len(requests), self._tokenizer, self._engine.limits.vocab_size
            )
        self._warm_up(max(grammars))
        figures, num_tokens = self._run_requests(requests, grammars, concurrency)
        rng = np.random.default_rng(self._config.seed)
        prefix = time_prefix(self._engine, self._config, PREFIX_TOKENS, rng)
        rate = self._run_peer(requests, concurrency) if peer else None
        return OfflineReport(
            model=self._folder.name,
            workload=asdict(workload),
            concurrency=concurrency,
            constraint=constraint,
            num_requests=len(requests),
            num_constrained_requests=sum(map(bool, grammars)),
            prompt_tokens=sum(len(request.prompt) for request in requests),
            output_tokens=num_tokens,
            engine=figures,
            peer_output_tokens_per_s=rate,
            prefix=prefix,
            environment=environment(self._worker.platform.device),
        )

    def _material(self) -> TokenizerContext:
        limits = self._engine.limits
        return TokenizerContext(limits.vocab_size, limits.max_model_len, self._tokenizer)

    def _warm_up(self, grammar: str) -> None:
        half = self._engine.limits.max_model_len // 2
        options = WorkloadOptions(
            num_prompts=4,
            seed=WARM_UP_SEED,
            input_len=str(min(half, 256)),
            output_len=str(min(half, 8)),
        )
        for index, request in enumerate(make_requests(options, self._material())):
            self._submit(f"warm-up-{index}", request, grammar)
        drain(self._engine)

    def _submit(self, name: str, request: Request, grammar: str) -> None:
        self._engine.add_request(greedy(name, prompt_ids(request), request.max_tokens, grammar))

    def _run_requests(
        self, requests: list[Request], grammars: list[str], concurrency: int
    ) -> tuple[EngineFigures, int]:
        """Return the figures and the number of output tokens."""
        engine, total = self._engine, sum(r.max_tokens for r in requests)
        runner = self._worker.model_runner
        before, model_before = engine.stats(), runner.model_seconds
        clock = StepClock()
        pending = deque(enumerate(requests))
        num_open = 0
        started = time.perf_counter()
        with tqdm(total=total, unit="token", desc="engine", leave=False, disable=None) as bar:
            while pending or num_open:
                while pending and num_open < concurrency:
                    index, request = pending.popleft()
                    clock.submitted(str(index))
                    self._submit(str(index), request, grammars[index])
                    num_open += 1
                outputs = clock.time(engine)
                num_open -= sum(output.finish_reason is not None for output in outputs)
                bar.update(sum(len(output.new_token_ids) for output in outputs))
        seconds = time.perf_counter() - started
        after = engine.stats()
        num_tokens = after.num_generation_tokens - before.num_generation_tokens
        unconstrained = [str(index) for index, grammar in enumerate(grammars) if not grammar]
        figures = EngineFigures(
            seconds=seconds,
            output_tokens_per_s=num_tokens / seconds,
            outside_model_share=_rest(model_before, runner.model_seconds, clock.stepping),
            kv_utilization=statistics.fmean(clock.utilization),
            num_steps=after.num_steps - before.num_steps,
            num_preemptions=after.num_preemptions - before.num_preemptions,
            median_ttft_ms=statistics.median(clock.ttft) * 1e3,
            median_itl_ms=statistics.median(clock.itl_of(map(str, range(len(requests))))) * 1e3,
            num_forced_tokens=after.num_forced_tokens - before.num_forced_tokens,
            median_itl_ms_unconstrained=(
                statistics.median(clock.itl_of(unconstrained)) * 1e3 if unconstrained else None
            ),
        )
        return figures, num_tokens

    def _run_peer(self, requests: list[Request], concurrency: int) -> float:
        peer = TransformersPeer(self._folder, self._config, self._worker.platform.device)
        return peer.output_tokens_per_s(requests, concurrency)


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
