"""Measures one workload under one load."""

from __future__ import annotations

from dataclasses import asdict

from paged_backend.tools.workloads import WorkloadOptions
from paged_loadtest.bench import ServerBench
from paged_loadtest.options import LoadOptions
from paged_loadtest.report import print_run
from paged_loadtest.session import Session


def serve(session: Session, workload: WorkloadOptions, load: LoadOptions) -> int:
    """Measure, print, and return the exit status.

    Raises:
        PagedError: the server or the workload cannot be measured.
    """
    label = _label(workload, load)

    async def steps(bench: ServerBench) -> None:
        requests = bench.make(workload)
        await bench.warm_up(workload, load)
        bench.forget_cache()
        await bench.measure(label, requests, load, workload.seed)

    return session.run(
        "serve",
        {**asdict(workload), **asdict(load)},
        steps,
        lambda runs: print_run(session.console, runs[0], session.slos),
    )


def _label(workload: WorkloadOptions, load: LoadOptions) -> str:
    words = []
    if workload.dataset_name == "trace":
        words.append("as the trace has it")
    elif load.rate is not None:
        words.append(f"{load.rate:g} requests/s")
    if load.max_concurrency is not None:
        words.append(f"concurrency {load.max_concurrency}")
    return ", ".join(words) or "all at once"
