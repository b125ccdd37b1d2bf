"""Streams of tokens from an engine's process: equal, resumed, canceled and drained."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from worker_requests import PARAMS, PROMPTS

from paged_backend import LLM
from paged_backend.dynamo.streams import TokenStream, TokenStreams
from paged_backend.process import engine_client
from paged_backend.process.lifetime import ProcessId
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import (
    CrashLimit,
    EngineDead,
    InvalidRequest,
    RequestRefused,
)
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

NUMBERS = count()


@pytest.fixture(autouse=True)
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that takes what is otherwise put into the temporary directory."""
    with tempfile.TemporaryDirectory(prefix="pb-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield Path(folder)


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wait until each engine that a test has started has ended."""
    processes = []
    start = engine_client._start

    def recorded(*args: Any) -> subprocess.Popen[bytes]:
        processes.append(start(*args))
        return processes[-1]

    monkeypatch.setattr(engine_client, "_start", recorded)
    yield
    for process in processes:
        process.wait(30)


@asynccontextmanager
async def started(**options: Any) -> AsyncIterator[TokenStreams]:
    # Another name for each: an engine that ends removes the folder of its name.
    name = f"demo-{next(NUMBERS)}"
    streams = TokenStreams(EngineConfig.from_mapping({"model": "demo", **options}), name)
    ready, stats = await streams.start()
    assert (ready.limits.max_model_len, stats.block_size) == (2048, 16)
    try:
        yield streams
    finally:
        await streams.stop(0)


def open_stream(streams: TokenStreams, index: int = 0, num_tokens: int = 40) -> TokenStream:
    params = PARAMS[index]
    if num_tokens != params.max_tokens:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    return streams.open(Request(streams.new_id(), PROMPTS[index], params))


async def tokens_of(streams: TokenStreams, stream: TokenStream) -> list[int]:
    try:
        return [token async for output in stream.outputs() for token in output.new_token_ids]
    finally:
        streams.close(stream)


def kill_engine(folder: Path) -> None:
    (pid_file,) = folder.rglob("engine.pid")
    os.kill(ProcessId.parse(pid_file.read_text()).pid, signal.SIGKILL)


def test_streams_and_beams_equal_the_engines_also_after_it_was_killed(
    short_folder: Path, expected_tokens: list[list[int]]
) -> None:
    """In the end a stop waits for a stream."""
    params = SamplingParams(temperature=0, beam_width=3, n=2, max_tokens=40, ignore_eos=True)
    (expected,) = LLM("demo", device="cpu").generate([PROMPTS[0]], params)

    async def generate() -> tuple[list[list[int]], list[list[int]]]:
        async with started() as streams:
            beams = streams.open(Request(streams.new_id(), PROMPTS[0], params))
            opened = [open_stream(streams, index) for index in range(len(PROMPTS))]
            tasks = [asyncio.create_task(tokens_of(streams, stream)) for stream in opened]
            # The search, which was asked for before, has begun when these have tokens.
            while not all(sum(stream.num_tokens) >= 2 for stream in opened):
                await asyncio.sleep(0.001)
            assert not all(stream.is_finished for stream in opened) and not beams.is_finished
            kill_engine(short_folder)
            late = open_stream(streams)  # waits for the next engine
            assert await tokens_of(streams, late) == expected_tokens[0]
            answers: list[list[int]] = [[], []]
            async for output in beams.outputs():
                answers[output.index] += output.new_token_ids
            streams.close(beams)
            all_tokens = await asyncio.gather(*tasks)
            short = asyncio.create_task(tokens_of(streams, open_stream(streams)))
            await asyncio.sleep(0)
            await streams.stop(30)
            assert await short == expected_tokens[0]
            with pytest.raises(RequestRefused, match="draining"):
                open_stream(streams)
            return all_tokens, answers

    answers, of_beams = asyncio.run(generate())
    assert answers == expected_tokens
    assert of_beams == [output.token_ids for output in expected.outputs]


def test_a_canceled_stream_ends_here_and_in_the_engine() -> None:
    """And so does one that takes longer than a stop waits."""

    async def cancel() -> None:
        async with started(max_num_seqs=1) as streams:
            long, waiting = open_stream(streams, num_tokens=2000), open_stream(streams)
            outputs = long.outputs()
            await anext(outputs)
            streams.close(long)
            assert await asyncio.wait_for(tokens_of(streams, waiting), 5)
            assert len([output async for output in outputs]) < 2000
            assert sum(long.num_tokens) < 2000
            longer = asyncio.create_task(tokens_of(streams, open_stream(streams, num_tokens=2000)))
            await asyncio.sleep(0)
            await streams.stop(0)
            with pytest.raises(RequestRefused, match="draining"):
                await longer

    asyncio.run(cancel())


def test_errors_end_streams(short_folder: Path) -> None:
    async def fail() -> None:
        options = {"max_crashes_per_request": 1, "engine_restart_timeout_s": 0}
        async with started(**options) as streams:
            wrong = streams.open(Request(streams.new_id(), [5000], SamplingParams()))
            with pytest.raises(InvalidRequest):
                await tokens_of(streams, wrong)
            suspect = open_stream(streams, num_tokens=2000)
            await anext(suspect.outputs())
            kill_engine(short_folder)
            with pytest.raises(CrashLimit):
                await tokens_of(streams, suspect)
            await asyncio.sleep(0)
            with pytest.raises(EngineDead):
                open_stream(streams)

    asyncio.run(fail())
