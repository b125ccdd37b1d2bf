"""The open calls of one instance, and the thread that sends all their responses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import count
from typing import NamedTuple

from paged_backend.config import EngineConfig
from paged_backend.errors import (
    CrashLimit,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    PagedError,
    RequestRefused,
    as_exception,
    place_of,
)
from paged_backend.outputs import EngineView, SequenceOutput
from paged_backend.process import wire
from paged_backend.process.engine_supervisor import (
    EngineDied,
    EngineRestarted,
    EngineSupervisor,
    EngineUnavailable,
    Event,
)
from paged_backend.serving.calls.answer import Answer
from paged_backend.serving.calls.drain import Drain
from paged_backend.serving.calls.open_calls import Arrival, CancelSweep, Deadlines, OpenCall, Sender
from paged_backend.serving.calls.parsing import RequestParser
from paged_backend.serving.calls.preparation import Preparation
from paged_backend.serving.calls.refusal_log import RefusalLog
from paged_backend.serving.calls.tasks import CANCEL, CHARGED, GENERATE, INSPECT
from paged_backend.serving.contract import as_strings
from paged_backend.serving.metrics.observer import Observer
from paged_backend.text.tokenizer import Tokenizer

POLL_S = 0.005  # between looks at cancellations while calls are open
IDLE_POLL_S = 0.5
SETTLE_S = 1.0
# Waiting outputs up to this number are sent step by step, as clients expect. A response takes 145
# microseconds, so this is two milliseconds.
MAX_BEHIND = 16
MAX_HELD_CANCELS = 4096
MAX_WAITING_TASKS = 256  # calls that need no engine; more are refused while so much is prepared
CANCELLED = "Request was cancelled"
UNLOADING = RequestRefused("draining", "the model is being unloaded")


class Cancelled(Exception):
    """The client canceled the call; it is answered with Triton's CANCELLED."""


class Cancel(NamedTuple):
    """A call that cancels the calls of a name."""

    call_id: str
    sender: Sender


