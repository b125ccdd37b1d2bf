"""What an engine hears of a constraint."""

from __future__ import annotations

import json
import queue
import threading

import pytest

from paged_backend.config import EngineConfig
from paged_backend.grammar.client import GrammarChecker
from paged_backend.process import wire
from paged_backend.request import RequestLimits
from paged_backend.sampling_params import SamplingParams
from paged_backend.serving.contract import as_strings
from paged_backend.serving.requests.intake import Intake
from paged_backend.serving.requests.open_requests import Arrival
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.serving.requests.preparation import Load
from paged_backend.serving.requests.request_table import RequestTable
from paged_backend.text.tokenizer import load_tokenizer

FIELDS = {"max_tokens": 5, "structured_outputs": {"regex": "mark[0-9]+"}}
TENSORS = {
    "text_input": as_strings(["x"]),
    "sampling_parameters": as_strings([json.dumps(FIELDS)]),
}


@pytest.fixture(scope="module")
def parser() -> RequestParser:
    limits = RequestLimits.of(
        EngineConfig.from_mapping({}), max_model_len=64, vocab_size=2048, max_num_seqs=4
    )
    return RequestParser(load_tokenizer("demo"), limits, GrammarChecker("demo", 2048))


def test_a_constraint_travels_once_as_a_grammar(parser: RequestParser) -> None:
    request = parser.parse("1", TENSORS, "").request
    assert request.params == SamplingParams(max_tokens=5)
    assert wire.encode(wire.AddRequest(request)).count(b"mark[0-9]+") == 1


class _Link:
    """An engine with room for one request, which it keeps."""

    identity = "link"

    def __init__(self) -> None:
        self.sent: queue.Queue[tuple[object, str]] = queue.Queue()

    def check_room(self, *numbers: int) -> None:
        pass

    def check_rate(self, tenant: str) -> None:
        pass

    def send(self, message: object) -> bool:
        self.sent.put((message, threading.current_thread().name))
        return True


class _Sender:
    def fail(self, error: Exception) -> None:
        raise AssertionError from error

    def is_cancelled(self) -> bool:
        return False


def test_no_grammar_is_made_on_the_thread_that_admits(parser: RequestParser) -> None:
    link = _Link()
    table = RequestTable(link, 2**20)  # type: ignore[arg-type]
    intake = Intake(link, parser, load_tokenizer("demo"), table, 1000, 1)  # type: ignore[arg-type]
    arrival = Arrival(TENSORS, "", None, _Sender())  # type: ignore[arg-type]
    arrival.load = Load(10, needs_template=False)  # as if its constraint had been overlooked
    intake.submit(arrival)
    message, thread = link.sent.get(timeout=60)
    assert isinstance(message, wire.AddRequest) and message.request.grammar
    assert thread.startswith("paged-grammars")
    intake.close()
    assert table.num_starting == 0 and len(table) == 1
