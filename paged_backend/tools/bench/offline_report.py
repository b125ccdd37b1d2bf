"""The report of `bench offline`: the comparison, the details of the engine, and the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paged_backend.tools.bench.comparison import Comparison
from paged_backend.tools.bench.constrained import Constraint
from paged_backend.tools.bench.engine_run import EngineFigures
from paged_backend.tools.bench.prefix import PrefixFigures
from paged_backend.values.json_file import write_json


@dataclass(frozen=True, slots=True)
class PeerReport:
    """What the engine was compared with."""

    name: str
    about: dict[str, str]  # versions, and the number formats as `format`
    problem: str | None  # why there are no more figures of it


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
    engine: EngineFigures  # for the trace, in the round with the median rate
    prefix: PrefixFigures | None  # None: prefix caching is off
    peer: PeerReport | None
    comparisons: list[Comparison]
    stolen_share: float  # stolen part of all CPU time during the rounds
    environment: dict[str, str]

    def print(self) -> None:
        """Write the tables to the terminal."""
        console = Console()
        console.print(self._comparison_table())
        details = Table(show_header=False)
        details.add_column()
        details.add_column(overflow="fold")  # versions can be long words
        for name, value in self._details():
            details.add_row(name, value)
        console.print(details)
        if self.peer is not None and self.peer.problem is not None:
            console.print(self.peer.problem, markup=False, highlight=False, soft_wrap=True)

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        values = asdict(self)
        del values["comparisons"]
        values["measurements"] = [comparison.as_dict() for comparison in self.comparisons]
        write_json(path, values, indent=2)

    def _comparison_table(self) -> Table:
        num_rounds = len(self.comparisons[0].rounds)
        rounds = f"medians of {num_rounds} rounds" if num_rounds > 1 else "one round"
        table = Table(title=f"bench offline: {self.model}, {rounds}")
        names = ["", "paged-backend"]
        if self.peer is not None:
            names += [self.peer.name, "ratio", "min..max"]
        for name in names:
            table.add_column(name, justify="right" if name else "left")
        for comparison in self.comparisons:
            table.add_row(*comparison.cells()[: len(names)])
        return table

    def _details(self) -> Iterator[tuple[str, str]]:
        yield "requests, at once", f"{self.num_requests}, {self.concurrency}"
        if self.constraint is not None:
            yield from self._constraint_rows(self.constraint)
        yield "prompt, output tokens", f"{self.prompt_tokens}, {self.output_tokens}"
        yield from self._engine_rows(self.engine)
        if self.prefix is not None:
            yield self._prefix_row(self.prefix)
        if self.peer is not None and self.peer.about:
            yield self.peer.name, ", ".join(f"{k} {v}" for k, v in self.peer.about.items())
        facts = self.environment
        yield "processor", f"{facts['device']}: {facts['cpu_flags']}"
        yield "threads", facts["threads"]
        yield "stolen CPU time", f"{self.stolen_share:.1%}"

    def _engine_rows(self, engine: EngineFigures) -> Iterator[tuple[str, str]]:
        yield "duration of the trace", f"{engine.seconds:.2f} s in {engine.num_steps} steps"
        yield "output tokens/s", f"{engine.output_tokens_per_s:.1f}"
        yield "median TTFT, ITL", f"{engine.median_ttft_ms:.1f} ms, {engine.median_itl_ms:.2f} ms"
        if engine.outside_model_share is not None:
            yield "step time outside the model", f"{engine.outside_model_share:.2%}"
        yield "KV utilization", f"{engine.kv_utilization:.2%} of allocated slots"
        yield "preemptions", str(engine.num_preemptions)

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
