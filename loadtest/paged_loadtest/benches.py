"""The benches of a running server: one load, rising concurrency, and rising prefix-cache hits.

Each measures, prints, and returns the exit status. It raises PagedError if the server or the
workload cannot be measured.
"""

from __future__ import annotations

import itertools
from contextlib import AsyncExitStack
from dataclasses import asdict, replace

from paged_backend.tools.workloads import WorkloadOptions
from paged_backend.tools.workloads.options import NUM_PROMPTS
from paged_backend.tools.workloads.request import WorkloadRequest
from paged_loadtest.bench import ServerBench
from paged_loadtest.options import (
    MIN_OWN_LEN,
    LoadOptions,
    PrefixOptions,
    ServeOptions,
    SweepOptions,
)
from paged_loadtest.peer import PEER, errors_of_the_peer, print_rounds
from paged_loadtest.report import print_run, print_series
from paged_loadtest.session import Session

_REQUESTS_PER_SLOT = 8  # minimum: with fewer, ramp-up and ramp-down of a level weigh too much
_ENOUGH = 2  # consecutive levels without a gain: a single one can be slow by chance

_PREFIX_PROMPTS = 32  # prompts for each hit rate; all rates take at most a minute on a small model
_PREFIX_DATASET = "shared-prefix"
_SET_BY_HIT_RATE = {
    "dataset_name": _PREFIX_DATASET,
    "num_prefixes": 1,
    "prefix_len": None,
    "input_len": None,
}


def serve(session: Session, workload: WorkloadOptions, load: ServeOptions) -> int:
    """Measure one workload under one load, and in turn on a peer if there is one."""
    label = _label(workload, load)
    target = load.peer(session.target)
    config = {**asdict(workload), **asdict(load)}

    async def steps(bench: ServerBench) -> None:
        requests = bench.make(workload)
        await bench.warm_up(workload, load)
        bench.forget_cache()
        await bench.measure(label, requests, load, workload.seed)

    async def steps_in_turn(bench: ServerBench) -> None:
        assert target is not None
        await bench.warm_up(workload, load)
        async with AsyncExitStack() as stack:
            with errors_of_the_peer():
                peer = await stack.enter_async_context(bench.beside(target))
                await peer.warm_up(workload, load)
            for number in range(load.rounds):
                contents = replace(workload, seed=workload.seed + number)
                for side, name in ((bench, ""), (peer, PEER)):
                    side.forget_cache()
                    requests = side.make(contents)
                    title = f"{name}{label}, round {number + 1}"
                    await side.measure(title, requests, load, contents.seed)

    if target is not None:
        return session.run(
            "serve", config, steps_in_turn, lambda runs: print_rounds(session.console, runs)
        )
    return session.run(
        "serve", config, steps, lambda runs: print_run(session.console, runs[0], session.slos)
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


def sweep(session: Session, workload: WorkloadOptions, options: SweepOptions) -> int:
    """Measure at concurrency 1, 2, 4, ..., until output tokens per second no longer grow.

    Each level has its own content, so that it finds nothing of other levels in a prefix cache;
    requests from a sharegpt file come in a different order instead.
    """

    async def steps(bench: ServerBench) -> None:
        await bench.warm_up(workload, LoadOptions())
        best, num_without_gain = 0.0, 0
        for index in itertools.count():
            level = 2**index
            requests = _requests_of_level(bench, workload, index, level)
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


def _requests_of_level(
    bench: ServerBench, workload: WorkloadOptions, index: int, level: int
) -> list[WorkloadRequest]:
    count = workload.num_prompts
    if workload.dataset_name != "trace":
        count = max(count or NUM_PROMPTS, _REQUESTS_PER_SLOT * level)
    made = bench.make(replace(workload, seed=workload.seed + index, num_prompts=count))
    return [replace(request, arrival_s=None) for request in made]


def sweep_prefixes(session: Session, workload: WorkloadOptions, options: PrefixOptions) -> int:
    """Measure prompts at each prefix-cache hit rate.

    The shared prefix is sent once before each run, so that the run finds it in the cache.
    """
    load = LoadOptions(max_concurrency=options.max_concurrency)

    async def steps(bench: ServerBench) -> None:
        for index, percent in enumerate(options.percents):
            at_rate = _workload_of_hit_rate(workload, options.prompt_len, index, percent)
            first, *rest = bench.make(at_rate)
            if index == 0:
                await bench.warm_up(at_rate, load)
            bench.forget_cache()
            await bench.send([replace(first, max_tokens=1)], max_concurrency=1)
            await bench.measure(f"shared {percent:g}%", rest, load, workload.seed)

    return session.run(
        "prefix",
        {**asdict(workload), **_SET_BY_HIT_RATE, **asdict(options)},
        steps,
        lambda runs: print_series(session.console, runs, "shared"),
    )


def _workload_of_hit_rate(
    workload: WorkloadOptions, prompt_len: int, index: int, percent: float
) -> WorkloadOptions:
    """The workload of one hit rate: one shared prefix, and one extra prompt to fill the cache."""
    own_len = max(prompt_len - round(prompt_len * percent / 100), MIN_OWN_LEN)
    return replace(
        workload,
        dataset_name=_PREFIX_DATASET,
        num_prefixes=1,
        prefix_len=prompt_len - own_len,
        input_len=str(own_len),
        num_prompts=(workload.num_prompts or _PREFIX_PROMPTS) + 1,
        seed=workload.seed + index,
    )
