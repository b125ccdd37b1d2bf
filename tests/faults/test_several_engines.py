"""A server of two engines of one model: equal tokens, shared caches, and the loss of an engine."""

from __future__ import annotations

import signal
import time
import urllib.request
from collections.abc import Iterator

import psutil
import pytest
from callers import Ask, Crowd, ask_all, greedy, print_pauses
from paged_client import Client, RequestCancelled
from prometheus_client.parser import text_string_to_metric_families
from servers import command_of, engines_of, is_alive, serve_demo, wait_for

from paged_backend import LLM, SamplingParams
from paged_backend.launch.server_process import RunningServer
from paged_backend.tools.demo import load_questions

pytestmark = pytest.mark.server

LOAD_TIMEOUT_S = 60.0
LENGTH = 150
NUM_STREAMS = 8
TEXTS = [question.question for question in load_questions()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("engines")
    options = {"data_parallel_size": 2, "step_timeout_s": 3, "max_crashes_per_request": 9}
    with serve_demo(folder, **options) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[int, ...]]]:
    """The tokens of the streams, of one engine in this process."""
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    outputs = LLM("demo").generate(TEXTS[:NUM_STREAMS], params)
    return [[tuple(output.outputs[0].token_ids)] for output in outputs]


def engine_values(server: RunningServer, name: str) -> list[float]:
    """The value of a metric for each engine, in their order."""
    with urllib.request.urlopen(server.metrics_url, timeout=5) as response:
        families = text_string_to_metric_families(response.read().decode())
        samples = [s for family in families for s in family.samples if s.name == f"paged_{name}"]
    return [s.value for s in sorted(samples, key=lambda s: s.labels["engine"])]


def engine(server: RunningServer, number: int) -> psutil.Process:
    (found,) = [p for p in engines_of(server) if f"--number {number} " in command_of(p)]
    return found


def asks() -> list[Ask]:
    return [greedy(index, LENGTH) for index in range(NUM_STREAMS)]


def wait_loaded(server: RunningServer) -> None:
    wait_for(lambda: engine_values(server, "engine_up") == [1, 1], LOAD_TIMEOUT_S)


def test_two_engines_divide_the_requests_and_give_the_tokens_of_one(
    server: RunningServer, expected: list[list[tuple[int, ...]]]
) -> None:
    before = engine_values(server, "generation_tokens_total")
    assert [call.token_ids for call in ask_all(server, asks())] == expected
    after = engine_values(server, "generation_tokens_total")
    assert [b - a for a, b in zip(before, after, strict=True)] == [NUM_STREAMS / 2 * LENGTH] * 2


def test_a_request_goes_to_the_engine_that_has_its_beginning(server: RunningServer) -> None:
    num_prompts, rounds = 6, 5
    prompts = [f"{number} {TEXTS[number]} " * 8 for number in range(num_prompts)]
    with Client(server.grpc_url) as client:
        cached = [
            client.generate(prompt + str(turn), max_tokens=1).num_cached_tokens
            for turn in range(rounds)
            for prompt in prompts
        ]
    # At random, half of the requests of the second round would find nothing.
    assert all(number > 0 for number in cached[num_prompts:])


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.soak),
    ],
)
def test_the_loss_of_an_engine_costs_no_stream_a_token(
    server: RunningServer, expected: list[list[tuple[int, ...]]], how: signal.Signals
) -> None:
    before = engine_values(server, "engine_restarts_total")
    with Crowd(server, asks()) as crowd:
        wait_for(lambda: crowd.have_tokens(20), LOAD_TIMEOUT_S)
        lost = engine(server, 1)
        lost.send_signal(how)
        moment = time.monotonic()
        wait_for(lambda: not is_alive(lost), LOAD_TIMEOUT_S)
    assert [call.token_ids for call in crowd.calls] == expected
    pauses = sorted(p.seconds for call in crowd.calls for p in call.pauses([moment]))
    print_pauses(f"{how.name} of an engine", pauses)
    assert pauses[NUM_STREAMS // 2 - 1] < 1, "the streams of the other engine have waited"
    wait_loaded(server)
    assert engine_values(server, "engine_restarts_total") == [before[0], before[1] + 1]
    wait_for(lambda: engine_values(server, "kv_blocks_used") == [0, 0], LOAD_TIMEOUT_S)


def test_requests_of_a_name_are_canceled_at_each_engine(server: RunningServer) -> None:
    params = {"max_tokens": 1500, "ignore_eos": True}
    with Client(server.grpc_url) as client:
        streams = [client.stream(text, **params) for text in TEXTS[:4]]
        for stream in streams:
            next(stream)
        wait_for(lambda: engine_values(server, "num_requests_running") == [2, 2], LOAD_TIMEOUT_S)
        for stream in streams:
            stream.cancel()
        for stream in streams:
            with pytest.raises(RequestCancelled):
                list(stream)
    wait_for(lambda: engine_values(server, "num_requests_running") == [0, 0], LOAD_TIMEOUT_S)


@pytest.mark.soak
def test_the_loss_of_both_engines_costs_no_stream_a_token(
    server: RunningServer, expected: list[list[tuple[int, ...]]]
) -> None:
    with Crowd(server, asks()) as crowd:
        wait_for(lambda: crowd.have_tokens(20), LOAD_TIMEOUT_S)
        engine(server, 0).kill()
        time.sleep(0.3)
        engine(server, 1).kill()
    assert [call.token_ids for call in crowd.calls] == expected
    wait_loaded(server)
