"""The requests that have no final response yet, and which of them were sent to the engine."""

from __future__ import annotations

import threading
from collections import Counter, deque
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from paged_backend.process import wire
from paged_backend.process.engines import Engines
from paged_backend.serving.requests.held_results import HeldResults
from paged_backend.serving.requests.open_requests import (
    Deadlines,
    IncomingRequest,
    OpenRequest,
    Sender,
)
from paged_backend.values.errors import EngineDead, PagedError, RequestRefused
from paged_backend.values.lora import LoRARequest

MAX_HELD_CANCELS = 4096


class Cancel(NamedTuple):
    """A client's request to cancel all requests with the name ``call_id``."""

    call_id: str
    sender: Sender


@dataclass(slots=True)
class _OpenCancel:
    """A cancellation that engines carry out."""

    cancel: Cancel
    engines: set[int]  # those that have not confirmed it


class _Inspection(NamedTuple):
    """A client's request for a view of an engine."""

    sender: Sender
    engine: int


class RequestTable:
    """The requests of one front end; any thread may use it.

    Requests and cancellations are sent to the engines under the table's lock, so that an engine
    gets them in the order in which the table changed: no cancellation overtakes its request.
    """

    def __init__(self, link: Engines, max_open_result_bytes: int) -> None:
        self._link = link
        self._results = HeldResults(max_open_result_bytes)
        self._open: dict[str, OpenRequest] = {}  # by request_id, the earliest first
        self._inspecting: dict[str, _Inspection] = {}  # by request_id
        self._cancelling: dict[str, _OpenCancel] = {}  # by request_id, until engines confirm it
        self._preparing: set[IncomingRequest] = set()
        self._deadlines = Deadlines(self._open)
        self._refused: Counter[str] = Counter()
        self._engines = set(range(link.size))  # those that take requests, by their events
        self._must_resume = False  # a request may be known to no engine
        self._held_cancels: deque[str] = deque(maxlen=MAX_HELD_CANCELS)  # `resume` sends them
        self._closed: PagedError | None = None
        self._lock = threading.Lock()
        self._ids = count()

    # --- whether requests are accepted ----------------------------------------------------

    @property
    def closed(self) -> PagedError | None:
        """The reason why no requests are accepted; None while requests are accepted."""
        return self._closed

    @property
    def has_engine(self) -> bool:
        """Whether an engine takes requests now; without one they wait."""
        return bool(self._engines)

    def check_open(self) -> None:
        """Raise the reason why no request is accepted, if there is one."""
        if self._closed is not None:
            raise self._closed.with_traceback(None)  # else each raise would add to it

    def close(self, reason: PagedError) -> None:
        """Accept no more requests; the first reason stays."""
        with self._lock:
            self._closed = self._closed or reason

    @property
    def refused(self) -> Counter[str]:
        """The number of refused requests so far, by reason."""
        return self._refused

    def count_refusal(self, error: RequestRefused) -> None:
        """Count a refused request."""
        with self._lock:
            self._refused[error.reason] += 1

    # --- requests on their way to the engine ----------------------------------------------

    @property
    def num_starting(self) -> int:
        """The number of requests in preparation that will be sent to the engine."""
        with self._lock:
            return sum(incoming.task.kind.is_computed for incoming in self._preparing)

    def begin_preparing(self, incoming: IncomingRequest) -> None:
        """Remember a request while it is prepared, so that it can be canceled by its name."""
        with self._lock:
            self._preparing.add(incoming)

    def end_preparing(self, incoming: IncomingRequest) -> None:
        """Forget a request that was prepared; unknown ones are ignored."""
        with self._lock:
            self._preparing.discard(incoming)

    def new_id(self) -> str:
        """Return an id that no other request of any front end has."""
        return f"{self._link.identity}-{next(self._ids)}"

    def start(self, open_request: OpenRequest, incoming: IncomingRequest) -> None:
        """Add a request, and send it to an engine if there is one.

        Without an engine, the request waits for the next one. If sending raises an error, the
        request is not added.

        Raises:
            PagedError: no requests are accepted, or there is no room for the results.
        """
        request = open_request.answer.request
        with self._lock:
            self.check_open()
            self._results.add(open_request.result_bytes, request.tenant)
            self._open[request.request_id] = open_request
            if self._engines:
                try:
                    message = wire.AddRequest(request)
                    open_request.engine = self._link.add(message, open_request.route)
                    self._must_resume |= open_request.engine is None
                except Exception:
                    del self._open[request.request_id]
                    self._results.remove(open_request.result_bytes, request.tenant)
                    raise
            self._deadlines.add(request.request_id)
            if incoming.is_cancelled:
                self._send_cancel(request.call_id)

    def inspect(self, sender: Sender) -> None:
        """Ask the engine for a view of its sequences; with several engines, the first one.

        Raises:
            PagedError: no request is accepted, or there is no engine.
        """
        request_id = self.new_id()
        with self._lock:
            self.check_open()
            if not self._engines:
                raise EngineDead("the engine is being started again")
            engine = min(self._engines)
            self._inspecting[request_id] = _Inspection(sender, engine)
        self._link.send(wire.Inspect(request_id), engine)

    # --- cancellation ---------------------------------------------------------------------

    def cancel(self, cancel: Cancel) -> str | None:
        """Cancel all requests with the name ``cancel.call_id``.

        Returns:
            None if the engines will confirm the cancellation. Without an engine: the id that the
            caller must pass to ``confirm_cancel``.
        """
        with self._lock:
            for incoming in self._preparing:
                if incoming.task.call_id == cancel.call_id:
                    incoming.is_cancelled = True
            request_id = self._send_cancel(cancel.call_id)
            self._cancelling[request_id] = _OpenCancel(cancel, set(self._engines))
            return None if self._engines else request_id

    def confirm_cancel(self, request_id: str, engine: int | None = None) -> Cancel | None:
        """Note that an engine has carried out a cancellation, or that none has to (None).

        Returns:
            The cancellation, which is removed, once all engines have carried it out; None before
            that, and for an unknown id.
        """
        with self._lock:
            cancelling = self._cancelling.get(request_id)
            if cancelling is None:
                return None
            if engine is not None:
                cancelling.engines.discard(engine)
                if cancelling.engines:
                    return None
            return self._cancelling.pop(request_id).cancel

    def _send_cancel(self, call_id: str) -> str:
        """Ask the engines to cancel; returns the id of their confirmations.

        Requests that no engine knows are canceled when they are resumed.
        """
        request_id = self.new_id()
        if self._must_resume:
            self._held_cancels.append(call_id)
        self._link.send_all(wire.CancelRequests(request_id, call_id))
        return request_id

    # --- open requests --------------------------------------------------------------------

    def __len__(self) -> int:
        """The number of open requests."""
        return len(self._open)

    def get(self, request_id: str) -> OpenRequest | None:
        """Return an open request; None if it has ended."""
        return self._open.get(request_id)

    def request_ids(self) -> list[str]:
        """The ids of all open requests, the earliest first."""
        with self._lock:
            return list(self._open)

    def uses_adapter(self, lora: LoRARequest) -> bool:
        """Return whether an open request has an adapter."""
        with self._lock:
            return any(found.answer.request.lora == lora for found in self._open.values())

    def overdue(self) -> dict[str, float]:
        """Return the timeouts of open requests that have passed their deadline, by request id.

        Each request is returned once.
        """
        with self._lock:
            return {id_: self._open[id_].timeout_s or 0.0 for id_ in self._deadlines.due()}

    def remove(self, request_id: str) -> Sender | None:
        """Remove a request or an inspection; returns who waits for it, None if nobody does."""
        with self._lock:
            open_request = self._open.pop(request_id, None)
            if open_request is None:
                inspection = self._inspecting.pop(request_id, None)
                return None if inspection is None else inspection.sender
            tenant = open_request.answer.request.tenant
            self._results.remove(open_request.result_bytes, tenant)
            if open_request.engine is not None:
                self._link.release(open_request.engine)
            return open_request.sender

    def tell(self, request_id: str, message: wire.ToEngine) -> None:
        """Send a message about an open request to the engine that knows it, if there is one."""
        with self._lock:  # so that it does not overtake the request
            open_request = self._open.get(request_id)
            if open_request is not None and open_request.engine is not None:
                self._link.send(message, open_request.engine)

    def return_lent(self) -> None:
        """Take back the requests with large responses that will not be sent anymore."""
        with self._lock:
            for open_request in self._open.values():
                open_request.is_lent = False

    # --- the end of an engine ----------------------------------------------------------------

    def lose_engine(self, engine: int) -> LostRequests:
        """Record that an engine has ended, and return what it has not finished.

        Its open requests stay in the table until ``resume`` sends them to another engine.
        """
        with self._lock:
            self._engines.discard(engine)
            self._must_resume = True
            in_flight = {
                id_: lost
                for id_, lost in self._open.items()
                if lost.engine == engine and not lost.answer.is_finished
            }
            for open_request in in_flight.values():
                open_request.engine = None
                open_request.num_crashes += 1
                self._link.release(engine)
            self._held_cancels.extend(held.cancel.call_id for held in self._cancelling.values())
            inspections = [i for i, asked in self._inspecting.items() if asked.engine == engine]
            return LostRequests(in_flight, inspections, list(self._cancelling))

    def add_engine(self, engine: int) -> None:
        """Record that a new engine is ready; ``resume`` sends it requests."""
        with self._lock:
            self._engines.add(engine)
            self._must_resume = True

    def resume(self) -> None:
        """Send the requests that no engine knows to one, with the tokens that they have so far.

        All outputs that have arrived for them must have been added to their answers.
        """
        if not self._must_resume or not self._engines:
            return
        with self._lock:
            for open_request in self._open.values():
                answer = open_request.answer
                if answer.is_finished or open_request.engine is not None:
                    continue  # its last response is being sent, or an engine computes it
                message = wire.AddRequest(answer.request, answer.progress)
                open_request.engine = self._link.add(message, open_request.route)
            self._must_resume = False
            for call_id in self._held_cancels:
                self._send_cancel(call_id)
            self._held_cancels.clear()
            if isinstance(self._closed, EngineDead):
                self._closed = None

    def give_up(self, error: EngineDead) -> None:
        """Accept no requests until an engine is ready again; open requests stay in the table."""
        with self._lock:
            self._engines.clear()
            self._closed = self._closed or error

    def waiting_ids(self) -> tuple[list[str], list[str]]:
        """The ids of all requests, inspections and cancellations."""
        with self._lock:
            return [*self._open, *self._inspecting], list(self._cancelling)


class LostRequests(NamedTuple):
    """Everything that an engine had not finished when it ended."""

    requests: dict[str, OpenRequest]
    inspections: list[str]  # request_ids
    cancellations: list[str]  # request_ids
