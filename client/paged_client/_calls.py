"""Calls of ``ModelStreamInfer`` with one request each, which are cancelled by the request's name.

A call should not be cancelled by gRPC while responses are on their way. tritonserver's stream
handler takes two locks in both orders: a thread with a response takes the connection's and then the
request's, and the thread that learns of the cancellation takes the request's and then the
connection's. If they meet, both wait forever, and with them all requests of a model instance and
half of the gRPC connections. This was seen in 24.10, rarely and on a busy machine; the code of
26.08 takes the locks in the same orders. So the server's model is asked to end the request, and the
call is read to its end. Only if that fails is the call cancelled by gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

from paged_client.errors import RequestCancelled, from_status
from paged_client.protocol import cancel_request

CANCEL_TIMEOUT_S = 5.0  # for the confirmation that the request has ended
# After a confirmation, the call must end within these times. The first confirmations may come from
# a server that has not seen the request yet.
_END_TIMEOUTS_S = (0.2, 0.5, 1.0, 2.0)


class Canceller:
    """Cancels requests of one model by their names, in threads."""

    def __init__(self, stub: Any, model: str) -> None:
        self._stub = stub
        self._model = model
        self._threads: set[threading.Thread] = set()

    def start(self, end: Callable[[], None]) -> None:
        """Call ``end`` in a thread."""

        def run() -> None:
            try:
                end()
            finally:
                self._threads.discard(thread)

        thread = threading.Thread(target=run, name="paged-cancel", daemon=True)
        self._threads.add(thread)
        thread.start()

    def send(self, name: str) -> bool:
        """Ask the model to end the requests of a name; return whether it has.

        An ensemble refuses it, because it has no tasks.
        """
        request = cancel_request(self._model, name)
        call = self._stub.ModelStreamInfer(iter((request,)), timeout=CANCEL_TIMEOUT_S)
        try:
            responses = list(call)
        except grpc.RpcError:
            return False
        return not any(response.error_message for response in responses)

    def wait(self) -> None:
        """Wait until all requests that are being cancelled have ended."""
        for thread in list(self._threads):
            thread.join()


class Call:
    """A call for threads. One thread may read while others cancel."""

    def __init__(self, call: Any, name: str, canceller: Canceller) -> None:
        self._call = call
        self._name = name
        self._canceller = canceller
        self._is_cancelled = False
        self._has_ended = threading.Event()
        self._reading = threading.Lock()

    def read(self) -> Any | None:
        """Return the next response; None after the last one. Raises ClientError."""
        with self._reading:
            if self._is_cancelled:
                raise RequestCancelled("cancelled")
            try:
                response = next(self._call, None)
            except grpc.RpcError as error:
                self._has_ended.set()
                raise from_status(error) from None
            if response is None:
                self._has_ended.set()
            elif self._is_cancelled or response.error_message:
                self._read_to_the_end()
        if self._is_cancelled:
            raise RequestCancelled("cancelled")
        return response

    def cancel(self) -> None:
        """Start to cancel the request, unless it has ended."""
        if not self._is_cancelled and not self._has_ended.is_set():
            self._is_cancelled = True
            self._canceller.start(self._end)

    def _end(self) -> None:
        reader = threading.Thread(target=self._drain, name="paged-drain", daemon=True)
        reader.start()
        for timeout_s in _END_TIMEOUTS_S:
            if not self._canceller.send(self._name):
                break
            if self._has_ended.wait(timeout_s):
                return
        self._call.cancel()

    def _drain(self) -> None:
        with self._reading:
            self._read_to_the_end()

    def _read_to_the_end(self) -> None:
        # An error is the last response, too: tritonserver 24.10 keeps a request open forever if it
        # is cancelled between its last response and the end of the call.
        with contextlib.suppress(grpc.RpcError):
            deque(self._call, maxlen=0)
        self._has_ended.set()


class AsyncCanceller:
    """Cancels requests of one model by their names, in tasks."""

    def __init__(self, stub: Any, model: str) -> None:
        self._stub = stub
        self._model = model
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, end: Coroutine[Any, Any, None]) -> None:
        """Run ``end`` in a task."""
        task = asyncio.create_task(end)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def send(self, name: str) -> bool:
        """Ask the model to end the requests of a name; return whether it has.

        An ensemble refuses it, because it has no tasks.
        """
        request = cancel_request(self._model, name)
        call = self._stub.ModelStreamInfer(iter((request,)), timeout=CANCEL_TIMEOUT_S)
        try:
            responses = [response async for response in call]
        except grpc.RpcError:
            return False
        return not any(response.error_message for response in responses)

    async def wait(self) -> None:
        """Wait until all requests that are being cancelled have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class AsyncCall:
    """A call for asyncio. One task may read while others cancel."""

    def __init__(self, call: Any, name: str, canceller: AsyncCanceller) -> None:
        self._call = call
        self._name = name
        self._canceller = canceller
        self._is_cancelled = False
        self._has_ended = False
        self._reading: asyncio.Future[Any] | None = None

    async def read(self) -> Any | None:
        """Return the next response; None after the last one. Raises ClientError.

        The request is cancelled if the task is cancelled that waits here.
        """
        if self._is_cancelled:
            raise RequestCancelled("cancelled")
        # gRPC cancels a call if a task is cancelled that waits for it, so another task waits.
        self._reading = reading = asyncio.ensure_future(self._call.read())
        try:
            response = await asyncio.shield(reading)
        except asyncio.CancelledError:
            if reading.cancelled():  # gRPC raises it for a cancelled call, too
                raise RequestCancelled("cancelled") from None
            self.cancel()
            raise
        except grpc.RpcError as error:
            self._has_ended = True
            raise from_status(error) from None
        if self._is_cancelled:
            raise RequestCancelled("cancelled")
        if response is grpc.aio.EOF:
            self._has_ended = True
            return None
        if response.error_message:
            await self._read_to_the_end()
        return response

    def cancel(self) -> None:
        """Start to cancel the request, unless it has ended."""
        if not self._is_cancelled and not self._has_ended:
            self._is_cancelled = True
            self._canceller.start(self._end())

    async def abort(self) -> None:
        """Ask the model to end the request with the tokens so far, until it has ended."""
        for timeout_s in _END_TIMEOUTS_S:
            if self._has_ended or self._is_cancelled or not await self._canceller.send(self._name):
                return
            await asyncio.sleep(timeout_s)

    async def _end(self) -> None:
        reading = asyncio.ensure_future(self._read_to_the_end())
        try:
            for timeout_s in _END_TIMEOUTS_S:
                if not await self._canceller.send(self._name):
                    break
                await asyncio.wait({reading}, timeout=timeout_s)
                if reading.done():
                    break
        finally:
            self._call.cancel()  # does nothing if it has ended

    async def _read_to_the_end(self) -> None:
        # An error is the last response, too: tritonserver 24.10 keeps a request open forever if it
        # is cancelled between its last response and the end of the call.
        with contextlib.suppress(grpc.RpcError):
            response = None if self._reading is None else await self._reading
            while response is not grpc.aio.EOF:
                response = await self._call.read()
        self._has_ended = True
