"""Prefix-cache bench: measures prompts at several hit rates."""

from __future__ import annotations

from dataclasses import asdict, replace

from paged_backend.tools.workloads import WorkloadOptions
from paged_loadtest.bench import ServerBench
from paged_loadtest.options import MIN_OWN_LEN, LoadOptions, PrefixOptions
from paged_loadtest.report import print_series
from paged_loadtest.session import Session

NUM_PROMPTS = 32  # for each hit rate: at most a minute in all on a small model
_DATASET = "shared-prefix"
_SET_BY_RATE = {"dataset_name": _DATASET, "num_prefixes": 1, "prefix_len": None, "input_len": None}


def sweep_prefixes(session: Session, workload: WorkloadOptions, options: PrefixOptions) -> int:
    """Measure at each hit rate, print, and return the exit status.

    The shared prefix is sent once before each run, so that the run finds it in the cache.

    Raises:
        PagedError: the server or the workload cannot be measured.
    """
    load = LoadOptions(max_concurrency=options.max_concurrency)

    async def steps(bench: ServerBench) -> None:
        for index, percent in enumerate(options.percents):
            of_rate = _workload(workload, options.prompt_len, index, percent)
            first, *rest = bench.make(of_rate)
            if index == 0:
                await bench.warm_up(of_rate, load)
            bench.forget_cache()
            await bench.send([replace(first, max_tokens=1)], max_concurrency=1)
            await bench.measure(f"shared {percent:g}%", rest, load, workload.seed)

    return session.run(
        "prefix",
        {**asdict(workload), **_SET_BY_RATE, **asdict(options)},
        steps,
        lambda runs: print_series(session.console, runs, "shared"),
    )


def _workload(
    workload: WorkloadOptions, prompt_len: int, index: int, percent: float
) -> WorkloadOptions:
    """The workload of one hit rate: one shared prefix, and one extra prompt to fill the cache."""
    own_len = max(prompt_len - round(prompt_len * percent / 100), MIN_OWN_LEN)
    return replace(
        workload,
        dataset_name=_DATASET,
        num_prefixes=1,
        prefix_len=prompt_len - own_len,
        input_len=str(own_len),
        num_prompts=(workload.num_prompts or NUM_PROMPTS) + 1,
        seed=workload.seed + index,
    )
