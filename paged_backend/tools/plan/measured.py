"""Comparison of measured throughput with the roofline of the same batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_backend.tools.plan.prices import cost_per_million
from paged_backend.tools.plan.roofline import Roofline
from paged_backend.values.errors import ConfigError
from paged_backend.values.json_file import read_json_object

REPORT_SCHEMA = 1  # version of the reports of `paged-backend bench` that this module can read


@dataclass(frozen=True, slots=True)
class MeasuredRate:
    """Measured output tokens per second, and the load parameters that the roofline needs."""

    label: str
    batch_size: float  # mean number of concurrent sequences
    held: float  # mean number of tokens that each sequence holds
    tokens_per_s: float
    prompt: float = 0  # mean tokens computed per prompt; 0: only decoding was timed
    output: float = 0  # mean tokens per output


@dataclass(frozen=True, slots=True)
class RooflineComparison:
    """One measurement and the roofline of the same load."""

    measurement: MeasuredRate
    roofline_tokens_per_s: float
    cost_per_million_output: float | None  # at the measured rate; None without a price

    @property
    def share(self) -> float:
        """The fraction of the roofline that was reached."""
        return self.measurement.tokens_per_s / self.roofline_tokens_per_s


def compare(
    measurement: MeasuredRate, roofline: Roofline, hourly: float | None
) -> RooflineComparison:
    """Compare a measurement with the roofline of the same load."""
    seen = measurement
    if seen.prompt:
        seconds = roofline.request_seconds(seen.batch_size, seen.prompt, seen.output, seen.held)
        limit = seen.output / seconds
    else:
        limit = roofline.decode(seen.batch_size, seen.held).tokens_per_s
    return RooflineComparison(seen, limit, cost_per_million(hourly, seen.tokens_per_s))


def read_measurements(path: Path) -> list[MeasuredRate]:
    """Read a file that `bench serve`, `sweep` or `prefix` saved, or that `bench decode` wrote.

    Raises:
        ConfigError: the file cannot be read, or holds no run with completed requests.
    """
    values = read_json_object(path)
    if "rows" in values:
        measurements = _of_decode(path, values["rows"])
    else:
        measurements = _of_report(path, values)
    if not measurements:
        raise ConfigError(f"{path} holds no run with completed requests: measure again")
    return measurements


def _of_decode(path: Path, rows: Iterable[Mapping[str, Any]]) -> list[MeasuredRate]:
    try:
        return [
            MeasuredRate(
                label=f"{row['batch_size']} x {row['context']}",
                batch_size=row["batch_size"],
                held=row["figures"]["kv_tokens"] / row["batch_size"],
                tokens_per_s=row["figures"]["tokens_per_s"],
            )
            for row in rows
            if row["figures"] is not None
        ]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{path} holds no results of `bench decode` ({error!r})") from error


def _of_report(path: Path, values: Mapping[str, Any]) -> list[MeasuredRate]:
    try:
        if values["schema"] != REPORT_SCHEMA:
            raise ConfigError(f"{path}: schema must be {REPORT_SCHEMA}, got {values['schema']!r}")
        return [_of_run(run) for run in values["runs"] if run["num_completed"]]
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{path} holds no results of `paged-backend bench` ({error!r})"
        ) from error


def _of_run(run: Mapping[str, Any]) -> MeasuredRate:
    prompt = run["num_input_tokens"] / run["num_completed"]
    cached = (run["num_cached_tokens"] or 0) / run["num_completed"]
    output = run["num_output_tokens"] / run["num_completed"]
    return MeasuredRate(
        label=run["label"],
        batch_size=sum(run["samples"]["e2e_ms"]) / 1e3 / run["duration_s"],  # by Little's law
        held=prompt + output / 2,
        tokens_per_s=run["num_output_tokens"] / run["duration_s"],
        prompt=max(1.0, prompt - cached),
        output=output,
    )
