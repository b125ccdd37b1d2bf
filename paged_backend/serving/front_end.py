"""The open calls of one instance and the single thread that sends all their responses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from itertools import count

from paged_backend.config import EngineConfig
from paged_backend.errors import (
    CrashLimit,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    PagedError,
    RequestRefused,
    place_of,
)
from paged_backend.outputs import EngineView, SequenceOutput
from paged_backend.process import wire
from paged_backend.process.engine_link import EngineBack, EngineGone, EngineLink, EngineLost, Event
from paged_backend.serving.answer import Answer
from paged_backend.serving.contract import as_strings
from paged_backend.serving.drain import Drain
from paged_backend.serving.fields import Tensors
from paged_backend.serving.observer import CallClock, Observer
from paged_backend.serving.open_calls import CancelSweep, Deadlines, OpenCall, Sender
from paged_backend.serving.parsing import RequestParser
from paged_backend.text.tokenizer import Tokenizer

POLL_S = 0.005  # between looks at cancellations while calls are open
IDLE_POLL_S = 0.5
SETTLE_S = 1.0
# Outputs that have waited and are still sent step by step, as clients expect; a response takes 145
# microseconds, so these are two milliseconds.
MAX_BEHIND = 16
MAX_HELD_CANCELS = 4096
CANCELLED = "Request was cancelled"
UNLOADING = RequestRefused("draining", "the model is being unloaded")


class Cancelled(Exception):
    """The caller cancelled; sent back as Triton's CANCELLED."""


