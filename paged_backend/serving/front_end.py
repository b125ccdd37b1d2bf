"""The open calls of one instance and the single thread that sends all their responses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from typing import Protocol

from paged_backend.errors import EngineDead, InvalidRequest, RequestRefused
from paged_backend.outputs import EngineView, SequenceOutput
from paged_backend.process import wire
from paged_backend.process.engine_client import EngineClient
from paged_backend.serving.allowance import Allowance
from paged_backend.serving.answer import Answer
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.serving.observer import CallClock, Observer
from paged_backend.serving.parsing import RequestParser
from paged_backend.text.tokenizer import Tokenizer

POLL_S = 0.005  # between looks at cancellations while calls are open
IDLE_POLL_S = 0.5
# A look costs 76 microseconds of the sending thread, so it is not made for each response.
CANCEL_CHECKS_PER_S = 2000
# Outputs that have waited and are still sent step by step, as clients expect; a response takes 145
# microseconds, so these are two milliseconds.
MAX_BEHIND = 16
CANCELLED = "Request was cancelled"


class Sender(Protocol):
    """The way back to one caller; calls belong to the sending thread, or come before it."""

    def send(self, tensors: dict[str, Array], final: bool) -> None:
        """Send one response."""

    def fail(self, error: Exception) -> None:
        """Send an error as the final response."""

    def is_cancelled(self) -> bool:
        """Whether the caller has gone or has cancelled."""


class Cancelled(Exception):
    """The caller cancelled; sent back as Triton's CANCELLED."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that has not had its final response."""

    answer: Answer
    sender: Sender
    clock: CallClock


class FrontEnd:
    """Takes calls from Triton's thread and answers them from one of its own.

    ``submit`` checks and hands over; everything after that, cancelling included, happens on the
    sending thread, so that each call gets exactly one final response.
    """

    def __init__(
        self, client: EngineClient, parser: RequestParser, tokenizer: Tokenizer, observer: Observer
    ) -> None:
        self._client = client
        self._parser = parser
        self._tokenizer = tokenizer
        self._observer = observer
        self._open: dict[str, OpenCall] = {}  # request_id -> call
        self._inspecting: dict[str, Sender] = {}  # request_id -> who wants to look at the engine
        self._lock = threading.Lock()  # over _open, _inspecting and _dead
        self._dead: EngineDead | None = None
        self._ids = count()
        self._sweep = CancelSweep()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paged-sender", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Abort what is open, tell its callers, and leave the engine."""
        self._stopping.set()
        self._thread.join()
        self._fail_all(RequestRefused("draining", "the model is being unloaded"))
        self._client.close()

    @property
    def is_healthy(self) -> bool:
        """Whether requests can be served."""
        return self._dead is None

    def submit(self, tensors: Tensors, parameters_json: str, sender: Sender) -> None:
        """Check a call and pass it to the engine.

        Raises:
            InvalidRequest: the caller's mistake; nothing was started.
            EngineDead: the engine has ended.
        """
        clock = CallClock()
        cancelled = self._parser.call_to_cancel(tensors)
        if cancelled is not None:
            self._client.cancel_request(cancelled)
            sender.send({}, True)
            return
        if self._dead is not None:  # for tasks, too: whoever probes with one is to hear of it
            raise self._dead
        if self._parser.wants_inspection(tensors):
            self._inspect(sender)
            return
        answer = self._parser.answer_task(tensors)
        if answer is not None:
            sender.send(answer, True)
            return
        request_id = self._parser.call_id(tensors) or self._new_id()
        parsed = self._parser.parse(request_id, tensors, parameters_json)
        with self._lock:
            if self._dead is not None:
                raise self._dead
            if request_id in self._open:
                raise InvalidRequest("call_id", "is in use by another call")
            self._open[request_id] = OpenCall(Answer(parsed, self._tokenizer), sender, clock)
            # Under the lock, so that a cancel at once cannot reach the engine before the request.
            self._client.add_request(parsed.request)

    def _inspect(self, sender: Sender) -> None:
        request_id = self._new_id()
        with self._lock:
            if self._dead is not None:
                raise self._dead
            self._inspecting[request_id] = sender
        self._client.inspect(request_id)

    def _new_id(self) -> str:
        return f"{self._client.identity}-{next(self._ids)}"

    # --- the sending thread ---------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._deliver(self._client.receive(POLL_S if self._open else IDLE_POLL_S))
                self._observer.publish(idle=not self._open)
                for request_id in self._sweep.due(list(self._open)):
                    self._guarded(self._cancel_if_asked, request_id)
        except EngineDead as error:
            self._die(error)
        except Exception as error:  # a fault of ours: no caller may be left waiting
            self._die(EngineDead(f"the front-end failed: {error!r}"))

    def _guarded(self, act: Callable[[str], None], request_id: str) -> None:
        """Let a fault in one call end that call and no other."""
        try:
            act(request_id)
        except Exception as error:
            self._client.abort_request(request_id)
            self._end(request_id, error)

    def _deliver(self, messages: Iterable[wire.FromEngine]) -> None:
        """Act on all that has arrived; what was produced is sent at the end."""
        steps: list[list[SequenceOutput]] = []
        for message in messages:
            match message:
                case wire.StepOutputs(outputs):
                    steps.append(outputs)
                case wire.RequestRejected(request_id, text):
                    self._end(request_id, InvalidRequest.verbatim("request", text))
                case wire.Inspection(request_id, view):
                    self._show(request_id, view)
                case wire.Stats(stats):
                    self._observer.report(stats)
                case _:
                    raise RuntimeError(f"unexpected message from the engine: {message!r}")
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
                self._client.stop_answer(request_id, output.index)
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
            self._client.abort_request(request_id)
            self._end(request_id, Cancelled(CANCELLED))

    def _end(self, request_id: str, error: Exception) -> None:
        sender = self._close(request_id)
        if sender is not None:
            with contextlib.suppress(Exception):  # the server may have ended the call already
                sender.fail(error)

    def _close(self, request_id: str) -> Sender | None:
        with self._lock:
            call = self._open.pop(request_id, None)
            return self._inspecting.pop(request_id, None) if call is None else call.sender

    def _die(self, error: EngineDead) -> None:
        with self._lock:
            self._dead = error
        self._fail_all(error)
        self._observer.report_dead()

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


class CancelSweep:
    """Chooses whose cancellation to look at: all in turn, at a bounded rate."""

    def __init__(self) -> None:
        self._queue: deque[str] = deque()
        self._allowance = Allowance(CANCEL_CHECKS_PER_S)

    def due(self, open_calls: Collection[str]) -> list[str]:
        """The ids whose turn it is, each at most once."""
        due: list[str] = []
        for _ in range(self._allowance.take(len(open_calls))):
            if not self._queue:
                self._queue.extend(open_calls)
            due.append(self._queue.popleft())
        return due
