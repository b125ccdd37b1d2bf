"""Measures runs against one server; results so far are kept even if a run fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from typing import Self

from paged_backend.tools.workloads import TokenizerContext, WorkloadOptions, make_requests
from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError, PagedError
from paged_loadtest.destination import ServerInfo
from paged_loadtest.endpoints import open_endpoint
from paged_loadtest.load import Driver, arrival_times
from paged_loadtest.options import LoadOptions, TargetOptions
from paged_loadtest.progress import progress_bar
from paged_loadtest.results import Run, ServerSample, summarise
from paged_loadtest.sampling import ServerSampler, server_samples
from paged_loadtest.slo import Slo

_UNLIMITED = 2**31 - 1
_PROBE_TOKENS = 2


class NothingMeasured(PagedError, RuntimeError):
    """Raised when no request of a run succeeded."""


class ServerBench:
    """A connection to the server and the runs measured so far."""

    def __init__(
        self,
        target: TargetOptions,
        slos: Sequence[Slo],
        metrics_url: str | None,
        on_run: Callable[[], None],
    ) -> None:
        self.runs: list[Run] = []  # runs of this server and of its peers
        self.facts = ServerInfo("unknown")
        self._target = target
        self._slos = slos
        self._on_run = on_run
        self._sampler = ServerSampler(metrics_url, target.model) if metrics_url else None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Connect to the server and check it.

        Raises:
            ConfigError: the server, the model or the metrics page is not available.
        """
        async with AsyncExitStack() as stack:
            self._endpoint = await stack.enter_async_context(open_endpoint(self._target))
            self.facts = await self._endpoint.check()
            if self._sampler is not None:
                self._sampler.check()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    def beside(self, target: TargetOptions) -> ServerBench:
        """Return the bench of another server, with runs among these."""
        bench = ServerBench(target, self._slos, None, self._on_run)
        bench.runs = self.runs
        return bench

    def make(self, workload: WorkloadOptions) -> list[WorkloadRequest]:
        """Build the requests of a workload for this model.

        Raises:
            ConfigError: the workload cannot be built, or a request does not fit the model.
        """
        target, facts = self._target, self.facts
        return make_requests(
            workload,
            TokenizerContext(
                vocab_size=target.vocab_size or facts.vocab_size,
                max_model_len=target.max_model_len or facts.max_model_len or _UNLIMITED,
                tokenizer=target.tokenizer,
            ),
        )

    async def warm_up(self, workload: WorkloadOptions, load: LoadOptions) -> None:
        """Check that the server accepts such requests, then send the warm-up requests.

        Raises:
            ConfigError: the server rejects such a request.
        """
        like = self.make(replace(workload, seed=_other_seed(workload.seed), num_prompts=1))[0]
        probe = replace(like, max_tokens=min(like.max_tokens, _PROBE_TOKENS), later=())
        timeline = await self._endpoint.send(probe)
        if not timeline.is_success:
            raise ConfigError(
                f"{self._target.model} does not take requests of this workload: "
                f"{timeline.error or 'no token came'}"
            )
        if load.num_warmups:
            options = replace(
                workload, seed=_other_seed(workload.seed), num_prompts=load.num_warmups
            )
            requests = self.make(options)
            await self.send(requests, max_concurrency=load.max_concurrency)

    def forget_cache(self) -> None:
        """Make later requests miss everything already in the server's prefix cache."""
        if self._target.fresh_cache:
            self._endpoint.forget_cache()

    async def send(self, requests: Sequence[WorkloadRequest], max_concurrency: int | None) -> None:
        """Send requests without measuring them.

        Raises:
            ServerLost: the server stopped answering.
        """
        driver = Driver(self._endpoint, max_concurrency)
        await driver.run(requests, [0.0] * len(requests))

    async def measure(
        self, label: str, requests: Sequence[WorkloadRequest], load: LoadOptions, seed: int
    ) -> Run:
        """Send requests, and add the run (even an incomplete one) to `runs`.

        Raises:
            ServerLost: the server stopped answering.
            NothingMeasured: every request failed.
        """
        times = arrival_times(requests, load, seed)
        num_requests = sum(1 + len(request.later) for request in requests)  # with follow-ups
        watch = None if self._sampler is None else self._sampler.watch()
        with ExitStack() as stack:
            on_finished = stack.enter_context(progress_bar(label, num_requests))
            driver = Driver(
                self._endpoint,
                load.max_concurrency,
                lambda timeline: on_finished(timeline, driver.elapsed_s),
            )
            if watch is not None:
                stack.enter_context(watch)
            try:
                await driver.run(requests, times)
            finally:
                samples = [] if watch is None else server_samples(watch)
                run = self._add(label, driver, load, samples)
        if not run.num_completed:
            reason = max(run.errors, key=lambda message: run.errors[message])
            raise NothingMeasured(f"all {run.num_failed} requests failed: {reason}")
        return run

    def _add(
        self, label: str, driver: Driver, load: LoadOptions, samples: Sequence[ServerSample]
    ) -> Run:
        run = summarise(
            label,
            driver.timelines,
            driver.elapsed_s,
            max_concurrency=load.max_concurrency,
            request_rate=load.rate,
            slos=self._slos,
            server=samples,
        )
        self.runs.append(run)
        self._on_run()
        return run


def _other_seed(seed: int) -> int:
    """A seed that no measured run uses, so that no run finds this content in the prefix cache."""
    return seed ^ (1 << 62)
