"""The requests that have no final response yet, and which of them were sent to the engine."""

from __future__ import annotations

import threading
from collections import Counter, deque
from itertools import count
from typing import NamedTuple

from paged_backend.process import wire
from paged_backend.process.engine_supervisor import EngineSupervisor
from paged_backend.serving.requests.held_results import HeldResults
from paged_backend.serving.requests.open_requests import (
    Deadlines,
    IncomingRequest,
    OpenRequest,
    Sender,
)
from paged_backend.values.errors import EngineDead, PagedError, RequestRefused

MAX_HELD_CANCELS = 4096


class Cancel(NamedTuple):
    """A client's request to cancel all requests with the name ``call_id``."""

    call_id: str
    sender: Sender


class RequestTable:
    """The requests of one front end; any thread may use it.

    Requests and cancellations are sent to the engine under the table's lock, so that the engine
    gets them in the order in which the table changed: no cancellation overtakes its request.
    """

    def __init__(self, link: EngineSupervisor, max_open_result_bytes: int) -> None:
        self._link = link
        self._results = HeldResults(max_open_result_bytes)
        self._open: dict[str, OpenRequest] = {}  # by request_id, the earliest first
        self._inspecting: dict[str, Sender] = {}  # by request_id
        self._cancelling: dict[str, Cancel] = {}  # by request_id, until the engine confirms it
        self._preparing: set[IncomingRequest] = set()
        self._deadlines = Deadlines(self._open)
        self._refused: Counter[str] = Counter()
        self._has_engine = True
        self._held_cancels: deque[str] = deque(maxlen=MAX_HELD_CANCELS)  # for the next engine
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
        return self._has_engine

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
        """Add a request, and send it to the engine if there is one.

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
            if self._has_engine:
                try:
                    open_request.is_in_flight = self._link.send(wire.AddRequest(request))
                except Exception:
                    del self._open[request.request_id]
                    self._results.remove(open_request.result_bytes, request.tenant)
                    raise
            self._deadlines.add(request.request_id)
            if incoming.is_cancelled:
                self._send_cancel(request.call_id)

    def inspect(self, sender: Sender) -> None:
        """Ask the engine for a view of its sequences.

        Raises:
            PagedError: no request is accepted, or there is no engine.
        """
        request_id = self.new_id()
        with self._lock:
            self.check_open()
            if not self._has_engine:
                raise EngineDead("the engine is being started again")
            self._inspecting[request_id] = sender
        self._link.send(wire.Inspect(request_id))

    # --- cancellation ---------------------------------------------------------------------

    def cancel(self, cancel: Cancel) -> str | None:
        """Cancel all requests with the name ``cancel.call_id``.

        Returns:
            None if the engine will confirm the cancellation. Without an engine: the id that the
            caller must pass to ``confirm_cancel``.
        """
        with self._lock:
            for incoming in self._preparing:
                if incoming.task.call_id == cancel.call_id:
                    incoming.is_cancelled = True
            request_id = self._send_cancel(cancel.call_id)
            self._cancelling[request_id] = cancel
            return None if self._has_engine else request_id

    def confirm_cancel(self, request_id: str) -> Cancel | None:
        """Remove a cancellation that has been carried out, and return it; None if unknown."""
        with self._lock:
            return self._cancelling.pop(request_id, None)

    def _send_cancel(self, call_id: str) -> str:
        """Ask the engine, or the next one, to cancel; returns the id of its confirmation."""
        request_id = self.new_id()
        if not self._has_engine:
            self._held_cancels.append(call_id)
        self._link.send(wire.CancelRequests(request_id, call_id))
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
                return self._inspecting.pop(request_id, None)
            tenant = open_request.answer.request.tenant
            self._results.remove(open_request.result_bytes, tenant)
            return open_request.sender

    def return_lent(self) -> None:
        """Take back the requests with large responses that will not be sent anymore."""
        with self._lock:
            for open_request in self._open.values():
                open_request.is_lent = False

    # --- without an engine ----------------------------------------------------------------

    def lose_engine(self) -> LostRequests:
        """Record that the engine has ended, and return what it has not finished.

        Open requests stay in the table until ``resume`` sends them to the next engine.
        """
        with self._lock:
            self._has_engine = False
            in_flight = {
                id_: lost
                for id_, lost in self._open.items()
                if lost.is_in_flight and not lost.answer.is_finished
            }
            for open_request in in_flight.values():
                open_request.is_in_flight = False
                open_request.num_crashes += 1
            self._held_cancels.extend(cancel.call_id for cancel in self._cancelling.values())
            return LostRequests(in_flight, list(self._inspecting), list(self._cancelling))

    def resume(self) -> None:
        """Send open requests to a new engine, with the tokens that previous engines generated."""
        with self._lock:
            for open_request in self._open.values():
                answer = open_request.answer
                if answer.is_finished:
                    continue  # its last response is being sent
                message = wire.AddRequest(answer.request, answer.progress)
                open_request.is_in_flight = self._link.send(message)
            self._has_engine = True
            for call_id in self._held_cancels:
                self._send_cancel(call_id)
            self._held_cancels.clear()
            if isinstance(self._closed, EngineDead):
                self._closed = None

    def give_up(self, error: EngineDead) -> None:
        """Accept no requests until an engine is ready again; open requests stay in the table."""
        with self._lock:
            self._has_engine = False
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
