"""The open requests of a Dynamo worker: sent to the engine's process, and resumed if it dies."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count

from paged_backend.process import wire
from paged_backend.process.engine_supervisor import (
    EngineDied,
    EngineRestarted,
    EngineSupervisor,
    EngineUnavailable,
    Event,
)
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import (
    CrashLimit,
    EngineDead,
    InvalidRequest,
    PagedError,
    RequestRefused,
    place_of,
)
from paged_backend.values.log import LOG
from paged_backend.values.outputs import EngineStats, SequenceOutput
from paged_backend.values.request import Request

_POLL_S = 0.5  # longest wait for a message, and so for the end of the receiving task
_DRAIN_POLL_S = 0.05
STOPPING = RequestRefused("draining", "the worker stops")


class TokenStream:
    """One request, and the outputs that its reader has not taken yet.

    Attributes:
        request: the request.
        tokens: the tokens of each completion so far, to resume it; None for one that has ended.
        num_tokens: number of tokens of each completion that the reader has taken.
        is_in_flight: whether an engine knows the request.
        num_crashes: number of engines that died while it was in flight.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens: list[list[int] | None] = [[] for _ in range(request.params.n)]
        self.num_tokens = [0] * request.params.n
        self.is_in_flight = False
        self.num_crashes = 0
        self._queue: asyncio.Queue[SequenceOutput | PagedError | None] = asyncio.Queue()

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended."""
        return all(tokens is None for tokens in self.tokens)

    def append(self, output: SequenceOutput) -> None:
        """Add an output of the engine."""
        tokens = self.tokens[output.index]
        if tokens is None:
            return
        tokens += output.new_token_ids
        if output.finish_reason is not None:
            self.tokens[output.index] = None
        self._queue.put_nowait(output)
        if self.is_finished:
            self._queue.put_nowait(None)

    def end(self, error: PagedError | None = None) -> None:
        """End the stream with an error, or without one after it was canceled."""
        self._queue.put_nowait(error)

    async def outputs(self) -> AsyncIterator[SequenceOutput]:
        """Yield outputs until the stream ends.

        Raises:
            PagedError: the request has failed.
        """
        while (item := await self._queue.get()) is not None:
            if isinstance(item, PagedError):
                raise item
            self.num_tokens[item.index] += len(item.new_token_ids)
            yield item


class TokenStreams:
    """The front end of a Dynamo worker; all methods are called on one event loop.

    A task takes the engine's outputs to their streams. If the engine dies, its supervisor starts
    another one, and open requests go on with the tokens that they have.

    Args:
        config: options of the engine.
        name: name of the model, for the engine's folder.

    Attributes:
        on_stats: called with the engine's counts, at intervals and when its work ends.
    """

    def __init__(self, config: EngineConfig, name: str) -> None:
        self._config = config
        self._link = EngineSupervisor(config, name, "dynamo", os.getpid())
        self._thread = ThreadPoolExecutor(1, "paged-receiver")  # the supervisor wants one thread
        self._open: dict[str, TokenStream] = {}  # by request_id, the earliest first
        self._ids = count()
        self._has_engine = True
        self._closed: PagedError | None = None
        self._first_stats: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._is_stopping = False
        self.on_stats: Callable[[EngineStats], None] = lambda stats: None

    async def start(self) -> tuple[wire.EngineReady, EngineStats]:
        """Start the engine, and wait until it is ready.

        Returns:
            What the engine has loaded, and its first counts.

        Raises:
            ConfigError: the engine cannot be started with these options.
        """
        loop = asyncio.get_running_loop()
        ready = await loop.run_in_executor(self._thread, self._link.connect)
        self._task = loop.create_task(self._run())
        return ready, await self._first_stats

    def new_id(self) -> str:
        """Return an id that no other request of any front end has."""
        return f"{self._link.identity}-{next(self._ids)}"

    def open(self, request: Request) -> TokenStream:
        """Send a request to the engine; without an engine it waits for the next one.

        Raises:
            PagedError: no requests are accepted, or the queue is full.
        """
        if self._closed is not None:
            raise self._closed.with_traceback(None)  # else each raise would add to it
        self._link.check_room(len(self._open), 0)
        stream = TokenStream(request)
        if self._has_engine:
            stream.is_in_flight = self._link.send(wire.AddRequest(request))
        self._open[request.request_id] = stream
        return stream

    def close(self, stream: TokenStream) -> None:
        """Forget a stream, and end its request in the engine if it has not ended."""
        request_id = stream.request.request_id
        if self._open.pop(request_id, None) is not None and not stream.is_finished:
            self._link.send(wire.AbortRequest(request_id))
            stream.end()

    async def stop(self, drain_timeout_s: float) -> None:
        """Wait for open streams, fail those that take longer, and disconnect from the engine.

        It may be called again, and after ``start`` has failed.

        Args:
            drain_timeout_s: longest wait for the streams.
        """
        self._closed = self._closed or STOPPING
        deadline_s = time.monotonic() + drain_timeout_s
        while self._open and time.monotonic() < deadline_s:
            await asyncio.sleep(_DRAIN_POLL_S)
        self._fail_all(STOPPING)
        self._is_stopping = True
        if self._task is not None:
            await self._task
        self._thread.shutdown()
        self._link.close()

    # --- what comes back --------------------------------------------------------------------

    async def _run(self) -> None:
        """Receive until ``stop``. All events are handled before more are received.

        The state of the supervisor therefore never differs from the one here by more than the
        events that are being handled, so no request is sent twice to an engine.
        """
        loop = asyncio.get_running_loop()
        try:
            while not self._is_stopping:
                for event in await loop.run_in_executor(self._thread, self._link.receive, _POLL_S):
                    self._handle(event)
        except Exception as error:  # an internal error: no client may be left waiting
            LOG.error("the worker failed: %s", place_of(error))
            self._give_up(EngineDead(f"the worker failed: {place_of(error)}"))

    def _handle(self, event: Event) -> None:
        match event:
            case wire.StepOutputs(outputs):
                for output in outputs:
                    if (stream := self._open.get(output.request_id)) is not None:
                        stream.append(output)
            case wire.RequestRejected(request_id, text):
                self._fail(request_id, InvalidRequest.verbatim("request", text))
            case wire.RequestDeclined(request_id, reason, problem):
                self._fail(request_id, RequestRefused(reason, problem))
            case wire.Stats(stats, _):
                self.on_stats(stats)
                if not self._first_stats.done():
                    self._first_stats.set_result(stats)
            case EngineDied(_):
                self._lose_engine()
            case EngineRestarted(_):
                self._resume()
            case EngineUnavailable(error):
                self._give_up(error)
            case _:
                raise RuntimeError(f"unexpected message from the engine: {event!r}")

    def _lose_engine(self) -> None:
        """Keep streams for the next engine, except those that may have killed the last ones."""
        self._has_engine = False
        for stream in list(self._open.values()):
            stream.num_crashes += stream.is_in_flight
            stream.is_in_flight = False
            if stream.num_crashes >= self._config.max_crashes_per_request:
                self._fail(stream.request.request_id, CrashLimit(stream.num_crashes))

    def _resume(self) -> None:
        """Send open requests to a new engine, with the tokens that previous engines generated."""
        self._has_engine = True
        if isinstance(self._closed, EngineDead):
            self._closed = None
        for stream in self._open.values():
            if not stream.is_finished:
                message = wire.AddRequest(stream.request, stream.tokens)
                stream.is_in_flight = self._link.send(message)

    def _give_up(self, error: EngineDead) -> None:
        """Accept no requests until an engine is ready again."""
        self._has_engine = False
        self._closed = self._closed or error
        self._fail_all(error)
        if not self._first_stats.done():
            self._first_stats.set_exception(error)

    def _fail_all(self, error: PagedError) -> None:
        for request_id in list(self._open):
            self._fail(request_id, error)

    def _fail(self, request_id: str, error: PagedError) -> None:
        stream = self._open.pop(request_id, None)
        if stream is not None:
            stream.end(error)
