"""One instance of the model: its open requests, and the thread that sends the engine's outputs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

from paged_backend.config import EngineConfig
from paged_backend.errors import (
    CrashLimit,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    RequestRefused,
    place_of,
)
from paged_backend.outputs import EngineView, FinishReason, SequenceOutput
from paged_backend.process import wire
from paged_backend.process.engine_supervisor import (
    EngineDied,
    EngineRestarted,
    EngineSupervisor,
    EngineUnavailable,
    Event,
)
from paged_backend.serving.contract import as_strings
from paged_backend.serving.metrics.stat_logger import StatLogger
from paged_backend.serving.requests.cancellation import CANCELLED, Cancelled
from paged_backend.serving.requests.drain import Drain
from paged_backend.serving.requests.inspection import view_json
from paged_backend.serving.requests.intake import Intake, answer_cancel
from paged_backend.serving.requests.large_responses import (
    DoneResponse,
    LargeResponse,
    LargeResponses,
)
from paged_backend.serving.requests.open_requests import (
    Arrival,
    CancelledSenders,
    CancelSweep,
    OpenRequest,
    Sender,
)
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.serving.requests.refusal_log import RefusalLog
from paged_backend.serving.requests.request_table import RequestTable
from paged_backend.text.tokenizer import Tokenizer

POLL_S = 0.02  # between looks at deadlines and cancellations while requests are open
IDLE_POLL_S = 0.5
SETTLE_S = 1.0
# Waiting outputs up to this number are sent step by step, as clients expect. A response takes 145
# microseconds, so this is two milliseconds.
MAX_BEHIND = 16
UNLOADING = RequestRefused("draining", "the model is being unloaded")


class FrontEnd:
    """Accepts requests on Triton's thread, and sends the engine's outputs on the sending thread.

    ``Intake`` checks a request. It passes the request to the engine, or answers it if it needs the
    tokenizer only. Everything that happens to a request after that, including cancellation, happens
    on the sending thread, so that each request gets exactly one final response.
    The table keeps what is needed to resume a request, so that requests that are open when an
    engine ends continue with the next engine.
    """

    def __init__(
        self,
        link: EngineSupervisor,
        parser: RequestParser,
        tokenizer: Tokenizer,
        stat_logger: StatLogger,
        config: EngineConfig,
        drain: Drain,
    ) -> None:
        self._link = link
        self._stat_logger = stat_logger
        self._max_crashes = config.max_crashes_per_request
        self._drain = drain
        self._table = RequestTable(link, config.max_open_result_bytes)
        self._large = LargeResponses(lambda num_large: len(self._table) > num_large)
        self._intake = Intake(
            link, parser, tokenizer, self._table, config.max_waiting_tokens, config.stream_interval
        )
        self._refusal_log = RefusalLog()
        self._sweep = CancelSweep()
        self._cancelled = CancelledSenders()
        self._may_begin = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paged-sender", daemon=True)

    def start(self) -> None:
        """Start the sending thread.

        The thread begins to work when the first request arrives, or after ``SETTLE_S`` seconds.
        Until then the server may still be loading the model, and can hang or crash if the model
        calls it.
        """
        self._thread.start()

    def stop(self) -> None:
        """Abort open requests with an error, and disconnect from the engine."""
        self._stopping.set()
        self._may_begin.set()
        self._thread.join()
        self._table.close(UNLOADING)
        self._intake.close()
        self._end_large()
        self._fail_all(UNLOADING)
        self._link.close()

    @property
    def is_healthy(self) -> bool:
        """False if no engine has started in time, or if an internal error has ended this object.

        It is True while an engine is starting, and while the server shuts down.
        """
        return not isinstance(self._table.closed, EngineDead)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted, and an engine serves them now."""
        return self._table.closed is None and self._table.has_engine

    def submit(self, arrival: Arrival) -> None:
        """Check a request and pass it to the engine.

        This never raises: an error becomes the request's final response.
        """
        self._may_begin.set()
        self._intake.submit(arrival)

    # --- the sending thread ---------------------------------------------------------------

    def _run(self) -> None:
        self._may_begin.wait(SETTLE_S)
        try:
            while not self._stopping.is_set():
                self._deliver(self._link.receive(POLL_S if self._num_open else IDLE_POLL_S))
                for done in self._large.take_done():
                    self._guarded(partial(self._return_lent, done), done.response.request_id)
                self._stat_logger.report_refused(self._table.refused)
                self._refusal_log.write(self._table.refused, time.monotonic())
                self._stat_logger.publish(idle=not len(self._table))
                self._end_cancelled(self._cancelled.take_due())
                for request_id in self._sweep.due(self._table.request_ids()):
                    self._guarded(self._cancel_if_asked, request_id)
                for request_id, timeout_s in self._table.overdue().items():
                    self._abort(request_id, DeadlineExceeded(timeout_s))
                self._drain_if_asked()
        except Exception as error:  # an internal error: no client may be left waiting
            self._end_large()
            self._die(EngineDead(f"the front-end failed: {place_of(error)}"))

    def _guarded(self, act: Callable[[str], None], request_id: str) -> None:
        """Limit an internal error in one request to that request."""
        try:
            act(request_id)
        except Exception as error:
            self._abort(request_id, error)

    def _deliver(self, events: Iterable[Event]) -> None:
        """Handle all events; outputs are sent last."""
        steps: list[list[SequenceOutput]] = []
        for event in events:
            match event:
                case wire.StepOutputs(outputs):
                    steps.append(outputs)
                case wire.RequestRejected(request_id, text):
                    self._end(request_id, InvalidRequest.verbatim("request", text))
                case wire.RequestRefused(request_id, reason, problem):
                    refusal = RequestRefused(reason, problem)
                    self._table.count_refusal(refusal)
                    self._end(request_id, refusal)
                case wire.RequestsCancelled(request_id):
                    answer_cancel(self._table, request_id)
                case wire.Inspection(request_id, view):
                    self._show(request_id, view)
                case wire.Stats(stats, anew):
                    self._stat_logger.report(stats, anew=anew)
                case EngineDied(error):
                    self._lose_engine(error)
                case EngineRestarted(started_here):
                    self._table.resume()
                    self._stat_logger.report_back(restarted=started_here)
                case EngineUnavailable(error):
                    self._die(error)
                case _:
                    raise RuntimeError(f"unexpected message from the engine: {event!r}")
        for outputs in _portions(steps):
            self._respond_all(outputs)

    def _respond_all(self, outputs: Iterable[SequenceOutput]) -> None:
        """Add outputs to their requests, and send one response for each request."""
        arrived: defaultdict[str, list[SequenceOutput]] = defaultdict(list)
        for output in outputs:
            arrived[output.request_id].append(output)
        for request_id, part in arrived.items():
            self._guarded(partial(self._respond, part), request_id)

    def _respond(self, outputs: list[SequenceOutput], request_id: str) -> None:
        open_request = self._table.get(request_id)
        if open_request is None:
            return  # canceled while the engine computed
        self._stat_logger.report_tokens(open_request.clock, outputs)
        for output in outputs:
            if open_request.answer.append(output):
                self._link.send(wire.StopCompletion(request_id, output.index))
            open_request.was_aborted |= output.finish_reason is FinishReason.ABORT
        self._send_if_due(open_request, request_id)

    def _send_if_due(self, open_request: OpenRequest, request_id: str) -> None:
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
        open_request.sender.send(answer.take(), final)
        if final:
            self._table.remove(request_id)

    def _return_lent(self, done: DoneResponse, request_id: str) -> None:
        """Go on with a request whose large response was sent, or could not be sent."""
        open_request = done.response.open_request
        open_request.is_lent = False
        if done.error is None and done.response.final:
            self._table.remove(request_id)
        elif isinstance(done.error, Cancelled):
            self._cancel(open_request, request_id)
        elif (error := done.error or open_request.end) is not None:
            self._abort(request_id, error)
        else:
            self._send_if_due(open_request, request_id)

    def _end_large(self) -> None:
        """End the thread of large responses, and take back the requests that it has."""
        for done in self._large.close():
            self._guarded(partial(self._return_lent, done), done.response.request_id)
        self._table.return_lent()

    def _show(self, request_id: str, view: EngineView) -> None:
        sender = self._table.remove(request_id)
        if sender is not None:
            sender.send({"text_output": as_strings([view_json(view)])}, True)

    def _cancel_if_asked(self, request_id: str) -> None:
        """Abort a request if its client has canceled it; the final response is sent later."""
        open_request = self._table.get(request_id)
        if open_request is None or open_request.is_lent:
            return
        if open_request.sender.is_cancelled():
            self._cancel(open_request, request_id)

    def _cancel(self, open_request: OpenRequest, request_id: str) -> None:
        self._link.send(wire.AbortRequest(request_id))
        self._table.remove(request_id)
        self._cancelled.add(open_request.sender)

    def _end_cancelled(self, senders: Iterable[Sender]) -> None:
        for sender in senders:
            _fail(sender, Cancelled(CANCELLED))

    @property
    def _num_open(self) -> int:
        """The number of requests without a final response."""
        return len(self._table) + len(self._cancelled)

    def _drain_if_asked(self) -> None:
        is_over = self._drain.is_over(self._num_open)
        if self._drain.has_begun:
            self._table.close(self._drain.refusal())
        if is_over:
            for request_id in self._table.request_ids():
                self._abort(request_id, self._drain.refusal())

    def _abort(self, request_id: str, error: Exception) -> None:
        self._link.send(wire.AbortRequest(request_id))
        self._end(request_id, error)

    def _end(self, request_id: str, error: Exception) -> None:
        open_request = self._table.get(request_id)
        if open_request is not None and open_request.is_lent:
            open_request.end = open_request.end or error  # when its large response is done
            return
        sender = self._table.remove(request_id)
        if sender is not None:
            _fail(sender, error)

    # --- without an engine ------------------------------------------------------------------

    def _lose_engine(self, error: EngineDead) -> None:
        """Keep requests for the next engine, except those that may have killed the last ones."""
        lost = self._table.lose_engine()
        self._stat_logger.report_lost()
        for request_id in lost.inspections:
            self._end(request_id, error)
        for request_id in lost.cancellations:  # the next engine carries them out
            answer_cancel(self._table, request_id)
        for request_id, open_request in lost.requests.items():
            if open_request.num_crashes >= self._max_crashes:
                self._end(request_id, CrashLimit(open_request.num_crashes))

    def _die(self, error: EngineDead) -> None:
        self._table.give_up(error)
        self._fail_all(error)
        self._stat_logger.report_lost()

    def _fail_all(self, error: Exception) -> None:
        requests_and_inspections, cancellations = self._table.waiting_ids()
        for request_id in requests_and_inspections:
            self._end(request_id, error)
        for request_id in cancellations:
            answer_cancel(self._table, request_id)
        self._end_cancelled(self._cancelled.take_all())


def _fail(sender: Sender, error: Exception) -> None:
    """Send an error as the final response."""
    with contextlib.suppress(Exception):  # the server may have ended the request already
        sender.fail(error)


def _portions(steps: list[list[SequenceOutput]]) -> list[list[SequenceOutput]]:
    """Split steps into responses: one for each step, or a single one if too much waits."""
    if sum(map(len, steps)) <= MAX_BEHIND:
        return steps
    return [[output for outputs in steps for output in outputs]]
