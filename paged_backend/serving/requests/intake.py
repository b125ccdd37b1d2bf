"""Accepts requests: checks them and passes them to the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from paged_backend.process import wire
from paged_backend.process.admission import PLACES_FOR_ONE_LEFT
from paged_backend.process.engines import Engines
from paged_backend.serving.requests.adapter_changes import AdapterChanges
from paged_backend.serving.requests.answer import GenerationAnswer
from paged_backend.serving.requests.brought_adapters import BroughtAdapter, BroughtAdapters
from paged_backend.serving.requests.cancellation import Cancelled
from paged_backend.serving.requests.held_results import result_bytes
from paged_backend.serving.requests.open_requests import (
    IncomingRequest,
    OpenRequest,
    RequestAnswer,
    Sender,
)
from paged_backend.serving.requests.parameters import tenant_of
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.serving.requests.pooling import PoolingAnswer, parse_pooling
from paged_backend.serving.requests.preparation import SMALL, MustWait, Preparation
from paged_backend.serving.requests.request_table import Cancel, RequestTable
from paged_backend.serving.requests.tasks import TaskKind
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.errors import DeadlineExceeded, RequestRefused, as_exception

MAX_WAITING_TASKS = 256  # requests in preparation; above, those that need no engine are refused


class Intake:
    """Accepts requests on Triton's thread, and prepares large ones on other threads.

    Args:
        link: the engines.
        parser: checks requests.
        tokenizer: tokenizer of the model.
        table: where requests wait for their responses.
        changes: loads and unloads adapters.
        brought: loads the adapters that requests bring.
        max_waiting_tokens: limit of the text that waits to be tokenized.
        stream_interval: number of tokens in a response of a stream.
    """

    def __init__(
        self,
        link: Engines,
        parser: RequestParser,
        tokenizer: Tokenizer,
        table: RequestTable,
        changes: AdapterChanges,
        brought: BroughtAdapters,
        max_waiting_tokens: int,
        stream_interval: int,
    ) -> None:
        self._link = link
        self._parser = parser
        self._tokenizer = tokenizer
        self._table = table
        self._changes = changes
        self._brought = brought
        self._stream_interval = stream_interval
        self._preparation = Preparation(max_waiting_tokens)

    def close(self) -> None:
        """Prepare the requests that wait for it, and end the threads."""
        self._preparation.close()

    def submit(self, incoming: IncomingRequest) -> None:
        """Check a request and pass it to the engine.

        This never raises: an error becomes the request's final response.
        """
        with self._answering(incoming.sender):
            self._submit(incoming)

    def _submit(self, incoming: IncomingRequest) -> None:
        task = self._parser.read(incoming.tensors, incoming.parameters_json)
        if task.kind is not TaskKind.CANCEL:
            self._table.check_open()  # for tasks, too: a health probe must see that it is closed
        incoming.load = replace(incoming.load, is_slow=self._parser.prompts.is_slow)
        if not incoming.load.is_small:
            incoming.tenant = tenant_of(incoming.tensors, incoming.parameters_json)
        incoming.task = task
        match task.kind:
            case TaskKind.CANCEL:
                self._cancel(Cancel(task.call_id, incoming.sender))
            case TaskKind.INSPECT:
                self._table.inspect(incoming.sender)
            case TaskKind.GENERATE if incoming.adapter is not None:
                self._check_room(incoming)
                self._bring(incoming, incoming.adapter)
            case TaskKind.GENERATE:
                self._check_room(incoming)
                self._prepare(incoming, self._start)
            case TaskKind.EMBED | TaskKind.SCORE:
                self._check_room(incoming)
                self._prepare(incoming, self._start_pooling)
            case TaskKind.LOAD_ADAPTER:
                self._changes.load(task.parameters.sampling, incoming.sender)
            case TaskKind.UNLOAD_ADAPTER:
                self._changes.unload(task.parameters.sampling, incoming.sender)
            case TaskKind.TOKENIZE | TaskKind.DETOKENIZE | TaskKind.INFO:
                self._check_tasks(incoming.tenant)
                self._prepare(incoming, self._answer_task)

    def _check_room(self, incoming: IncomingRequest) -> None:
        """Refuse a request for the engine if the queue is full, or full of its tenant's requests.

        Raises:
            RequestRefused: the error says when to retry.
        """
        num_own = 0  # a small request is in the queue at once, where its tenant's share is checked
        if not incoming.load.is_small:
            num_own = self._preparation.num_waiting_of(incoming.tenant)
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

    def _bring(self, incoming: IncomingRequest, adapter: BroughtAdapter) -> None:
        """Load the adapter of a request on another thread, and prepare the request then."""

        def go_on() -> None:
            self._brought.leave(adapter)
            incoming.adapter = None  # its weights are in files
            with self._answering(incoming.sender):
                self._prepare(incoming, self._start)

        def fail(error: Exception) -> None:
            self._end_preparing(incoming)
            with self._answering(incoming.sender):
                raise error

        self._brought.admit(adapter)
        # Writing weights takes time: with the size of a large request, another thread does it.
        size = max(incoming.load.size, SMALL + 1)
        incoming.load = replace(incoming.load, size=size)
        self._prepare(incoming, lambda _: self._brought.load(adapter, go_on, fail), is_last=False)

    def _prepare(
        self,
        incoming: IncomingRequest,
        act: Callable[[IncomingRequest], None],
        *,
        is_last: bool = True,
    ) -> None:
        """Prepare a request: at once if it is small, and otherwise on another thread.

        Args:
            incoming: the request.
            act: prepares it.
            is_last: whether nothing is left to prepare after that, unless it fails.
        """

        def work() -> None:
            goes_on = False
            with self._answering(incoming.sender):
                self._check_waited(incoming)
                act(incoming)
                goes_on = not is_last
            if not goes_on:
                self._end_preparing(incoming)

        self._table.begin_preparing(incoming)
        try:
            self._preparation.run(incoming.load, work, incoming.tenant)
        except MustWait:
            incoming.load = replace(incoming.load, needs_grammar=True)
            incoming.tenant = tenant_of(incoming.tensors, incoming.parameters_json)
            self._prepare(incoming, act, is_last=is_last)
        except RequestRefused:
            self._end_preparing(incoming)
            raise

    def _end_preparing(self, incoming: IncomingRequest) -> None:
        self._table.end_preparing(incoming)
        if incoming.adapter is not None:
            self._brought.leave(incoming.adapter)

    def _check_waited(self, incoming: IncomingRequest) -> None:
        """Refuse a request that was canceled or ran out of time while it waited to be prepared."""
        if incoming.load.is_small:
            return
        self._table.check_open()
        if incoming.sender.is_cancelled():
            raise Cancelled()
        if incoming.timeout_s is not None and incoming.clock.age_s > incoming.timeout_s:
            raise DeadlineExceeded(incoming.timeout_s)

    def _answer_task(self, incoming: IncomingRequest) -> None:
        task = incoming.task
        tenant = task.parameters.tenant  # checked for all of these tasks
        if task.kind.is_charged:
            self._link.check_rate(tenant)
            self._link.send_all(wire.ChargeTenant(tenant))
        incoming.sender.send(self._parser.tokenizer_tasks.answer(task), True)

    def _start(self, incoming: IncomingRequest) -> None:
        parsed = self._parser.parse(self._table.new_id(), incoming.task, self._link.check_rate)
        answer = GenerationAnswer(parsed, self._tokenizer, self._stream_interval)
        held = result_bytes(
            parsed.request.params,
            len(parsed.request.prompt_token_ids),
            self._parser.limits.vocab_size,
            stream=parsed.options.stream,
        )
        self._open(incoming, answer, parsed.timeout_s, held)

    def _start_pooling(self, incoming: IncomingRequest) -> None:
        parsed = parse_pooling(
            self._parser, self._table.new_id(), incoming.task, self._link.check_rate
        )
        self._open(incoming, PoolingAnswer(parsed), parsed.timeout_s)

    def _open(
        self,
        incoming: IncomingRequest,
        answer: RequestAnswer,
        own_timeout_s: float | None,
        result_bytes: int = 0,
    ) -> None:
        timeout_s = min(filter(None, (incoming.timeout_s, own_timeout_s)), default=None)
        open_request = OpenRequest(
            answer,
            incoming.sender,
            incoming.clock,
            timeout_s,
            result_bytes,
            incoming.is_large,
            self._link.route(answer.request),
        )
        self._table.start(open_request, incoming)

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


def answer_cancel(table: RequestTable, request_id: str, engine: int | None = None) -> None:
    """Answer the request that asked for a cancellation once it is done; ignore unknown ids.

    Args:
        table: the open requests.
        request_id: id of the cancellation.
        engine: the engine that has carried it out; None if no engine has to.
    """
    cancel = table.confirm_cancel(request_id, engine)
    if cancel is not None:
        with contextlib.suppress(Exception):  # the server may have ended the request already
            cancel.sender.send({}, True)
