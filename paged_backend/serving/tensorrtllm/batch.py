"""A request with several rows; the engine serves each row as a separate request."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from paged_backend.serving.model import TritonSender
from paged_backend.serving.tensorrtllm.arrays import Outputs, element, merge
from paged_backend.values.errors import InvalidRequest, RequestRefused


class BatchResponses:
    """The responses to one request; any thread may use it.

    Args:
        sender: sender of the request's responses.
        num_rows: number of rows.
        is_stream: send each part of an answer at once, and not all answers together at the end, in
            the order of the rows.
        is_decoupled: whether a request may have several responses.
    """

    def __init__(
        self, sender: TritonSender, num_rows: int, *, is_stream: bool, is_decoupled: bool
    ) -> None:
        self._sender = sender
        self._num_open = num_rows
        self._is_stream = is_stream
        self._is_decoupled = is_decoupled
        self._answers: list[list[Outputs]] = [[] for _ in range(num_rows)]
        self._error: Exception | None = None
        self._lock = threading.Lock()  # guards what is above
        self._sending = threading.Lock()  # held while a response is sent, which may take long

    def add(self, row: int, outputs: Iterator[Outputs], *, final: bool) -> None:
        """Take new outputs of a row; ``final`` if they are the last."""
        index = {"batch_index": element(row)}
        found = [tensors | index for tensors in outputs]
        with self._sending:
            with self._lock:
                self._answers[row] += found
                self._num_open -= final
                is_over = self._num_open == 0
                is_due = is_over or (self._is_stream and self._error is None)
                answers = self._take() if is_due else []
            if is_over:
                self._end(answers)
            else:
                for answer in answers:
                    self._sender.send(answer, False)

    def fail(self, error: Exception) -> None:
        """End a row with an error. The request ends with the first error when all rows have."""
        with self._lock:
            self._error = self._error or error
            self._num_open -= 1
            if self._num_open > 0:
                return
        with self._sending:
            self._sender.fail(self._error)

    def is_cancelled(self) -> bool:
        """Return True if the client has disconnected or canceled, or if a row has failed."""
        with self._lock:
            if self._error is not None:
                return True
        # While a response is sent, nobody waits to ask; the next check will.
        if not self._sending.acquire(blocking=False):
            return False
        try:
            return self._sender.is_cancelled()
        finally:
            self._sending.release()

    def _take(self) -> list[Outputs]:
        taken = [answer for answers in self._answers for answer in answers]
        for answers in self._answers:
            answers.clear()
        return taken

    def _end(self, answers: list[Outputs]) -> None:
        if self._error is not None:
            self._sender.fail(self._error)
        elif not self._is_decoupled:
            self._sender.send(merge(answers), True)
        elif not answers:
            self._sender.end()
        else:
            for answer in answers[:-1]:
                self._sender.send(answer, False)
            self._sender.send(answers[-1], True)


@dataclass(frozen=True, slots=True)
class RowSender:
    """Sends the responses to one row: a ``Sender`` of the front end."""

    batch: BatchResponses
    row: int
    convert: Callable[[Outputs], Iterator[Outputs]]  # a response of the model
    rename: Callable[[InvalidRequest], InvalidRequest]

    def send(self, tensors: Outputs, final: bool) -> None:
        """Send one response."""
        self.batch.add(self.row, self.convert(tensors), final=final)

    def prepare(self, tensors: Outputs, final: bool) -> Callable[[], None]:
        """Return what sends the response, which the batch makes when it is sent."""
        return partial(self.send, tensors, final)

    def fail(self, error: Exception) -> None:
        """End the row with an error."""
        if isinstance(error, InvalidRequest):
            error = self.rename(error)
        self.batch.fail(with_queue_words(error))

    def is_cancelled(self) -> bool:
        """Return True if the engine should stop working on the row."""
        return self.batch.is_cancelled()


def with_queue_words(error: Exception) -> Exception:
    """Return an error of a full queue in the words of tensorrtllm_backend, and others as given."""
    if isinstance(error, RequestRefused) and error.reason == "queue_full":
        return _FullQueue(error)
    return error


class _FullQueue(RequestRefused):
    """A full queue in the words that tensorrtllm_backend's clients look for."""

    def __init__(self, error: RequestRefused) -> None:
        words = "Exceeds maximum queue size: Maximum queue size of the engine has been reached"
        super().__init__(error.reason, f"{error.problem} ({words})")
