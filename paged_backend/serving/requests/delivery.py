"""Sends the responses to open requests, and ends each request exactly once."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import NamedTuple

from paged_backend.process import wire
from paged_backend.serving.contract import as_strings
from paged_backend.serving.metrics.stat_logger import StatLogger
from paged_backend.serving.requests.cancellation import Cancelled
from paged_backend.serving.requests.inspection import view_json
from paged_backend.serving.requests.intake import answer_cancel
from paged_backend.serving.requests.large_responses import (
    DoneResponse,
    LargeResponse,
    LargeResponses,
)
from paged_backend.serving.requests.open_requests import (
    CancelledSenders,
    CancelSweep,
    OpenRequest,
    Sender,
)
from paged_backend.serving.requests.request_table import RequestTable
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.outputs import EngineView, FinishReason, SequenceOutput

MAX_PREPARED = 32
"""Responses that are made before the first of them is sent, in less than a millisecond.

The thread waits for the server with each response. After that, the data of code that makes another
response is not in the processor's caches, and the code would take three times as long.
"""


class _Prepared(NamedTuple):
    """A response that was made and must be sent."""

    request_id: str
    send: Callable[[], None]
    final: bool


class Delivery:
    """The work of the sending thread on open requests; no other thread uses it.

    Args:
        table: the open requests.
        stat_logger: is told of tokens and of the ends of requests.
    """

    def __init__(self, table: RequestTable, stat_logger: StatLogger) -> None:
        self._table = table
        self._stat_logger = stat_logger
        self._large = LargeResponses(lambda num_large: len(table) > num_large)
        self._sweep = CancelSweep()
        self._cancelled = CancelledSenders()
        self._prepared: list[_Prepared] = []

    @property
    def num_open(self) -> int:
        """The number of requests without a final response."""
        return len(self._table) + len(self._cancelled)

    def respond_all(self, outputs: Iterable[SequenceOutput]) -> None:
        """Add outputs to their requests, and send one response for each request."""
        arrived: defaultdict[str, list[SequenceOutput]] = defaultdict(list)
        for output in outputs:
            arrived[output.request_id].append(output)
        arrivals = iter(arrived.items())
        while portion := list(islice(arrivals, MAX_PREPARED)):
            for request_id, part in portion:
                self._guarded(partial(self._respond, part), request_id)
            self._send_prepared()

    def _send_prepared(self) -> None:
        """Send the responses that were made, each request's before its next one is made."""
        prepared, self._prepared = self._prepared, []
        for response in prepared:
            self._guarded(partial(self._send, response), response.request_id)

    def _send(self, response: _Prepared, request_id: str) -> None:
        response.send()
        if response.final:
            self._table.remove(request_id)

    def _respond(self, outputs: list[SequenceOutput], request_id: str) -> None:
        open_request = self._table.get(request_id)
        if open_request is None:
            return  # canceled while the engine computed
        self._stat_logger.report_tokens(open_request.clock, outputs)
        for output in outputs:
            if output.problem:
                raise InvalidRequest.verbatim("structured_outputs", output.problem)
            if open_request.answer.append(output):
                self._table.tell(request_id, wire.StopCompletion(request_id, output.index))
            open_request.was_aborted |= output.finish_reason is FinishReason.ABORT
        self._prepare_if_due(open_request, request_id)

    def _prepare_if_due(self, open_request: OpenRequest, request_id: str) -> None:
        answer = open_request.answer
        if open_request.is_lent or not answer.is_due:
            return
        final = answer.is_finished
        if final and not open_request.was_aborted:
            self._stat_logger.report_end(open_request.clock, answer.request)
        if answer.is_large or open_request.is_large:
            open_request.is_lent = True
            make = answer.take_later()
            self._large.put(LargeResponse(request_id, open_request, make, final))
            return
        send = open_request.sender.prepare(answer.take(), final)
        self._prepared.append(_Prepared(request_id, send, final))

    def _return_lent(self, done: DoneResponse, request_id: str) -> None:
        """Go on with a request after its large response was sent, or could not be sent."""
        open_request = done.response.open_request
        open_request.is_lent = False
        if done.error is None and done.response.final:
            self._table.remove(request_id)
        elif isinstance(done.error, Cancelled):
            self._cancel(open_request, request_id)
        elif (error := done.error or open_request.end) is not None:
            self.abort(request_id, error)
        else:
            self._prepare_if_due(open_request, request_id)

    def take_large(self) -> None:
        """Go on with the requests after their large responses were sent."""
        for done in self._large.take_done():
            self._guarded(partial(self._return_lent, done), done.response.request_id)
        self._send_prepared()

    def close(self) -> None:
        """End the thread of large responses, and take back the requests that it has."""
        for done in self._large.close():
            self._guarded(partial(self._return_lent, done), done.response.request_id)
        self._send_prepared()
        self._table.return_lent()

    def show(self, request_id: str, view: EngineView) -> None:
        """Answer the task ``inspect``."""
        sender = self._table.remove(request_id)
        if sender is not None:
            sender.send({"text_output": as_strings([view_json(view)])}, True)

    def end_cancelled(self) -> None:
        """Check some requests for cancellation, and end those that were canceled before."""
        self._fail_cancelled(self._cancelled.take_due())
        for request_id in self._sweep.due(self._table.request_ids()):
            self._guarded(self._cancel_if_asked, request_id)

    def _cancel_if_asked(self, request_id: str) -> None:
        """Abort a request if its client has canceled it; the final response is sent later."""
        open_request = self._table.get(request_id)
        if open_request is None or open_request.is_lent:
            return
        if open_request.sender.is_cancelled():
            self._cancel(open_request, request_id)

    def _cancel(self, open_request: OpenRequest, request_id: str) -> None:
        self._table.tell(request_id, wire.AbortRequest(request_id))
        self._table.remove(request_id)
        self._cancelled.add(open_request.sender)

    def _fail_cancelled(self, senders: Iterable[Sender]) -> None:
        for sender in senders:
            _fail(sender, Cancelled())

    def abort(self, request_id: str, error: Exception) -> None:
        """End a request with an error, here and in the engine."""
        self._table.tell(request_id, wire.AbortRequest(request_id))
        self.end(request_id, error)

    def end(self, request_id: str, error: Exception) -> None:
        """End a request or an inspection with an error; the engine has ended it."""
        open_request = self._table.get(request_id)
        if open_request is not None and open_request.is_lent:
            open_request.end = open_request.end or error  # when its large response is done
            return
        sender = self._table.remove(request_id)
        if sender is not None:
            _fail(sender, error)

    def fail_all(self, error: Exception) -> None:
        """End all requests with an error; the engine does not hear of it."""
        requests_and_inspections, cancellations = self._table.waiting_ids()
        for request_id in requests_and_inspections:
            self.end(request_id, error)
        for request_id in cancellations:
            answer_cancel(self._table, request_id)
        self._fail_cancelled(self._cancelled.take_all())

    def _guarded(self, act: Callable[[str], None], request_id: str) -> None:
        """Limit an internal error in one request to that request."""
        try:
            act(request_id)
        except Exception as error:
            self.abort(request_id, error)


def _fail(sender: Sender, error: Exception) -> None:
    """Send an error as the final response."""
    with contextlib.suppress(Exception):  # the server may have ended the request already
        sender.fail(error)
