"""Computes the figures on the screen from the readings of the last seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from paged_backend.tools.scrape import Histogram, Scrape
from paged_backend.tools.top.source import Reading

WINDOW_S = 10.0
HISTORY = 120  # number of rates kept for a curve

# Name of a histogram -> label of its row; a small screen shows only the first ones.
LATENCIES = {
    "time_to_first_token_seconds": "TTFT",
    "inter_token_latency_seconds": "ITL",
    "request_time_per_output_token_seconds": "TPOT",
    "e2e_request_latency_seconds": "E2E",
    "request_queue_time_seconds": "queue",
    "request_prefill_time_seconds": "prefill",
}


@dataclass(frozen=True, slots=True)
class Latency:
    """The distribution of a latency, over the last seconds and since the server started."""

    name: str
    recent: Histogram | None
    overall: Histogram | None


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate per second: the current value, and its history with the newest value last."""

    now: float | None
    history: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """Figures of the engine's steps in the last seconds; None if not observed."""

    per_s: float | None
    seconds: float | None  # mean per step
    sequences: float | None  # mean per step
    tokens: float | None  # mean per step


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of a frame: current values, or totals since the server started, unless noted."""

    is_up: bool
    num_running: float
    num_waiting: float
    num_preemptions: float
    finished: dict[str, float]  # by reason
    generated: Rate
    prompt: Rate
    steps: Steps
    recent_hit_rate: float | None  # over the last seconds' prompt tokens; None if there are none
    overall_hit_rate: float | None
    kv_usage: float
    kv_utilization: float
    num_blocks: float
    kv_bytes_per_token: float
    num_used_blocks: float
    latencies: tuple[Latency, ...]


class Window:
    """Keeps the readings of the last `WINDOW_S` seconds."""

    def __init__(self) -> None:
        self._readings: deque[Reading] = deque()
        self._generated: deque[float] = deque(maxlen=HISTORY)
        self._prompt: deque[float] = deque(maxlen=HISTORY)

    def add(self, reading: Reading) -> Figures:
        """Add a reading and return the updated figures.

        Raises:
            ConfigError: the server's metrics lack one of the counts.
        """
        if self._readings and _restarted(self._readings[-1].scrape, reading.scrape):
            self._readings.clear()
        before = self._readings[-1] if self._readings else None
        self._readings.append(reading)
        while len(self._readings) > 1 and reading.at_s - self._readings[1].at_s >= WINDOW_S:
            self._readings.popleft()  # the first one left is as old as the window, or older
        return _figures(
            self._readings[0],
            reading,
            generated=_rate(self._generated, "generation_tokens_total", before, reading),
            prompt=_rate(self._prompt, "prompt_tokens_total", before, reading),
        )


def _restarted(before: Scrape, now: Scrape) -> bool:
    return now.value("engine_steps_total") < before.value("engine_steps_total")


def _rate(history: deque[float], name: str, before: Reading | None, now: Reading) -> Rate:
    if before is None:
        return Rate(None, tuple(history))
    new = now.scrape.value(name) - before.scrape.value(name)
    history.append(new / (now.at_s - before.at_s))
    return Rate(history[-1], tuple(history))


def _figures(first: Reading, last: Reading, *, generated: Rate, prompt: Rate) -> Figures:
    page = last.scrape
    return Figures(
        is_up=page.value("engine_up") > 0,
        num_running=page.value("num_requests_running"),
        num_waiting=page.value("num_requests_waiting"),
        num_preemptions=page.value("num_preemptions_total"),
        finished=page.by_label("request_success_total", "finished_reason"),
        generated=generated,
        prompt=prompt,
        steps=_steps(first, last),
        recent_hit_rate=_hit_rate(first.scrape, page),
        overall_hit_rate=_hit_rate(None, page),
        kv_usage=page.mean("kv_cache_usage_perc"),
        kv_utilization=page.mean("kv_cache_utilization_perc"),
        num_blocks=page.value("kv_blocks_total"),
        kv_bytes_per_token=page.value("kv_bytes_per_token"),
        num_used_blocks=page.value("kv_blocks_used"),
        latencies=tuple(
            Latency(label, _recent(name, first.scrape, page), page.histogram(name))
            for name, label in LATENCIES.items()
        ),
    )


def _steps(first: Reading, last: Reading) -> Steps:
    def mean(name: str) -> float | None:
        histogram = _recent(name, first.scrape, last.scrape)
        return histogram.mean if histogram is not None else None

    seconds = last.at_s - first.at_s
    return Steps(
        per_s=_new("engine_steps_total", first.scrape, last.scrape) / seconds if seconds else None,
        seconds=mean("engine_step_seconds"),
        sequences=mean("engine_step_sequences"),
        tokens=mean("iteration_tokens_total"),
    )


def _recent(name: str, first: Scrape, last: Scrape) -> Histogram | None:
    before, now = first.histogram(name), last.histogram(name)
    return now.since(before) if now is not None and before is not None else None


def _hit_rate(first: Scrape | None, last: Scrape) -> float | None:
    queries = _new("prefix_cache_queries_total", first, last)
    return _new("prefix_cache_hits_total", first, last) / queries if queries > 0 else None


def _new(name: str, first: Scrape | None, last: Scrape) -> float:
    return last.value(name) - (first.value(name) if first is not None else 0.0)
