"""Several processes that send requests measure what one would."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal

import pytest
from paged_loadtest.endpoints import open_endpoint
from paged_loadtest.endpoints.processes import ProcessLost
from paged_loadtest.load import Driver
from paged_loadtest.options import TargetOptions
from paged_loadtest.timeline import Timeline

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError

pytestmark = pytest.mark.server


@pytest.fixture
def options(targets) -> TargetOptions:
    return TargetOptions(base_url=targets.server.running.grpc_url, processes=2)


def test_several_processes_are_as_one(options):
    """Each request is answered and timed, all have the same salt, and a failure is reported."""
    prompt = WorkloadRequest("What does os.path.join do with absolute paths? " * 4, 2)

    async def run() -> tuple[Driver, set[int], list[int | None], Timeline]:
        async with open_endpoint(options) as endpoint:
            info = await endpoint.check()
            assert (info.vocab_size, info.max_model_len) == (2048, 2048)
            children = {child.pid for child in multiprocessing.active_children()}
            driver = Driver(endpoint, max_concurrency=5)
            await driver.run([WorkloadRequest((7, i), 4 + i) for i in range(20)], [0.0] * 20)
            cached = []
            for _ in range(2):
                endpoint.forget_cache()
                cached += [(await endpoint.send(prompt)).num_cached_tokens for _ in range(3)]
            return driver, children, cached, await endpoint.send(WorkloadRequest("Hi", 10**6))

    driver, children, cached, failed = asyncio.run(run())
    assert len(children) == 2 and not multiprocessing.active_children()
    assert sorted(t.num_output_tokens for t in driver.timelines) == list(range(4, 24))
    # All tokens of a short answer may come in one response.
    assert all(t.is_success and 0 < t.ttft_s <= t.e2e_s for t in driver.timelines)
    assert all(t.e2e_s < driver.elapsed_s for t in driver.timelines)
    assert cached[0] == cached[3] == 0
    assert all(count for place, count in enumerate(cached) if place % 3)
    assert "max_tokens" in failed.error and not failed.is_success


def test_a_process_that_ends_is_named(options):
    async def run() -> None:
        async with open_endpoint(options) as endpoint:
            await endpoint.check()
            sent = [asyncio.ensure_future(endpoint.send(WorkloadRequest("Hi", 1500)))]
            await asyncio.sleep(0.1)
            for child in multiprocessing.active_children():
                os.kill(child.pid, signal.SIGKILL)
            with pytest.raises(ProcessLost, match="has ended"):
                await sent[0]

    asyncio.run(run())


def test_no_server(tmp_path):
    async def run() -> None:
        async with open_endpoint(TargetOptions(base_url="127.0.0.1:1", processes=2)) as endpoint:
            await endpoint.check()

    with pytest.raises(ConfigError, match="nobody speaks triton"):
        asyncio.run(run())
