"""A server's metrics page: counts of the engine at a moment, ours or vLLM's.

Names are given without their prefix (``paged_``, ``vllm:`` or a deployment's own), which is found
on the page itself.
"""

from __future__ import annotations

import http.client
import itertools
import math
import urllib.request
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from paged_backend.errors import ConfigError
from paged_backend.validation import shorten
from paged_loadtest.results import ServerSample

TIMEOUT_S = 5.0
_TELLING = "num_requests_running"  # every engine has it, after its prefix
_FAVOURITE = "paged_"  # where a server shows its counts under two prefixes
_MODEL_LABELS = ("model", "model_name")  # ours and Triton's; vLLM's own


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations, ``counts[i]`` of them at most ``bounds[i]``; the last bound is infinite."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        """Number of observations."""
        return self.counts[-1]

    @property
    def mean(self) -> float | None:
        """Their mean; None without any."""
        return self.sum / self.count if self.count > 0 else None

    def since(self, earlier: Histogram) -> Histogram:
        """What came after an earlier scrape; everything, if the server began anew in between."""
        if self.bounds != earlier.bounds or self.count < earlier.count:
            return self
        pairs = zip(self.counts, earlier.counts, strict=True)
        return Histogram(self.bounds, tuple(a - b for a, b in pairs), self.sum - earlier.sum)

    def quantile(self, q: float) -> float | None:
        """A value that the part ``q`` of them does not exceed, as ``histogram_quantile`` has it.

        Interpolated within its bucket; infinite above the last bound; None without observations.
        """
        if self.count <= 0:
            return None
        rank = q * self.count
        index = bisect_left(self.counts, rank)
        upper = self.bounds[index]
        if math.isinf(upper):
            return upper
        lower, below = (self.bounds[index - 1], self.counts[index - 1]) if index else (0.0, 0.0)
        inside = self.counts[index] - below
        return lower + (upper - lower) * (rank - below) / inside if inside else upper


class Scrape:
    """Samples of one prefix, by name; several label sets of a name are added up where asked."""

    def __init__(self, samples: Mapping[str, list[Sample]]) -> None:
        self._samples = samples

    def has(self, name: str) -> bool:
        """Whether the page shows it."""
        return name in self._samples

    def value(self, name: str) -> float:
        """The sum over all labels.

        Raises:
            ConfigError: the server does not show this metric.
        """
        return sum(sample.value for sample in self._of(name))

    def mean(self, name: str) -> float:
        """The mean over all labels: what several engines' parts of a whole come to.

        Raises:
            ConfigError: the server does not show this metric.
        """
        return self.value(name) / len(self._of(name))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sum for each value of a label; empty where the server does not show the metric."""
        values: dict[str, float] = {}
        for sample in self._samples.get(name, ()):
            key = sample.labels.get(label, "")
            values[key] = values.get(key, 0.0) + sample.value
        return values

    def histogram(self, name: str) -> Histogram | None:
        """The sum of a histogram over all labels; None where the server does not show it."""
        counts = {float(le): n for le, n in self.by_label(f"{name}_bucket", "le").items()}
        if math.inf not in counts:
            return None
        bounds = tuple(sorted(counts))
        # Counters of one histogram are read one after the other, so that a page taken in the
        # middle of an update can have a bucket that is ahead of a wider one.
        ordered = itertools.accumulate((counts[bound] for bound in bounds), max)
        return Histogram(bounds, tuple(ordered), self.value(f"{name}_sum"))

    def server_sample(self, at_s: float) -> ServerSample:
        """The load on the server, ``at_s`` seconds after a run's beginning.

        Raises:
            ConfigError: the server does not show one of these metrics.
        """
        return ServerSample(
            at_s=at_s,
            kv_usage=self.mean("kv_cache_usage_perc"),
            num_running=self.value("num_requests_running"),
            num_waiting=self.value("num_requests_waiting"),
        )

    def _of(self, name: str) -> list[Sample]:
        if name not in self._samples:
            raise ConfigError(f"the metrics page shows no {name}")
        return self._samples[name]


def parse_page(text: str, model: str | None = None) -> Scrape:
    """Read a page, the samples of one model only if it is named.

    Raises:
        ConfigError: this is no Prometheus page, or has no counts of an engine with that model.
    """
    samples = list(_samples(text))
    engines = [sample for sample in samples if sample.name.endswith(_TELLING)]
    if not engines:
        raise ConfigError("the metrics page shows no engine; is this Triton's or vLLM's address?")
    if model is not None:
        engines = [sample for sample in engines if _model(sample) == model]
        if not engines:
            known = sorted({_model(s) for s in samples if s.name.endswith(_TELLING)})
            raise ConfigError(
                f"the metrics page has no engine of the model {shorten(model)}; "
                f"it has: {', '.join(known)}"
            )
    prefixes = {sample.name.removesuffix(_TELLING) for sample in engines}
    prefix = _FAVOURITE if _FAVOURITE in prefixes else min(prefixes)
    return Scrape(_by_name(samples, prefix, model))


def scrape(url: str, model: str | None = None, timeout_s: float = TIMEOUT_S) -> Scrape:
    """Fetch and read a page such as ``http://127.0.0.1:8002/metrics``.

    Raises:
        ConfigError: nobody answers there, or not with the page of an engine.
    """
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            text = response.read().decode("utf-8", errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"cannot read metrics at {url}: {reason}; is a server running there?"
        ) from error
    try:
        return parse_page(text, model)
    except ConfigError as error:
        raise ConfigError(f"{url}: {error}") from None


def _samples(text: str) -> Iterator[Sample]:
    # Left to itself, the parser adds _total to a counter such as x_bucket. Samples without a type
    # keep their names, so the lines with types stay out.
    lines = (line for line in text.splitlines() if not line.startswith("#"))
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            yield from family.samples
    except ValueError as error:
        raise ConfigError(f"this is no Prometheus metrics page: {shorten(str(error))}") from error


def _by_name(
    samples: Iterable[Sample], prefix: str, model: str | None
) -> Mapping[str, list[Sample]]:
    names: dict[str, list[Sample]] = {}
    for sample in samples:
        if sample.name.startswith(prefix) and (model is None or _model(sample) == model):
            names.setdefault(sample.name.removeprefix(prefix), []).append(sample)
    return names


def _model(sample: Sample) -> str:
    return next((sample.labels[label] for label in _MODEL_LABELS if label in sample.labels), "")
