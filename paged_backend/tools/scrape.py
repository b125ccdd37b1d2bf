"""Reads the Prometheus metrics page of an engine, ours or vLLM's.

Metric names are given without their prefix (``paged_``, ``vllm:`` or a deployment's own), which is
detected from the page itself. The library for Prometheus parses pages; histograms are read here,
because it has neither their quantiles nor the difference of two readings.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import math
import threading
import urllib.request
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Self
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

TIMEOUT_S = 5.0
_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
_TELLING = "num_requests_running"  # every engine has this metric, after its prefix
_FAVOURITE = "paged_"  # preferred where a server shows its metrics under several prefixes
_MODEL_LABELS = ("model", "model_name")  # ours and Triton's; vLLM's own


@dataclass(frozen=True, slots=True)
class Histogram:
    """A cumulative histogram: ``counts[i]`` observations <= ``bounds[i]``; the last bound: inf."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    sum: float

    @property
    def count(self) -> float:
        """Number of observations."""
        return self.counts[-1]

    @property
    def mean(self) -> float | None:
        """Mean of the observations; None without any."""
        return self.sum / self.count if self.count > 0 else None

    def since(self, earlier: Histogram) -> Histogram:
        """The observations since an earlier scrape; all of them if the server restarted since."""
        if self.bounds != earlier.bounds or self.count < earlier.count:
            return self
        pairs = zip(self.counts, earlier.counts, strict=True)
        return Histogram(self.bounds, tuple(a - b for a, b in pairs), self.sum - earlier.sum)

    def quantile(self, q: float) -> float | None:
        """The ``q`` quantile (0 to 1), computed like Prometheus's ``histogram_quantile``.

        Interpolated within its bucket; inf above the last finite bound; None without observations.
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
    """Samples of one metric prefix, by name; methods aggregate over the label sets of a name."""

    def __init__(self, samples: Mapping[str, list[Sample]]) -> None:
        self._samples = samples

    def value(self, name: str) -> float:
        """The sum over all label sets.

        Raises:
            ConfigError: the server does not show this metric.
        """
        return sum(sample.value for sample in self._of(name))

    def mean(self, name: str) -> float:
        """The mean over all label sets, e.g. of the KV usage of several engines.

        Raises:
            ConfigError: the server does not show this metric.
        """
        return self.value(name) / len(self._of(name))

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sum for each value of a label; empty if the server does not show the metric."""
        values: dict[str, float] = {}
        for sample in self._samples.get(name, ()):
            key = sample.labels.get(label, "")
            values[key] = values.get(key, 0.0) + sample.value
        return values

    def histogram(self, name: str) -> Histogram | None:
        """The sum of a histogram over all label sets; None if the server does not show it."""
        counts = {float(le): n for le, n in self.by_label(f"{name}_bucket", "le").items()}
        if math.inf not in counts:
            return None
        bounds = tuple(sorted(counts))
        # The server reads the counters one after another, so a page taken during an update can
        # show a larger count in a narrow bucket than in a wider one; make the counts monotonic.
        ordered = itertools.accumulate((counts[bound] for bound in bounds), max)
        return Histogram(bounds, tuple(ordered), self.value(f"{name}_sum"))

    def _of(self, name: str) -> list[Sample]:
        if name not in self._samples:
            raise ConfigError(f"the metrics page shows no {name}")
        return self._samples[name]


def parse_page(text: str, model: str | None = None) -> Scrape:
    """Parse a page; keep only the samples of ``model`` if given.

    Raises:
        ConfigError: this is not a Prometheus page, or shows no engine with that model.
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


def scrape(
    url: str,
    model: str | None = None,
    timeout_s: float = TIMEOUT_S,
    *,
    names: Collection[str] = (),
) -> Scrape:
    """Fetch and parse a page such as ``http://127.0.0.1:8002/metrics``.

    Args:
        url: address of the page; no proxy is asked for a page of this machine.
        model: model of the samples; None for all.
        timeout_s: limit of each wait, in seconds.
        names: metrics to read, if not all; parsing a whole page takes milliseconds, which would
            delay the requests of a benchmark.

    Raises:
        ConfigError: the URL cannot be read, or is not the metrics page of an engine.
    """
    try:
        with _opener(url).open(url, timeout=timeout_s) as response:
            text: str = response.read().decode("utf-8", errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"cannot read metrics at {url}: {reason}; is a server running there?"
        ) from error
    if names:
        needed = (*names, _TELLING)
        text = "\n".join(line for line in text.splitlines() if any(name in line for name in needed))
    try:
        return parse_page(text, model)
    except ConfigError as error:
        raise ConfigError(f"{url}: {error}") from None


class MetricsWatch:
    """Reads a page again and again on a thread, from entering the context to leaving it.

    Args:
        url: address of the page.
        names: metrics to read.
        model: model of the samples; None for all.
        interval_s: seconds from one reading to the next.

    Attributes:
        readings: the pages, each with the seconds since the context was entered. Those that cannot
            be read are left out.
    """

    def __init__(
        self, url: str, names: Collection[str], model: str | None = None, *, interval_s: float
    ) -> None:
        self.readings: list[tuple[float, Scrape]] = []
        self._scrape = partial(scrape, url, model, names=names)
        self._interval_s = interval_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._thread.join()

    def _run(self) -> None:
        began_s = perf_counter()
        while not self._done.is_set():
            with contextlib.suppress(ConfigError):
                page = self._scrape()
                self.readings.append((perf_counter() - began_s, page))
            self._done.wait(self._interval_s)


def _opener(url: str) -> urllib.request.OpenerDirector:
    is_local = urlsplit(url).hostname in _THIS_MACHINE
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_local else []))


def _samples(text: str) -> Iterator[Sample]:
    # The parser appends _total to a typed counter such as x_bucket. Samples without a type keep
    # their names, so drop the type lines.
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
