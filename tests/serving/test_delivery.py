"""The sending thread makes several responses before it sends them, and ends each request once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paged_backend.process import wire
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.metrics.stat_logger import RequestClock, StatLogger
from paged_backend.serving.requests.delivery import MAX_PREPARED, Delivery
from paged_backend.serving.requests.open_requests import OpenRequest
from paged_backend.serving.requests.request_table import RequestTable
from paged_backend.values.outputs import FinishReason, SequenceOutput
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams


class Link:
    """An engine that only hears."""

    identity, size = "link", 1

    def __init__(self) -> None:
        self.sent: list[object] = []

    def add(self, message: object, route: object) -> int:
        return 0

    def release(self, engine: int) -> None:
        """Do nothing: there is no other engine."""

    def send(self, message: object, engine: int) -> bool:
        self.sent.append(message)
        return True


class Answer:
    """An answer that is due with each token."""

    is_due, is_large = True, False

    def __init__(self, request_id: str) -> None:
        self.request = Request(request_id, [1], SamplingParams(max_tokens=9))
        self.is_finished = False
        self._texts: list[str] = []

    def append(self, output: SequenceOutput) -> bool:
        self._texts += map(str, output.new_token_ids)
        self.is_finished = output.finish_reason is not None
        return False

    def take(self) -> dict[str, Array]:
        texts, self._texts = self._texts, []
        return {"text_output": as_strings([" ".join(texts)])}


class Client:
    """The sender of one request; notes what happens in a log that all share."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log = name, log
        self.heard: list[tuple[str, bool]] = []
        self.error: Exception | None = None
        self.breaks: str | None = None

    def prepare(self, tensors: dict[str, Array], final: bool) -> Callable[[], None]:
        self._do("make")

        def send() -> None:
            self._do("send")
            self.heard.append((tensors["text_output"][0].decode(), final))

        return send

    def fail(self, error: Exception) -> None:
        assert self.error is None
        self.error = error

    def _do(self, what: str) -> None:
        self.log.append((what, self.name))
        if what == self.breaks:
            raise RuntimeError(what)


class World:
    """Open requests with one completion each."""

    def __init__(self, number: int) -> None:
        self.link = Link()
        link: Any = self.link
        self.table = RequestTable(link, 10**6)
        self.delivery = Delivery(self.table, StatLogger())
        self.log: list[tuple[str, str]] = []
        self.clients = {str(i): Client(str(i), self.log) for i in range(number)}
        incoming: Any = SimpleNamespace(is_cancelled=False)
        for name, client in self.clients.items():
            answer, sender = Answer(name), client
            open_request: Any = OpenRequest(answer, sender, RequestClock(), None)  # type: ignore[arg-type]
            self.table.start(open_request, incoming)

    def step(self, token_id: int, reason: FinishReason | None = None) -> None:
        """Deliver a token for each of the requests that are still open."""
        outputs = [SequenceOutput(id_, 0, [token_id], reason) for id_ in self.table.request_ids()]
        self.delivery.respond_all(outputs)


def test_responses_are_made_in_portions_before_they_are_sent() -> None:
    world = World(MAX_PREPARED + 2)
    world.step(5)
    names = list(world.clients)
    first, rest = names[:MAX_PREPARED], names[MAX_PREPARED:]
    assert world.log == [
        (what, name) for part in (first, rest) for what in ("make", "send") for name in part
    ]
    assert all(client.heard == [("5", False)] for client in world.clients.values())


def test_a_request_ends_when_its_final_response_has_been_sent() -> None:
    world = World(3)
    world.step(5)
    world.step(6, FinishReason.LENGTH)
    assert all(c.heard == [("5", False), ("6", True)] for c in world.clients.values())
    assert len(world.table) == 0
    world.delivery.close()
    assert all(client.error is None for client in world.clients.values())


@pytest.mark.parametrize("what", ["make", "send"])
@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH])
def test_an_error_of_a_response_ends_its_request_only(
    what: str, reason: FinishReason | None
) -> None:
    world = World(4)
    world.clients["1"].breaks = what
    world.step(5, reason)
    world.step(6, FinishReason.LENGTH)
    broken = world.clients.pop("1")
    assert str(broken.error) == what and broken.heard == []
    assert wire.AbortRequest("1") in world.link.sent
    expected = [("5", True)] if reason else [("5", False), ("6", True)]
    assert all(client.heard == expected for client in world.clients.values())
    assert all(client.error is None for client in world.clients.values())
    assert len(world.table) == 0
