"""An endpoint that sends requests from several processes.

One process reads about 5,000 streamed responses a second; the latencies of more would be its own.
The processes have the clock of `time.perf_counter` in common, so they return timelines as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import multiprocessing
import signal
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import PagedError
from paged_loadtest.destination import ServerInfo
from paged_loadtest.endpoints.endpoint import Endpoint, MakeEndpoint
from paged_loadtest.options import TargetOptions
from paged_loadtest.timeline import Timeline

Pipe: TypeAlias = "Connection[Any, Any]"  # its messages are described in `_serve`


class ProcessLost(PagedError, RuntimeError):
    """Raised when a process that sends requests has ended."""

    def __init__(self) -> None:
        super().__init__("a process of the load tester has ended")


class ManyProcessesEndpoint(Endpoint):
    """An endpoint that sends requests from several processes, in turn.

    Args:
        target: the server and its model, and the number of processes.
        make: makes the endpoint of each process, and one that asks for the server's state here.
    """

    def __init__(self, target: TargetOptions, make: MakeEndpoint) -> None:
        super().__init__(target)
        self._own = make(target)
        self._make = make
        self._pipes: list[Pipe] = []
        self._processes: list[BaseProcess] = []
        self._answers: dict[int, tuple[Pipe, asyncio.Future[Timeline]]] = {}  # by number
        self._numbers = itertools.count()

    async def check(self) -> ServerInfo:
        """Check that the server answers and has the model, and start the processes."""
        info = await self._own.check()
        context = multiprocessing.get_context("spawn")
        for _ in range(self._target.processes):
            pipe, other = context.Pipe()
            process = context.Process(target=_run, args=(self._target, self._make, other))
            process.start()
            other.close()
            self._pipes.append(pipe)
            self._processes.append(process)
        for pipe in self._pipes:
            await asyncio.to_thread(_wait_until_ready, pipe)
            asyncio.get_running_loop().add_reader(pipe.fileno(), partial(self._take, pipe))
        return info

    async def is_ready(self) -> bool:
        return await self._own.is_ready()

    def use_cache(self, salt: str) -> None:
        self._own.use_cache(salt)
        for pipe in self._pipes:
            pipe.send(salt)

    async def send(self, request: WorkloadRequest) -> Timeline:
        number = next(self._numbers)
        pipe = self._pipes[number % len(self._pipes)]
        answer: asyncio.Future[Timeline] = asyncio.get_running_loop().create_future()
        self._answers[number] = pipe, answer
        try:
            pipe.send((number, request))
            return await answer
        except OSError as error:
            raise ProcessLost from error
        finally:
            del self._answers[number]

    async def aclose(self) -> None:
        for pipe in self._pipes:
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            pipe.close()
        for process in self._processes:
            await asyncio.to_thread(process.join)
        await self._own.aclose()

    def _take(self, pipe: Pipe) -> None:
        """Hand the timelines that have arrived to those who wait for them."""
        try:
            while pipe.poll():
                number, answer = pipe.recv()
                if number not in self._answers:
                    continue  # the caller has stopped waiting
                _, waiting = self._answers[number]
                if isinstance(answer, Exception):
                    waiting.set_exception(answer)
                else:
                    waiting.set_result(answer)
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            for other, waiting in self._answers.values():
                if other is pipe and not waiting.done():
                    waiting.set_exception(ProcessLost())


def _wait_until_ready(pipe: Pipe) -> None:
    """Wait until a process is connected to the server.

    Raises:
        PagedError: it cannot send requests.
    """
    try:
        error = pipe.recv()
    except EOFError:
        error = ProcessLost()
    if error is not None:
        raise error


def _run(target: TargetOptions, make: MakeEndpoint, pipe: Pipe) -> None:
    """Be one of the processes, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    asyncio.run(_serve(target, make, pipe))


async def _serve(target: TargetOptions, make: MakeEndpoint, pipe: Pipe) -> None:
    """Send None or an error, then for each (number, request) its number and timeline or error."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def answer(number: int, request: WorkloadRequest) -> None:
        found: Timeline | PagedError
        try:
            found = await endpoint.send(request)
        except PagedError as error:
            found = error
        with contextlib.suppress(OSError):
            pipe.send((number, found))

    def take() -> None:
        try:
            while pipe.poll():
                message = pipe.recv()
                if isinstance(message, str):
                    endpoint.use_cache(message)
                    continue
                task = loop.create_task(answer(*message))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except (EOFError, OSError):
            loop.remove_reader(pipe.fileno())
            ended.set()

    async with make(target) as endpoint:
        try:
            await endpoint.check()
        except PagedError as error:
            pipe.send(error)
            return
        pipe.send(None)
        gc.freeze()
        loop.add_reader(pipe.fileno(), take)
        await ended.wait()