class FrontEnd:
    """Takes calls from Triton's thread and answers them from one of its own.

    ``submit`` checks and hands over; everything after that, cancelling included, happens on the
    sending thread, so that each call gets exactly one final response. What an engine's end leaves
    open goes on with the next one: each call keeps all that it takes to resume it.
    """

    def __init__(
        self,
        link: EngineLink,
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
        self._inspecting: dict[str, Sender] = {}  # request_id -> who wants to look at the engine
        self._deadlines = Deadlines(self._open)
        self._has_engine = True
        self._held_cancels: deque[str] = deque(maxlen=MAX_HELD_CANCELS)  # for the next engine
        self._refused: Counter[str] = Counter()  # by reason
        self._closed: PagedError | None = None  # why no call is taken
        self._lock = threading.Lock()  # over all of these
        self._ids = count()
        self._sweep = CancelSweep()
        self._may_begin = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paged-sender", daemon=True)

    def start(self) -> None:
        """Begin to answer, with the first call or a second from now.

        Until then the server is given nothing to do but to finish loading, at which it has been
        seen to hang and to crash.
        """
        self._thread.start()

    def stop(self) -> None:
        """Abort what is open, tell its callers, and leave the engine."""
        self._stopping.set()
        self._may_begin.set()
        self._thread.join()
        self._fail_all(UNLOADING)
        self._link.close()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served, if need be by an engine that is just being started."""
        return not isinstance(self._closed, EngineDead)

    @property
    def is_ready(self) -> bool:
        """Whether requests are served now."""
        return self._closed is None and self._has_engine

    def submit(
        self, tensors: Tensors, parameters_json: str, timeout_s: float | None, sender: Sender
    ) -> None:
        """Check a call and pass it to the engine.

        ``timeout_s`` is the server's for it, beside which the call may have one of its own.

        Raises:
            InvalidRequest: the caller's mistake; nothing was started.
            RequestRefused: too much waits already, or the model is being unloaded.
            EngineDead: there is no engine and none comes back.
        """
        self._may_begin.set()
        try:
            self._submit(tensors, parameters_json, timeout_s, sender)
        except RequestRefused as error:
            with self._lock:
                self._refused[error.reason] += 1
            raise

    def _submit(
        self, tensors: Tensors, parameters_json: str, timeout_s: float | None, sender: Sender
    ) -> None:
        clock = CallClock()
        cancelled = self._parser.call_to_cancel(tensors)
        if cancelled is not None:
            self._cancel(cancelled)
            sender.send({}, True)
            return
        self._check_open()  # for tasks, too: whoever probes with one is to hear of it
        if self._parser.wants_inspection(tensors):
            self._inspect(sender)
            return
        answer = self._parser.answer_task(tensors)
        if answer is not None:
            sender.send(answer, True)
            return
        self._link.check_room(len(self._open))  # before the prompt is tokenised
        request_id = self._parser.call_id(tensors) or self._new_id()
        parsed = self._parser.parse(request_id, tensors, parameters_json)
        timeout_s = min(filter(None, (timeout_s, parsed.timeout_s)), default=None)
        call = OpenCall(Answer(parsed, self._tokenizer), sender, clock, timeout_s)
        with self._lock:
            self._check_open()
            if request_id in self._open:
                raise InvalidRequest("call_id", "is in use by another call")
            self._open[request_id] = call
            # Under the lock, so that a cancel at once cannot reach the engine before the request.
            if self._has_engine:
                call.is_in_flight = True
                try:
                    self._link.send(wire.AddRequest(parsed.request))
                except Exception:
                    del self._open[request_id]  # its caller hears of it now and only now
                    raise
            self._deadlines.add(request_id)

    def _cancel(self, request_id: str) -> None:
        with self._lock:
            if not self._has_engine:
                self._held_cancels.append(request_id)
        self._link.send(wire.CancelRequest(request_id))

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
                self._observer.publish(idle=not self._open)
                for request_id in self._sweep.due(list(self._open)):
                    self._guarded(self._cancel_if_asked, request_id)
                self._end_overdue()
                self._drain_if_asked()
        except Exception as error:  # a fault of ours: no caller may be left waiting
            self._die(EngineDead(f"the front-end failed: {place_of(error)}"))

    def _guarded(self, act: Callable[[str], None], request_id: str) -> None:
        """Let a fault in one call end that call and no other."""
        try:
            act(request_id)
        except Exception as error:
            self._abort(request_id, error)

    def _deliver(self, events: Iterable[Event]) -> None:
        """Act on all that has arrived; what was produced is sent at the end."""
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
                case wire.Inspection(request_id, view):
                    self._show(request_id, view)
                case wire.Stats(stats, anew):
                    self._observer.report(stats, anew=anew)
                case EngineLost(error):
                    self._lose_engine(error)
                case EngineBack(started_here):
                    self._resume(restarted=started_here)
                case EngineGone(error):
                    self._die(error)
                case _:
                    raise RuntimeError(f"unexpected message from the engine: {event!r}")
        for outputs in _portions(steps):
            self._respond_all(outputs)

    def _respond_all(self, outputs: Iterable[SequenceOutput]) -> None:
        """Add outputs to their calls, and send each of these one response."""
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
                self._link.send(wire.StopAnswer(request_id, output.index))
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
        """Keep the calls for the next engine, but for those that the last ones may have died of."""
        limit = self._config.max_crashes_per_request
        with self._lock:
            self._has_engine = False
            calls = [item for item in self._open.items() if item[1].is_in_flight]
        self._observer.report_lost()
        for request_id in list(self._inspecting):
            self._end(request_id, error)
        for request_id, call in calls:
            call.is_in_flight = False
            call.num_crashes += 1
            if call.num_crashes >= limit:
                self._end(request_id, CrashLimit(call.num_crashes))

    def _resume(self, *, restarted: bool) -> None:
        """Send what is open to a new engine, with all that was generated by those before."""
        with self._lock:
            for call in self._open.values():
                call.is_in_flight = True
                self._link.send(wire.AddRequest(call.answer.request, call.answer.progress))
            self._has_engine = True
            for request_id in self._held_cancels:
                self._link.send(wire.CancelRequest(request_id))
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


def _view_json(view: EngineView) -> str:
    """A view for outsiders: who knows the id of a request can cancel it, so they get a digest."""
    values = asdict(view)
    for entry in values["sequences"]:
        digest = hashlib.blake2b(entry["request_id"].encode(), digest_size=5)
        entry["request_id"] = digest.hexdigest()
    return json.dumps(values)


def _portions(steps: list[list[SequenceOutput]]) -> list[list[SequenceOutput]]:
    """What to send in one go: each step by itself, unless that could not catch up soon."""
    if sum(map(len, steps)) <= MAX_BEHIND:
        return steps
    return [[output for outputs in steps for output in outputs]]
