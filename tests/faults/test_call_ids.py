"""A name that a caller uses again stands for the new request only, however the one before ended."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Self

import pytest
from servers import MODEL, kill_engine, metrics, restarts, serve_demo, wait_for, wait_loaded

from paged_backend.launch.server_process import RunningServer

pytestmark = pytest.mark.server

NUM_CALLERS = 4  # at once, so that the engine has something to do whenever a request ends
PAIRS = [24, pytest.param(500, marks=pytest.mark.soak)]
LONG = {"text_input": "What does len do?", "max_tokens": 1500, "ignore_eos": True}
# Nothing in the second request's answer is in the first one's.
SECOND = {
    **{"text_input": "What does os.getcwd do?", "temperature": 0, "max_tokens": 8},
    **{"return_output_ids": True, "return_finish_reason": True},
}


class Caller:
    """A client with one connection that gives each of its requests the same name."""

    def __init__(self, server: RunningServer, call_id: str) -> None:
        self.call_id = call_id
        self._address = server.http_url.removeprefix("http://")
        self._connection = http.client.HTTPConnection(self._address, timeout=60)

    def ask(self, **fields: Any) -> tuple[int, Any]:
        """The status and the content of a whole answer."""
        path = f"/v2/models/{MODEL}/generate"
        self._connection.request("POST", path, self._body(fields))
        response = self._connection.getresponse()
        return response.status, json.loads(response.read())

    @contextmanager
    def stream(self, **fields: Any) -> Iterator[http.client.HTTPResponse]:
        """An answer in pieces, of which the first has come; the connection is closed at the end."""
        connection = http.client.HTTPConnection(self._address, timeout=60)
        try:
            body = self._body(fields | {"stream": True})
            connection.request("POST", f"/v2/models/{MODEL}/generate_stream", body)
            response = connection.getresponse()
            response.readline()
            yield response
        finally:
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()

    def _body(self, fields: dict[str, Any]) -> str:
        return json.dumps(fields | {"call_id": self.call_id})


def ends_by_stop_string(caller: Caller) -> None:
    fields = LONG | {"text_input": "What does len do?", "max_tokens": 200, "stop": [" "]}
    status, answer = caller.ask(**fields, temperature=0, return_finish_reason=True)
    assert (status, answer["finish_reason"]) == (200, "stop")


def ends_by_length(caller: Caller) -> None:
    status, answer = caller.ask(**LONG | {"max_tokens": 5}, return_finish_reason=True)
    assert (status, answer["finish_reason"]) == (200, "length")


def ends_by_cancel(caller: Caller) -> None:
    """The answer to the cancelling request is enough: the first request's end need not be read."""
    with caller.stream(**LONG):
        assert caller.ask(task="cancel")[0] == 200


def ends_by_disconnect(caller: Caller) -> None:
    with caller.stream(**LONG):
        pass


def ends_by_deadline(caller: Caller) -> None:
    status, answer = caller.ask(**LONG, timeout_s=0.02)
    assert status == 400 and "deadline: " in answer["error"]


def ends_by_refusal(caller: Caller) -> None:
    status, answer = caller.ask(**LONG | {"temperature": -1})
    assert status == 400 and "temperature: must be" in answer["error"]


def answer_to(server: RunningServer, fields: dict[str, Any]) -> tuple[int, Any]:
    """The answer of a caller that asks once."""
    with Caller(server, str(fields.get("call_id", "once"))) as caller:
        status, answer = caller.ask(**fields)
    assert status == 200, answer
    return status, answer


WAYS = [
    *(ends_by_stop_string, ends_by_length, ends_by_cancel, ends_by_disconnect),
    *(ends_by_deadline, ends_by_refusal),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = {"max_num_seqs": 64, "max_crashes_per_request": 1}
    with serve_demo(tmp_path_factory.mktemp("names"), instances=2, **options) as server:
        yield server
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 30, "blocks are left")


def wrong_answers(server: RunningServer, number: int, end: Callable[[Caller], None]) -> list[Any]:
    """What second requests got that is not their answer, of so many pairs by several callers."""

    def pairs(index: int) -> list[Any]:
        answers = []
        with Caller(server, f"same-{index}") as caller:
            for _ in range(number // NUM_CALLERS):
                end(caller)
                answers.append(caller.ask(**SECOND))
        return [answer for answer in answers if answer != expected]

    expected = answer_to(server, SECOND)

    with ThreadPoolExecutor(NUM_CALLERS) as pool:
        return [answer for wrong in pool.map(pairs, range(NUM_CALLERS)) for answer in wrong]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", PAIRS)
@pytest.mark.parametrize("end", WAYS, ids=lambda end: end.__name__)
def test_a_name_used_again_is_the_new_call(
    server: RunningServer, end: Callable[[Caller], None], number: int
) -> None:
    wrong = wrong_answers(server, number, end)
    assert not wrong, f"{len(wrong)} of {number} second requests, as {wrong[0]}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [16, pytest.param(504, marks=pytest.mark.soak)])
def test_a_name_used_again_after_its_call_ended_the_engine_is_the_new_call(
    server: RunningServer, number: int
) -> None:
    """Requests that fail with their engine, 56 at a time, and then requests of the same names."""
    at_once = min(number, 56)

    def pair(index: int) -> Any:
        with Caller(server, f"same-{index}") as caller:
            status, answer = caller.ask(**LONG)
            assert status == 400 and "crash_limit: " in answer["error"], answer
            return caller.ask(**SECOND)

    expected = answer_to(server, SECOND)
    with ThreadPoolExecutor(at_once) as pool:
        for _ in range(number // at_once):
            before = restarts(server)
            answers = pool.map(pair, range(at_once))
            wait_for(lambda: metrics(server)["num_requests_running"] == at_once, 30)
            kill_engine(server)
            assert [answer for answer in answers if answer != expected] == []
            wait_loaded(server, before + 1)


def test_calls_may_share_a_name_and_are_cancelled_together(server: RunningServer) -> None:
    fields = LONG | {"call_id": "shared", "return_finish_reason": True}
    with ThreadPoolExecutor(4) as pool, Caller(server, "shared") as caller:
        answers = [pool.submit(answer_to, server, fields) for _ in range(4)]
        wait_for(lambda: metrics(server)["num_requests_running"] == 4, 10)
        assert caller.ask(task="cancel")[0] == 200
        assert [answer.result()[1]["finish_reason"] for answer in answers] == ["abort"] * 4
