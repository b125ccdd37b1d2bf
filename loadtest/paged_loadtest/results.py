"""Results of runs, for printing, saving, comparing and plotting."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paged_backend.values.errors import ConfigError
from paged_backend.values.json_file import write_json
from paged_loadtest.slo import Slo, meets
from paged_loadtest.timeline import Timeline

SCHEMA = 1
DECIMALS = 3  # decimal places of a saved sample in ms: microsecond resolution
PERCENTILES = (50, 90, 99)
_THROUGHPUTS = ("request_throughput", "output_throughput", "total_throughput")
LATENCIES = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token (without the first)",
    "itl_ms": "Inter-token latency",
    "e2e_ms": "End-to-end latency",
}


@dataclass(frozen=True, slots=True)
class Distribution:
    """Statistics of one latency, in milliseconds; without samples there is no object, never NaN."""

    mean: float
    std: float
    median: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Distribution | None:
        """Compute with linearly interpolated percentiles, as in vLLM; None without samples."""
        if not samples:
            return None
        median, p90, p99 = (float(value) for value in np.percentile(samples, PERCENTILES))
        return cls(
            statistics.fmean(samples), statistics.pstdev(samples), median, p90, p99, max(samples)
        )


@dataclass(frozen=True, slots=True)
class ServerSample:
    """The server's own metrics at one moment of the run."""

    at_s: float  # seconds since the start of the run
    kv_usage: float  # fraction of the KV blocks in use, from 0 to 1
    num_running: float
    num_waiting: float


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one run of one workload under one load."""

    label: str  # unique among the runs of a report
    max_concurrency: int | None
    request_rate: float | None  # requests per second; None: as fast as the concurrency allows
    duration_s: float
    num_completed: int
    num_failed: int
    errors: dict[str, int]  # message -> number of requests that failed with it
    num_input_tokens: int
    num_output_tokens: int
    num_cached_tokens: int | None
    goodput: float | None  # requests per second that met every SLO; None without SLOs
    latencies: dict[str, Distribution]  # by the keys of LATENCIES that have samples
    samples: dict[str, list[float]]  # by all keys of LATENCIES: every sample in milliseconds
    server: list[ServerSample] = field(default_factory=list)

    @property
    def request_throughput(self) -> float:
        """Completed requests per second."""
        return self.num_completed / self.duration_s

    @property
    def output_throughput(self) -> float:
        """Output tokens per second."""
        return self.num_output_tokens / self.duration_s

    @property
    def total_throughput(self) -> float:
        """Input and output tokens per second."""
        return (self.num_input_tokens + self.num_output_tokens) / self.duration_s


def summarise(
    label: str,
    timelines: Sequence[Timeline],
    duration_s: float,
    *,
    max_concurrency: int | None,
    request_rate: float | None,
    slos: Sequence[Slo] = (),
    server: Sequence[ServerSample] = (),
) -> Run:
    """Summarize a run; latencies, tokens and goodput cover only the requests that succeeded."""
    done = [timeline for timeline in timelines if timeline.is_success]
    cached = [t.num_cached_tokens for t in done if t.num_cached_tokens is not None]
    samples = {
        "ttft_ms": [t.ttft_s * 1e3 for t in done],
        "tpot_ms": [t.tpot_s * 1e3 for t in done if t.tpot_s is not None],
        "itl_ms": [gap * 1e3 for t in done for gap in t.itl_s],
        "e2e_ms": [t.e2e_s * 1e3 for t in done],
    }
    latencies = {name: Distribution.of(values) for name, values in samples.items()}
    good = sum(all(meets(timeline, slo) for slo in slos) for timeline in done)
    return Run(
        label=label,
        max_concurrency=max_concurrency,
        request_rate=request_rate,
        duration_s=duration_s,
        num_completed=len(done),
        num_failed=len(timelines) - len(done),
        errors=dict(Counter(t.error or "no token came" for t in timelines if not t.is_success)),
        num_input_tokens=sum(t.num_input_tokens for t in done),
        num_output_tokens=sum(t.num_output_tokens for t in done),
        num_cached_tokens=sum(cached) if cached else None,
        goodput=good / duration_s if slos else None,
        latencies={name: value for name, value in latencies.items() if value is not None},
        samples=samples,
        server=list(server),
    )


@dataclass(frozen=True, slots=True)
class Report:
    """The runs of one command, with its options and environment."""

    kind: str  # the bench: serve, sweep or prefix
    config: dict[str, Any]  # every option of the command
    environment: dict[str, str]
    runs: list[Run]

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        values = {"schema": SCHEMA, **asdict(self)}
        for run, written in zip(self.runs, values["runs"], strict=True):
            written |= {name: getattr(run, name) for name in _THROUGHPUTS}
            written["samples"] = {
                name: [round(value, DECIMALS) for value in samples]
                for name, samples in run.samples.items()
            }
        write_json(path, values)


def load_report(path: Path) -> Report:
    """Read a file written by :meth:`Report.save`.

    Raises:
        ConfigError: the file cannot be read or is not a report.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema must be {SCHEMA}, got {values['schema']!r}")
        runs = [_run(entry) for entry in values["runs"]]
        return Report(values["kind"], values["config"], values["environment"], runs)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} holds no results of `paged-backend bench` ({error!r})"
        ) from error


def _run(entry: Mapping[str, Any]) -> Run:
    values = {name: value for name, value in entry.items() if name not in _THROUGHPUTS}
    values["latencies"] = {n: Distribution(**v) for n, v in values["latencies"].items()}
    values["server"] = [ServerSample(**sample) for sample in values["server"]]
    return Run(**values)
