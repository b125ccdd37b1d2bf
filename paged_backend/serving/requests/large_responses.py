"""Sends large responses on a separate thread, so that they do not delay the others.

The server turns the numbers of a response into text, which takes up to 0.3 microseconds for each of
them and blocks the thread that sends the response. A response with the logits of a prompt therefore
takes as long to send as a thousand responses with a token.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from paged_backend.serving.contract import Array
from paged_backend.serving.requests.cancellation import Cancelled
from paged_backend.serving.requests.open_requests import OpenRequest

LARGE_BYTES = 2**16
"""Responses of more bytes, by an estimate, are large; so are all that have logits."""

TIME_SHARE = 0.25
"""Part of the time that is spent on large responses while others wait for theirs."""


@dataclass(frozen=True, slots=True)
class LargeResponse:
    """A response that waits to be sent.

    Attributes:
        request_id: the id of its request.
        open_request: its request; no other thread uses the sender until the response is done.
        make: returns the output tensors.
        final: whether the response is the last of the request.
    """

    request_id: str
    open_request: OpenRequest
    make: Callable[[], dict[str, Array]]
    final: bool


@dataclass(frozen=True, slots=True)
class DoneResponse:
    """A response that was sent, or an error that kept it from being sent."""

    response: LargeResponse
    error: Exception | None


class LargeResponses:
    """A thread that sends large responses one at a time.

    Args:
        others_wait: returns whether requests without large responses are open. While it returns
        True, the thread pauses after each response, so that it works ``TIME_SHARE`` of the time.
    """

    def __init__(self, others_wait: Callable[[int], bool]) -> None:
        self._others_wait = others_wait
        self._waiting: deque[LargeResponse] = deque()
        self._done: deque[DoneResponse] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._num_open = 0
        self._thread = threading.Thread(target=self._run, name="paged-large", daemon=True)
        self._thread.start()

    def put(self, response: LargeResponse) -> None:
        """Send a response after those that wait already."""
        with self._changed:
            self._waiting.append(response)
            self._num_open += 1
            self._changed.notify()

    def take_done(self) -> list[DoneResponse]:
        """Return the responses that were sent since the last call."""
        with self._changed:
            done = list(self._done)
            self._done.clear()
            self._num_open -= len(done)
            return done

    def close(self) -> list[DoneResponse]:
        """End the thread after the present response, and return what ``take_done`` would.

        Responses that wait are not sent.
        """
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        return self.take_done()

    def _run(self) -> None:
        while (response := self._next()) is not None:
            started_s = time.monotonic()
            error = _send(response)
            seconds = time.monotonic() - started_s
            with self._changed:
                self._done.append(DoneResponse(response, error))
                if self._others_wait(self._num_open):
                    pause_s = seconds * (1 / TIME_SHARE - 1)
                    self._changed.wait_for(lambda: self._closed, pause_s)

    def _next(self) -> LargeResponse | None:
        """Wait for the next response; None once the thread should end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return None if self._closed else self._waiting.popleft()


def _send(response: LargeResponse) -> Exception | None:
    """Send a response unless its request has ended in the meantime; returns what went wrong."""
    sender = response.open_request.sender
    try:
        if response.open_request.end is not None:
            return response.open_request.end
        if sender.is_cancelled():
            return Cancelled()
        sender.send(response.make(), response.final)
    except Exception as error:
        return error
    return None
