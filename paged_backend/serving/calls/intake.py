"""Accepts calls: checks them and passes them to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

from paged_backend.errors import DeadlineExceeded, RequestRefused, as_exception
from paged_backend.process import wire
from paged_backend.process.engine_supervisor import EngineSupervisor
from paged_backend.serving.calls.answer import Answer
from paged_backend.serving.calls.call_table import CallTable, Cancel
from paged_backend.serving.calls.open_calls import Arrival, OpenCall, Sender
from paged_backend.serving.calls.parsing import RequestParser
from paged_backend.serving.calls.preparation import Preparation
from paged_backend.serving.calls.tasks import CANCEL, CHARGED, GENERATE, INSPECT
from paged_backend.text.tokenizer import Tokenizer

MAX_WAITING_TASKS = 256  # calls in preparation; above, calls that need no engine are refused
CANCELLED = "Request was cancelled"


class Cancelled(Exception):
    """The client canceled the call; it is answered with Triton's CANCELLED."""


class Intake:
    """Accepts calls on Triton's thread, and prepares large ones on other threads.

    Args:
        link: the engine.
        parser: checks calls.
        tokenizer: of the model.
        table: where calls wait for their responses.
        max_waiting_tokens: limit of the text that waits to be tokenized.
    """

    def __init__(
        self,
        link: EngineSupervisor,
        parser: RequestParser,
        tokenizer: Tokenizer,
        table: CallTable,
        max_waiting_tokens: int,
    ) -> None:
        self._link = link
        self._parser = parser
        self._tokenizer = tokenizer
        self._table = table
        self._preparation = Preparation(max_waiting_tokens)

    def close(self) -> None:
        """Prepare the calls that wait for it, and end the threads."""
        self._preparation.close()

    def submit(self, arrival: Arrival) -> None:
        """Check a call and pass it to the engine.

        This never raises: an error becomes the call's final response.
        """
        with self._answering(arrival.sender):
            self._submit(arrival)

    def _submit(self, arrival: Arrival) -> None:
        task = self._parser.task(arrival.tensors)
        self._parser.check_lengths(arrival.tensors, arrival.parameters_json)
        if task == CANCEL:
            self._cancel(Cancel(self._parser.call_to_cancel(arrival.tensors), arrival.sender))
            return
        self._table.check_open()  # for tasks, too, so that a health probe sees that it is closed
        if task == INSPECT:
            self._table.inspect(arrival.sender)
        elif task == GENERATE:
            arrival.call_id = self._parser.call_id(arrival.tensors)
            arrival.is_request = True
            self._link.check_room(len(self._table), self._table.num_starting)
            self._prepare(arrival, self._start)
        else:
            if self._preparation.num_waiting >= MAX_WAITING_TASKS:
                raise RequestRefused(
                    "queue_full", f"{MAX_WAITING_TASKS} calls wait to be tokenized; retry after 1 s"
                )
            self._prepare(arrival, partial(self._answer_task, task))

    def _cancel(self, cancel: Cancel) -> None:
        """Cancel the calls of a name.

        The client is answered when they have ended, or at once if there is no engine.
        """
        request_id = self._table.cancel(cancel)
        if request_id is not None:
            answer_cancel(self._table, request_id)

    def _prepare(self, arrival: Arrival, act: Callable[[Arrival], None]) -> None:
        """Prepare a call: at once if it is small, and otherwise on another thread."""

        def work() -> None:
            with self._answering(arrival.sender):
                try:
                    self._check_waited(arrival)
                    act(arrival)
                finally:
                    self._table.end_preparing(arrival)

        self._table.begin_preparing(arrival)
        try:
            self._preparation.run(arrival.load, work)
        except RequestRefused:
            self._table.end_preparing(arrival)
            raise

    def _check_waited(self, arrival: Arrival) -> None:
        """Refuse a call that was canceled or ran out of time while it waited to be prepared."""
        if arrival.load.is_small:
            return
        self._table.check_open()
        if arrival.sender.is_cancelled():
            raise Cancelled(CANCELLED)
        if arrival.timeout_s is not None and arrival.clock.age_s > arrival.timeout_s:
            raise DeadlineExceeded(arrival.timeout_s)

    def _answer_task(self, task: str, arrival: Arrival) -> None:
        tenant = self._parser.tenant_of_task(arrival.parameters_json)
        if task in CHARGED:
            self._link.check_rate(tenant)
            self._link.send(wire.ChargeTenant(tenant))
        arrival.sender.send(self._parser.answer_task(task, arrival.tensors), True)

    def _start(self, arrival: Arrival) -> None:
        parsed = self._parser.parse(
            self._table.new_id(), arrival.tensors, arrival.parameters_json, self._link.check_rate
        )
        timeout_s = min(filter(None, (arrival.timeout_s, parsed.timeout_s)), default=None)
        answer = Answer(parsed, self._tokenizer)
        self._table.start(OpenCall(answer, arrival.sender, arrival.clock, timeout_s), arrival)

    @contextlib.contextmanager
    def _answering(self, sender: Sender) -> Iterator[None]:
        """Send an exception as the final response."""
        try:
            yield
        except BaseException as caught:
            error = as_exception(caught)
            if isinstance(error, RequestRefused):
                self._table.count_refusal(error)
            with contextlib.suppress(Exception):  # the server may have ended the call already
                sender.fail(error)


def answer_cancel(table: CallTable, request_id: str) -> None:
    """Answer the call that asked for a cancellation, which is done; ignore unknown ids."""
    cancel = table.confirm_cancel(request_id)
    if cancel is not None:
        with contextlib.suppress(Exception):  # the server may have ended the call already
            cancel.sender.send({}, True)
