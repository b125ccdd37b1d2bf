"""Increases the concurrency until output tokens per second no longer grow."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace

from paged_backend.tools.workloads import WorkloadOptions
from paged_backend.tools.workloads.options import NUM_PROMPTS
from paged_backend.tools.workloads.request import WorkloadRequest
from paged_loadtest.bench import ServerBench
from paged_loadtest.options import LoadOptions, SweepOptions
from paged_loadtest.report import print_series
from paged_loadtest.session import Session

_REQUESTS_PER_SLOT = 8  # minimum: with fewer, ramp-up and ramp-down of a level weigh too much

_ENOUGH = 2  # consecutive levels without a gain: a single one can be slow by chance


def sweep(session: Session, workload: WorkloadOptions, options: SweepOptions) -> int:
    """Measure at concurrency 1, 2, 4, ..., print, and return the exit status.

    Each level has its own content, so that it finds nothing of other levels in a prefix cache;
    requests from a sharegpt file come in a different order instead.

    Raises:
        PagedError: the server or the workload cannot be measured.
    """

    async def steps(bench: ServerBench) -> None:
        await bench.warm_up(workload, LoadOptions())
        best, num_without_gain = 0.0, 0
        for index in itertools.count():
            level = 2**index
            requests = _requests(bench, workload, index, level)
            if level > options.up_to or len(requests) < level:
                return
            bench.forget_cache()
            load = LoadOptions(max_concurrency=level)
            run = await bench.measure(f"concurrency {level}", requests, load, workload.seed)
            has_gained = run.output_throughput >= best * (1 + options.min_gain / 100)
            num_without_gain = 0 if has_gained else num_without_gain + 1
            if num_without_gain == _ENOUGH:
                return
            best = max(best, run.output_throughput)

    return session.run(
        "sweep",
        {**asdict(workload), **asdict(options)},
        steps,
        lambda runs: print_series(session.console, runs, "concurrency"),
    )


def _requests(
    bench: ServerBench, workload: WorkloadOptions, index: int, level: int
) -> list[WorkloadRequest]:
    count = workload.num_prompts
    if workload.dataset_name != "trace":
        count = max(count or NUM_PROMPTS, _REQUESTS_PER_SLOT * level)
    made = bench.make(replace(workload, seed=workload.seed + index, num_prompts=count))
    return [replace(request, arrival_s=None) for request in made]