class FrontEnd:
    """Accepts calls on Triton's thread and answers them on another one.

    ``submit`` checks a call and passes it to the engine; large calls are prepared on other threads.
    Everything after that, including cancellation, happens on the sending thread, so that each call
    gets exactly one final response. Each call keeps what is needed to resume it, so that calls that
    are open when an engine ends continue with the next engine.
    """

    def __init__(
        self,
        link: EngineSupervisor,
        parser: RequestParser,
        tokenizer: Tokenizer,
        observer: Observer,
        config: EngineConfig,
        drain: Drain,
    ) -> None:
        self._link = link
        self._parser = parser
        self._tokenizer = tokenizer
        self._observer = observer
        self._config = config
        self._drain = drain
        self._open: dict[str, OpenCall] = {}  # request_id -> call, the earliest first
        self._inspecting: dict[str, Sender] = {}  # request_id -> who inspects
        self._cancelling: dict[str, Cancel] = {}  # by request_id, until the engine confirms it
        self._deadlines = Deadlines(self._open)
        self._preparation = Preparation(config.max_waiting_tokens)
        self._preparing: set[Arrival] = set()
        self._has_engine = True
        self._held_cancels: deque[str] = deque(
            maxlen=MAX_HELD_CANCELS
        )  # names, for the next engine
        self._refused: Counter[str] = Counter()  # by reason
        self._refusal_log = RefusalLog()
        self._closed: PagedError | None = None  # why no call is accepted
        self._lock = threading.Lock()  # over all of these
        self._ids = count()
        self._sweep = CancelSweep()
        self._may_begin = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paged-sender", daemon=True)

    def start(self) -> None:
        """Start the sending thread; it begins to work with the first call or after a second.

        Until then the server only finishes loading, during which it can hang or crash if a model
        calls it.
        """
        self._thread.start()

    def stop(self) -> None:
        """Abort open calls with an error, and disconnect from the engine."""
        self._stopping.set()
        self._may_begin.set()
        self._thread.join()
        with self._lock:
            self._closed = self._closed or UNLOADING
        self._preparation.close()
        self._fail_all(UNLOADING)
        self._link.close()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are accepted, possibly for an engine that is starting."""
        return not isinstance(self._closed, EngineDead)

    @property
    def is_ready(self) -> bool:
        """Whether an engine serves requests now."""
        return self._closed is None and self._has_engine

    def submit(self, arrival: Arrival) -> None:
        """Check a call and pass it to the engine.

        This never raises: an error becomes the call's final response.
        """
        self._may_begin.set()
        with self._answering(arrival.sender):
            self._submit(arrival)

    def _submit(self, arrival: Arrival) -> None:
        task = self._parser.task(arrival.tensors)
        self._parser.check_lengths(arrival.tensors, arrival.parameters_json)
        if task == CANCEL:
            call_id = self._parser.call_to_cancel(arrival.tensors)
            self._cancel(Cancel(call_id, arrival.sender))
            return
        self._check_open()  # for tasks, too, so that a health probe sees that the model is closed
        if task == INSPECT:
            self._inspect(arrival.sender)
        elif task == GENERATE:
            arrival.call_id = self._parser.call_id(arrival.tensors)
            arrival.is_request = True
            self._link.check_room(len(self._open), self._num_starting())
            self._prepare(arrival, self._start)
        else:
            if self._preparation.num_waiting >= MAX_WAITING_TASKS:
                raise RequestRefused(
                    "queue_full", f"{MAX_WAITING_TASKS} calls wait to be tokenized; retry after 1 s"
                )
            self._prepare(arrival, partial(self._answer_task, task))

    def _num_starting(self) -> int:
        """The number of requests that are on their way to the engine."""
        with self._lock:
            return sum(arrival.is_request for arrival in self._preparing)

    def _prepare(self, arrival: Arrival, act: Callable[[Arrival], None]) -> None:
        """Prepare a call: at once if it is small, and otherwise on another thread."""

        def work() -> None:
            with self._answering(arrival.sender):
                try:
                    self._check_waited(arrival)
                    act(arrival)
                finally:
                    with self._lock:
                        self._preparing.discard(arrival)

        with self._lock:
            self._preparing.add(arrival)
        try:
            self._preparation.run(arrival.load, work)
        except RequestRefused:
            with self._lock:
                self._preparing.discard(arrival)
            raise

    def _check_waited(self, arrival: Arrival) -> None:
        """Refuse a call that was canceled or ran out of time while it waited to be prepared."""
        if arrival.load.is_small:
            return
        self._check_open()
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
        request_id = self._new_id()
        parsed = self._parser.parse(
            request_id, arrival.tensors, arrival.parameters_json, self._link.check_rate
        )
        timeout_s = min(filter(None, (arrival.timeout_s, parsed.timeout_s)), default=None)
        answer = Answer(parsed, self._tokenizer)
        call = OpenCall(answer, arrival.sender, arrival.clock, timeout_s)
        with self._lock:
            self._check_open()
            self._open[request_id] = call
            # Under the lock, so that a cancellation cannot reach the engine before the request.
            if self._has_engine:
                call.is_in_flight = True
                try:
                    self._link.send(wire.AddRequest(parsed.request))
                except Exception:
                    del self._open[request_id]  # the exception below is its final response
                    raise
            self._deadlines.add(request_id)
            if arrival.is_cancelled:
                self._send_cancel(parsed.request.call_id)

    @contextlib.contextmanager
    def _answering(self, sender: Sender) -> Iterator[None]:
        """Send an exception as the final response."""
        try:
            yield
        except BaseException as caught:
            error = as_exception(caught)
            if isinstance(error, RequestRefused):
                with self._lock:
                    self._refused[error.reason] += 1
            with contextlib.suppress(Exception):  # the server may have ended the call already
                sender.fail(error)

    def _cancel(self, cancel: Cancel) -> None:
        """Cancel the calls of a name; the client is answered when they have ended."""
        with self._lock:
            for arrival in self._preparing:
                if arrival.call_id == cancel.call_id:
                    arrival.is_cancelled = True
            request_id = self._send_cancel(cancel.call_id)
            self._cancelling[request_id] = cancel
            is_confirmed_later = self._has_engine
        if not is_confirmed_later:
            self._confirm_cancel(request_id)

    def _send_cancel(self, call_id: str) -> str:
        """Ask the engine, or the next one, to cancel calls; returns the id of its confirmation."""
        request_id = self._new_id()
        if not self._has_engine:
            self._held_cancels.append(call_id)
        self._link.send(wire.CancelCall(request_id, call_id))
        return request_id

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed.with_traceback(None)  # else each raise would add to it

    def _inspect(self, sender: Sender) -> None:
        request_id = self._new_id()
        with self._lock:
            self._check_open()
            if not self._has_engine:
                raise EngineDead("the engine is being started again")
            self._inspecting[request_id] = sender
        self._link.send(wire.Inspect(request_id))

    def _new_id(self) -> str:
        return f"{self._link.identity}-{next(self._ids)}"

    # --- the sending thread ---------------------------------------------------------------

    def _run(self) -> None:
        self._may_begin.wait(SETTLE_S)
        try:
            while not self._stopping.is_set():
                self._deliver(self._link.receive(POLL_S if self._open else IDLE_POLL_S))
                self._observer.report_refused(self._refused)
                self._refusal_log.write(self._refused, time.monotonic())
                self._observer.publish(idle=not self._open)
                for request_id in self._sweep.due(list(self._open)):
                    self._guarded(self._cancel_if_asked, request_id)
                self._end_overdue()
                self._drain_if_asked()
        except Exception as error:  # an internal error: no client may be left waiting
            self._die(EngineDead(f"the front-end failed: {place_of(error)}"))

    def _guarded(self, act: Callable[[str], None], request_id: str) -> None:
        """Limit an internal error in one call to that call."""
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
                    with self._lock:
                        self._refused[reason] += 1
                    self._end(request_id, RequestRefused(reason, problem))
                case wire.CallCancelled(request_id):
                    self._confirm_cancel(request_id)
                case wire.Inspection(request_id, view):
                    self._show(request_id, view)
                case wire.Stats(stats, anew):
                    self._observer.report(stats, anew=anew)
                case EngineDied(error):
                    self._lose_engine(error)
                case EngineRestarted(started_here):
                    self._resume(restarted=started_here)
                case EngineUnavailable(error):
                    self._die(error)
                case _:
                    raise RuntimeError(f"unexpected message from the engine: {event!r}")
        for outputs in _portions(steps):
            self._respond_all(outputs)

    def _respond_all(self, outputs: Iterable[SequenceOutput]) -> None:
        """Add outputs to their calls, and send one response for each call."""
        arrived: defaultdict[str, list[SequenceOutput]] = defaultdict(list)
        for output in outputs:
            arrived[output.request_id].append(output)
        for request_id, part in arrived.items():
            self._guarded(partial(self._respond, part), request_id)

    def _respond(self, outputs: list[SequenceOutput], request_id: str) -> None:
        call = self._open.get(request_id)
        if call is None:
            return  # cancelled while the engine computed
        self._observer.report_tokens(call.clock, outputs)
        for output in outputs:
            if call.answer.append(output):
                self._link.send(wire.StopCompletion(request_id, output.index))
        if call.answer.is_due:
            final = call.answer.is_finished
            if final:
                self._observer.report_end(call.clock, call.answer.request)
            call.sender.send(call.answer.take(), final)
            if final:
                self._close(request_id)

    def _show(self, request_id: str, view: EngineView) -> None:
        sender = self._close(request_id)
        if sender is not None:
            sender.send({"text_output": as_strings([_view_json(view)])}, True)

    def _confirm_cancel(self, request_id: str) -> None:
        with self._lock:
            cancel = self._cancelling.pop(request_id, None)
        if cancel is not None:
            with contextlib.suppress(Exception):  # the server may have ended the call already
                cancel.sender.send({}, True)

    def _cancel_if_asked(self, request_id: str) -> None:
        with self._lock:
            call = self._open.get(request_id)
        if call is not None and call.sender.is_cancelled():
            self._abort(request_id, Cancelled(CANCELLED))

    def _end_overdue(self) -> None:
        with self._lock:
            overdue = {id_: self._open[id_].timeout_s for id_ in self._deadlines.due()}
        for request_id, timeout_s in overdue.items():
            self._abort(request_id, DeadlineExceeded(timeout_s or 0.0))

    def _drain_if_asked(self) -> None:
        is_over = self._drain.is_over(len(self._open))
        if self._drain.has_begun and self._closed is None:
            self._closed = self._drain.refusal()
        if is_over:
            for request_id in list(self._open):
                self._abort(request_id, self._drain.refusal())

    def _abort(self, request_id: str, error: Exception) -> None:
        self._link.send(wire.AbortRequest(request_id))
        self._end(request_id, error)

    def _end(self, request_id: str, error: Exception) -> None:
        sender = self._close(request_id)
        if sender is not None:
            with contextlib.suppress(Exception):  # the server may have ended the call already
                sender.fail(error)

    def _close(self, request_id: str) -> Sender | None:
        with self._lock:
            call = self._open.pop(request_id, None)
            return self._inspecting.pop(request_id, None) if call is None else call.sender

    # --- without an engine ------------------------------------------------------------------

    def _lose_engine(self, error: EngineDead) -> None:
        """Keep calls for the next engine, except those that may have killed the last ones."""
        limit = self._config.max_crashes_per_request
        with self._lock:
            self._has_engine = False
            calls = [item for item in self._open.items() if item[1].is_in_flight]
        self._observer.report_lost()
        for request_id in list(self._inspecting):
            self._end(request_id, error)
        for request_id, cancel in list(self._cancelling.items()):
            self._held_cancels.append(cancel.call_id)
            self._confirm_cancel(request_id)
        for request_id, call in calls:
            call.is_in_flight = False
            call.num_crashes += 1
            if call.num_crashes >= limit:
                self._end(request_id, CrashLimit(call.num_crashes))

    def _resume(self, *, restarted: bool) -> None:
        """Send open calls to a new engine, with the tokens that previous engines generated."""
        with self._lock:
            for call in self._open.values():
                call.is_in_flight = True
                self._link.send(wire.AddRequest(call.answer.request, call.answer.progress))
            self._has_engine = True
            for call_id in self._held_cancels:
                self._send_cancel(call_id)
            self._held_cancels.clear()
            if isinstance(self._closed, EngineDead):
                self._closed = None
        self._observer.report_back(restarted=restarted)

    def _die(self, error: EngineDead) -> None:
        with self._lock:
            self._has_engine = False
            if self._closed is None:
                self._closed = error
        self._fail_all(error)
        self._observer.report_lost()

    def _fail_all(self, error: Exception) -> None:
        for request_id in [*self._open, *self._inspecting]:
            self._end(request_id, error)
        for request_id in list(self._cancelling):
            self._confirm_cancel(request_id)


def _view_json(view: EngineView) -> str:
    """Return a view as JSON, with digests in place of request ids."""
    values = asdict(view)
    for entry in values["sequences"]:
        digest = hashlib.blake2b(entry["request_id"].encode(), digest_size=5)
        entry["request_id"] = digest.hexdigest()
    return json.dumps(values)


def _portions(steps: list[list[SequenceOutput]]) -> list[list[SequenceOutput]]:
    """Split steps into responses: one for each step, or a single one if too much waits."""
    if sum(map(len, steps)) <= MAX_BEHIND:
        return steps
    return [[output for outputs in steps for output in outputs]]
