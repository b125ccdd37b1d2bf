"""What an engine hears of a constraint."""

from __future__ import annotations

import json
import queue
import threading
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from paged_backend.grammar.client import GrammarChecker
from paged_backend.process import wire
from paged_backend.serving.contract import as_strings
from paged_backend.serving.requests.intake import Intake
from paged_backend.serving.requests.open_requests import IncomingRequest
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.serving.requests.preparation import Load
from paged_backend.serving.requests.request_table import RequestTable
from paged_backend.text.tokenizer import Tokenizer as OurTokenizer
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.request import RequestLimits
from paged_backend.values.sampling_params import SamplingParams

FIELDS = {"max_tokens": 5, "structured_outputs": {"regex": "mark[0-9]+"}}
TENSORS = {
    "text_input": as_strings(["x"]),
    "sampling_parameters": as_strings([json.dumps(FIELDS)]),
}


@pytest.fixture(scope="module")
def parser() -> RequestParser:
    return _parser(load_tokenizer("demo"))


def _parser(tokenizer: OurTokenizer) -> RequestParser:
    limits = RequestLimits.of(
        EngineConfig.from_mapping({}), max_model_len=2048, vocab_size=2048, max_num_seqs=4
    )
    return RequestParser(tokenizer, limits, GrammarChecker("demo", 2048))


def test_a_constraint_travels_once_as_a_grammar(parser: RequestParser) -> None:
    request = parser.parse("1", parser.read(TENSORS, "")).request
    assert request.params == SamplingParams(max_tokens=5)
    assert wire.encode(wire.AddRequest(request)).count(b"mark[0-9]+") == 1


class _Link:
    """An engine with room for one request, which it keeps."""

    identity, size = "link", 1

    def __init__(self) -> None:
        self.sent: queue.Queue[tuple[object, str]] = queue.Queue()

    def check_room(self, *numbers: int) -> None:
        pass

    def check_rate(self, tenant: str) -> None:
        pass

    def route(self, request: object) -> tuple[()]:
        return ()

    def add(self, message: object, route: object) -> int:
        self.sent.put((message, threading.current_thread().name))
        return 0


class _Sender:
    def fail(self, error: Exception) -> None:
        raise AssertionError from error

    def is_cancelled(self) -> bool:
        return False


def test_no_grammar_is_made_on_the_thread_that_admits(parser: RequestParser) -> None:
    arrival = IncomingRequest(TENSORS, "", None, _Sender())  # type: ignore[arg-type]
    arrival.load = Load(10, needs_template=False)  # as if its constraint had been overlooked
    assert _thread_of(parser, arrival, has_grammar=True).startswith("paged-grammars")


def test_no_text_of_a_slow_tokenizer_is_encoded_on_the_thread_that_admits() -> None:
    backend = Tokenizer.from_str(load_tokenizer("demo").to_json())
    pattern = Regex(r"(?:xy){0,150}(?:xy){0,150}(?!x|y|\z)")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    slow = _parser(OurTokenizer(backend))
    arrival = _plain("a")
    assert _thread_of(slow, arrival) == threading.current_thread().name
    slow.prompts.read({"text_input": as_strings(["xy" * 1000])})
    assert _thread_of(slow, _plain("a")).startswith("paged-texts")


def _plain(text: str) -> IncomingRequest:
    return IncomingRequest({"text_input": as_strings([text])}, "", None, _Sender())  # type: ignore[arg-type]


def _thread_of(
    parser: RequestParser, arrival: IncomingRequest, *, has_grammar: bool = False
) -> str:
    """Return the name of the thread that sends a request to the engine."""
    link = _Link()
    table = RequestTable(link, 2**20)  # type: ignore[arg-type]
    others: Any = (None, None)  # these requests have no adapters
    intake = Intake(link, parser, load_tokenizer("demo"), table, *others, 1000, 1)  # type: ignore[arg-type]
    intake.submit(arrival)
    message, thread = link.sent.get(timeout=60)
    assert isinstance(message, wire.AddRequest) and bool(message.request.grammar) == has_grammar
    intake.close()
    assert table.num_starting == 0 and len(table) == 1
    return thread
