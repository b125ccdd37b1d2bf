"""What happens to the requests of an engine that ends while others of its model run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from paged_backend.process import wire
from paged_backend.serving.metrics.stat_logger import RequestClock
from paged_backend.serving.requests.open_requests import OpenRequest
from paged_backend.serving.requests.request_table import Cancel, RequestTable
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams


class Link:
    """Engines that take requests in turn while they run."""

    identity = "front-end"

    def __init__(self, size: int) -> None:
        self.size = size
        self.running = list(range(size))
        self.num_open = [0] * size
        self.sent: list[tuple[int, wire.ToEngine]] = []

    def add(self, message: wire.AddRequest, route: object) -> int | None:
        if not self.running:
            return None
        engine = self.running[0]
        self.running = [*self.running[1:], engine]
        self.num_open[engine] += 1
        self.sent.append((engine, message))
        return engine

    def release(self, engine: int) -> None:
        self.num_open[engine] -= 1

    def send(self, message: wire.ToEngine, engine: int) -> bool:
        self.sent.append((engine, message))
        return engine in self.running

    def send_all(self, message: wire.ToEngine) -> None:
        self.sent += [(engine, message) for engine in self.running]


class World:
    """A table with a request at each engine."""

    def __init__(self, size: int) -> None:
        self.link = Link(size)
        link: Any = self.link
        self.table = RequestTable(link, 10**6)
        self.answers: list[Any] = []
        for _ in range(size):
            self.start()

    def start(self) -> str:
        request_id = str(len(self.answers))
        request = Request(request_id, [1], SamplingParams(max_tokens=9), call_id="name")
        answer: Any = SimpleNamespace(request=request, is_finished=False, progress=[[5]])
        self.answers.append(answer)
        sender: Any = None
        incoming: Any = SimpleNamespace(is_cancelled=False)
        self.table.start(OpenRequest(answer, sender, RequestClock(), None), incoming)
        return request_id

    def end(self, engine: int) -> set[str]:
        """Let an engine end; returns the requests that it has lost."""
        self.link.running = [e for e in self.link.running if e != engine]
        return set(self.table.lose_engine(engine).requests)

    def take_sent(self) -> list[tuple[int, wire.ToEngine]]:
        sent, self.link.sent = self.link.sent, []
        return sent


def test_only_the_requests_of_the_lost_engine_move_with_their_tokens() -> None:
    world = World(3)
    world.take_sent()
    assert world.end(1) == {"1"}
    world.table.resume()
    assert world.take_sent() == [(0, wire.AddRequest(world.answers[1].request, [[5]]))]
    assert world.link.num_open == [2, 0, 1]
    world.table.resume()
    assert world.take_sent() == []


def test_without_any_engine_requests_wait() -> None:
    world = World(2)
    world.take_sent()
    assert world.end(0) == {"0"}
    assert world.end(1) == {"1"}
    world.table.resume()
    world.start()
    assert world.take_sent() == [] and not world.table.has_engine
    world.link.running = [1]
    world.table.add_engine(1)
    world.table.resume()
    assert [engine for engine, _ in world.take_sent()] == [1, 1, 1]
    assert world.link.num_open == [0, 3]


def test_messages_about_a_request_go_to_its_engine() -> None:
    world = World(2)
    world.take_sent()
    world.table.tell("1", wire.AbortRequest("1"))
    assert world.take_sent() == [(1, wire.AbortRequest("1"))]
    world.end(1)
    world.table.tell("1", wire.AbortRequest("1"))
    assert world.take_sent() == []
    for request_id in ("0", "1"):
        world.table.remove(request_id)
    assert world.link.num_open == [0, 0]


def test_a_cancellation_is_done_when_each_engine_has_confirmed_it() -> None:
    world = World(2)
    cancel = Cancel("name", None)  # type: ignore[arg-type]
    assert world.table.cancel(cancel) is None
    _, message = world.take_sent()[-1]
    assert isinstance(message, wire.CancelRequests)
    assert world.table.confirm_cancel(message.request_id, 1) is None
    assert world.table.confirm_cancel(message.request_id, 0) == cancel
    assert world.table.confirm_cancel(message.request_id, 0) is None


def test_requests_that_move_are_canceled_where_they_go() -> None:
    """Their cancellation has reached the other engines before they have."""
    world = World(2)
    world.end(0)
    world.take_sent()
    world.table.cancel(Cancel("name", None))  # type: ignore[arg-type]
    world.table.resume()
    kinds = [type(message) for _, message in world.take_sent()]
    assert kinds == [wire.CancelRequests, wire.AddRequest, wire.CancelRequests]
