"""Device activity during steps of the engine, from the Chrome trace of torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule


def traced(step: Callable[[], object], *, warm_up: int, num_steps: int) -> list[dict[str, Any]]:
    """Trace ``num_steps`` steps after ``warm_up`` untraced ones, and return the events.

    Raises:
        RuntimeError, AssertionError, ValueError: the machine does not permit tracing of its device.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with profile(
            activities=[ProfilerActivity.CUDA],
            schedule=schedule(wait=0, warmup=warm_up, active=num_steps, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler:
            for _ in range(warm_up + num_steps):
                step()
                profiler.step()
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def device_gaps(events: Iterable[Mapping[str, Any]]) -> tuple[float, float] | None:
    """Fractions of a Chrome trace's span with an idle device: (between launches, within launches).

    All kernels of a CUDA graph's replay belong to one launch. None if the trace has no device work.
    """
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    work = sorted(
        (event["ts"], event["ts"] + event["dur"], event["args"].get("correlation", 0))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in kinds
    )
    if not work:
        return None
    between = within = 0.0
    first, busy_until, last_launch = work[0]
    for start, end, launch in work[1:]:
        gap = max(0.0, start - busy_until)
        if launch == last_launch:
            within += gap
        else:
            between += gap
        if end > busy_until:
            busy_until, last_launch = end, launch
    span = busy_until - first
    return between / span, within / span
