"""Accepts requests: checks them and passes them to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from paged_backend.process import wire
from paged_backend.process.admission import PLACES_FOR_ONE_LEFT
from paged_backend.process.engine_supervisor import EngineSupervisor
from paged_backend.serving.requests.answer import Answer
from paged_backend.serving.requests.cancellation import CANCELLED, Cancelled
from paged_backend.serving.requests.held_results import result_bytes
from paged_backend.serving.requests.open_requests import (
    Arrival,
    OpenAnswer,
    OpenRequest,
    Sender,
)
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.serving.requests.pooling import PoolingAnswer, parse_pooling
from paged_backend.serving.requests.preparation import MustWait, Preparation, tenant_of
from paged_backend.serving.requests.request_table import Cancel, RequestTable
from paged_backend.serving.requests.tasks import (
    CancelTask,
    EmbedTask,
    GenerateTask,
    InspectTask,
    ScoreTask,
    TokenizerTask,
)
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.errors import DeadlineExceeded, RequestRefused, as_exception

MAX_WAITING_TASKS = 256  # requests in preparation; above, those that need no engine are refused


class Intake:
    """Accepts requests on Triton's thread, and prepares large ones on other threads.

    Args:
        link: the engine.
        parser: checks requests.
        tokenizer: tokenizer of the model.
        table: where requests wait for their responses.
        max_waiting_tokens: limit of the text that waits to be tokenized.
        stream_interval: number of tokens in a response of a stream.
    """

    def __init__(
        self,
        link: EngineSupervisor,
        parser: RequestParser,
        tokenizer: Tokenizer,
        table: RequestTable,
        max_waiting_tokens: int,
        stream_interval: int,
    ) -> None:
        self._link = link
        self._parser = parser
        self._tokenizer = tokenizer
        self._table = table
        self._stream_interval = stream_interval
        self._preparation = Preparation(max_waiting_tokens)

    def close(self) -> None:
        """Prepare the requests that wait for it, and end the threads."""
        self._preparation.close()

    def submit(self, arrival: Arrival) -> None:
        """Check a request and pass it to the engine.

        This never raises: an error becomes the request's final response.
        """
        with self._answering(arrival.sender):
            self._submit(arrival)

    def _submit(self, arrival: Arrival) -> None:
        task = self._parser.read(arrival.tensors, arrival.parameters_json)
        if not isinstance(task, CancelTask):
            self._table.check_open()  # for tasks, too: a health probe must see that it is closed
        arrival.load = replace(arrival.load, is_slow=self._parser.prompts.is_slow)
        if not arrival.load.is_small:
            arrival.tenant = tenant_of(arrival.tensors, arrival.parameters_json)
        match task:
            case CancelTask():
                self._cancel(Cancel(task.call_id, arrival.sender))
            case InspectTask():
                self._table.inspect(arrival.sender)
            case GenerateTask() | EmbedTask() | ScoreTask():
                arrival.call_id = task.call_id
                arrival.needs_engine = True
                self._check_room(arrival)
                scores = isinstance(task, ScoreTask)
                start = partial(self._start_pooling, scores=scores)
                self._prepare(arrival, self._start if isinstance(task, GenerateTask) else start)
            case TokenizerTask():
                self._check_tasks(arrival.tenant)
                self._prepare(arrival, partial(self._answer_task, task))

    def _check_room(self, arrival: Arrival) -> None:
        """Refuse a request for the engine if the queue is full, or full of its tenant's requests.

        Raises:
            RequestRefused: the error says when to retry.
        """
        num_own = 0  # a small request is in the queue at once, where its tenant's share is checked
        if not arrival.load.is_small:
            num_own = self._preparation.num_waiting_of(arrival.tenant)
        self._link.check_room(len(self._table), self._table.num_starting, num_own)

    def _check_tasks(self, tenant: str) -> None:
        """Refuse a request that needs no engine if too many wait to be prepared.

        As in the queue of the engine, a tenant can fill about 8/9 of the places.

        Raises:
            RequestRefused: there is no place, or none for this tenant.
        """
        num_free = MAX_WAITING_TASKS - self._preparation.num_waiting
        num_own = self._preparation.num_waiting_of(tenant)
        if num_free <= 0 or num_own > PLACES_FOR_ONE_LEFT * num_free:
            problem = f"{MAX_WAITING_TASKS - num_free} requests wait to be tokenized"
            raise RequestRefused("queue_full", f"{problem}; retry after 1 s")

    def _cancel(self, cancel: Cancel) -> None:
        """Cancel the requests of a name.

        The client is answered when they have ended, or at once if there is no engine.
        """
        request_id = self._table.cancel(cancel)
        if request_id is not None:
            answer_cancel(self._table, request_id)

    def _prepare(self, arrival: Arrival, act: Callable[[Arrival], None]) -> None:
        """Prepare a request: at once if it is small, and otherwise on another thread."""

        def work() -> None:
            with self._answering(arrival.sender):
                self._check_waited(arrival)
                act(arrival)
            self._table.end_preparing(arrival)

        self._table.begin_preparing(arrival)
        try:
            self._preparation.run(arrival.load, work, arrival.tenant)
        except MustWait:
            arrival.load = replace(arrival.load, needs_grammar=True)
            arrival.tenant = tenant_of(arrival.tensors, arrival.parameters_json)
            self._prepare(arrival, act)
        except RequestRefused:
            self._table.end_preparing(arrival)
            raise

    def _check_waited(self, arrival: Arrival) -> None:
        """Refuse a request that was canceled or ran out of time while it waited to be prepared."""
        if arrival.load.is_small:
            return
        self._table.check_open()
        if arrival.sender.is_cancelled():
            raise Cancelled(CANCELLED)
        if arrival.timeout_s is not None and arrival.clock.age_s > arrival.timeout_s:
            raise DeadlineExceeded(arrival.timeout_s)

    def _answer_task(self, task: TokenizerTask, arrival: Arrival) -> None:
        tenant = self._parser.tenant_of_task(arrival.parameters_json)
        if task.is_charged:
            self._link.check_rate(tenant)
            self._link.send(wire.ChargeTenant(tenant))
        arrival.sender.send(self._parser.answer_task(task, arrival.tensors), True)

    def _start(self, arrival: Arrival) -> None:
        parsed = self._parser.parse(
            self._table.new_id(), arrival.tensors, arrival.parameters_json, self._link.check_rate
        )
        answer = Answer(parsed, self._tokenizer, self._stream_interval)
        held = result_bytes(
            parsed.request.params,
            len(parsed.request.prompt_token_ids),
            self._parser.limits.vocab_size,
            stream=parsed.options.stream,
        )
        self._open(arrival, answer, parsed.timeout_s, held)

    def _start_pooling(self, arrival: Arrival, *, scores: bool) -> None:
        parsed = parse_pooling(
            self._parser,
            self._table.new_id(),
            arrival.tensors,
            arrival.parameters_json,
            self._link.check_rate,
            scores=scores,
        )
        self._open(arrival, PoolingAnswer(parsed), parsed.timeout_s)

    def _open(
        self,
        arrival: Arrival,
        answer: OpenAnswer,
        own_timeout_s: float | None,
        result_bytes: int = 0,
    ) -> None:
        timeout_s = min(filter(None, (arrival.timeout_s, own_timeout_s)), default=None)
        open_request = OpenRequest(
            answer, arrival.sender, arrival.clock, timeout_s, result_bytes, arrival.is_large
        )
        self._table.start(open_request, arrival)

    @contextlib.contextmanager
    def _answering(self, sender: Sender) -> Iterator[None]:
        """Send an exception as the final response."""
        try:
            yield
        except MustWait:  # the request is prepared on another thread
            raise
        except BaseException as caught:
            error = as_exception(caught)
            if isinstance(error, RequestRefused):
                self._table.count_refusal(error)
            with contextlib.suppress(Exception):  # the server may have ended the request already
                sender.fail(error)


def answer_cancel(table: RequestTable, request_id: str) -> None:
    """Answer the request that asked for a cancellation, which is done; ignore unknown ids."""
    cancel = table.confirm_cancel(request_id)
    if cancel is not None:
        with contextlib.suppress(Exception):  # the server may have ended the request already
            cancel.sender.send({}, True)
