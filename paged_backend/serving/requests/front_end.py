"""One instance of the model: its open requests, and the thread that sends the engine's outputs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from paged_backend.process import wire
from paged_backend.process.adapter_names import AdapterNames
from paged_backend.process.engine_supervisor import (
    EngineDied,
    EngineRestarted,
    EngineUnavailable,
    Event,
)
from paged_backend.process.engines import Engines
from paged_backend.serving.metrics.stat_logger import StatLogger
from paged_backend.serving.requests.adapter_changes import AdapterChanges
from paged_backend.serving.requests.brought_adapters import BroughtAdapters
from paged_backend.serving.requests.delivery import Delivery
from paged_backend.serving.requests.drain import Drain
from paged_backend.serving.requests.intake import Intake, answer_cancel
from paged_backend.serving.requests.open_requests import IncomingRequest
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.serving.requests.refusal_log import RefusalLog
from paged_backend.serving.requests.request_table import RequestTable
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import (
    CrashLimit,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    RequestRefused,
    place_of,
)
from paged_backend.values.outputs import SequenceOutput

POLL_S = 0.02  # between looks at deadlines and cancellations while requests are open
IDLE_POLL_S = 0.5
SETTLE_S = 1.0
# While no more outputs wait, each step has a response of its own, as clients expect; with more, the
# outputs of steps are joined. A response takes 110 microseconds, so this is two milliseconds.
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
        link: Engines,
        parser: RequestParser,
        tokenizer: Tokenizer,
        stat_logger: StatLogger,
        config: EngineConfig,
        drain: Drain,
        names: AdapterNames,
    ) -> None:
        self._link = link
        self._stat_logger = stat_logger
        self._max_crashes = config.max_crashes_per_request
        self._drain = drain
        self._table = RequestTable(link, config.max_open_result_bytes)
        self._delivery = Delivery(self._table, stat_logger)
        self._changes = AdapterChanges(
            link,
            names,
            is_on=config.runtime_lora_folder is not None,
            is_used=self._table.uses_adapter,
            max_brought_bytes=config.max_request_lora_bytes,
        )
        brought = BroughtAdapters(names, self._changes, config.max_request_lora_bytes)
        self._intake = Intake(
            *(link, parser, tokenizer, self._table, self._changes, brought),
            config.max_waiting_tokens,
            config.stream_interval,
        )
        self._refusal_log = RefusalLog()
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
        self._delivery.close()
        self._delivery.fail_all(UNLOADING)
        self._changes.fail_all(UNLOADING)
        self._link.close()

    @property
    def sending_thread(self) -> threading.Thread:
        """The thread that sends the engine's outputs; it has ended when ``stop`` returns."""
        return self._thread

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

    def submit(self, incoming: IncomingRequest) -> None:
        """Check a request and pass it to the engine.

        This never raises: an error becomes the request's final response.
        """
        self._may_begin.set()
        self._intake.submit(incoming)

    # --- the sending thread ---------------------------------------------------------------

    def _run(self) -> None:
        self._may_begin.wait(SETTLE_S)
        try:
            while not self._stopping.is_set():
                is_idle = self._delivery.num_open + len(self._changes) == 0
                steps: list[list[SequenceOutput]] = []
                for engine, events in self._link.receive(IDLE_POLL_S if is_idle else POLL_S):
                    steps += self._handle(engine, events)
                for outputs in _portions(steps):
                    self._delivery.respond_all(outputs)
                self._table.resume()
                self._changes.end_done()
                self._delivery.take_large()
                self._stat_logger.report_refused(self._table.refused)
                self._refusal_log.write(self._table.refused, time.monotonic())
                self._stat_logger.publish(idle=not len(self._table))
                self._delivery.end_cancelled()
                for request_id, timeout_s in self._table.overdue().items():
                    self._delivery.abort(request_id, DeadlineExceeded(timeout_s))
                self._drain_if_asked()
        except Exception as error:  # an internal error: no client may be left waiting
            self._delivery.close()
            self._die(EngineDead(f"the front-end failed: {place_of(error)}"))

    def _handle(self, engine: int, events: Iterable[Event]) -> list[list[SequenceOutput]]:
        """Handle the events of an engine; returns the outputs of its steps, which are sent last."""
        steps: list[list[SequenceOutput]] = []
        for event in events:
            match event:
                case wire.StepOutputs(outputs):
                    steps.append(outputs)
                case wire.RequestRejected(request_id, text):
                    self._delivery.end(request_id, InvalidRequest.verbatim("request", text))
                case wire.RequestDeclined(request_id, reason, problem):
                    refusal = RequestRefused(reason, problem)
                    self._table.count_refusal(refusal)
                    self._delivery.end(request_id, refusal)
                case wire.RequestsCancelled(request_id):
                    answer_cancel(self._table, request_id, engine)
                case wire.AdapterChanged():
                    self._changes.confirm(engine, event)
                case wire.Inspection(request_id, view):
                    self._delivery.show(request_id, view)
                case wire.Stats(stats, anew):
                    self._stat_logger.report(engine, stats, anew=anew)
                case EngineDied(error):
                    self._lose_engine(engine, error)
                case EngineRestarted(started_here):
                    self._table.add_engine(engine)
                    self._changes.add_engine(engine)
                    self._stat_logger.report_back(engine, restarted=started_here)
                case EngineUnavailable(error):
                    if not self._table.has_engine:
                        self._die(error)
                case _:
                    raise RuntimeError(f"unexpected message from the engine: {event!r}")
        return steps

    def _drain_if_asked(self) -> None:
        is_over = self._drain.is_over(self._delivery.num_open)
        if self._drain.has_begun:
            self._table.close(self._drain.refusal())
        if is_over:
            for request_id in self._table.request_ids():
                self._delivery.abort(request_id, self._drain.refusal())

    # --- the end of an engine ---------------------------------------------------------------

    def _lose_engine(self, engine: int, error: EngineDead) -> None:
        """Keep requests for another engine, except those that may have killed the last ones."""
        lost = self._table.lose_engine(engine)
        self._changes.lose_engine(engine)
        self._stat_logger.report_lost(engine)
        for request_id in lost.inspections:
            self._delivery.end(request_id, error)
        for request_id in lost.cancellations:  # the next engine carries them out
            answer_cancel(self._table, request_id)
        for request_id, open_request in lost.requests.items():
            if open_request.num_crashes >= self._max_crashes:
                self._delivery.end(request_id, CrashLimit(open_request.num_crashes))

    def _die(self, error: EngineDead) -> None:
        self._table.give_up(error)
        self._delivery.fail_all(error)
        self._changes.fail_all(error)
        for engine in range(self._link.size):
            self._stat_logger.report_lost(engine)


def _portions(steps: list[list[SequenceOutput]]) -> list[list[SequenceOutput]]:
    """Split steps into responses: one for each step, or a single one if too much waits."""
    if sum(map(len, steps)) <= MAX_BEHIND:
        return steps
    return [[output for outputs in steps for output in outputs]]
