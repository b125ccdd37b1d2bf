"""The engine dies, hangs or cannot be loaded again, and what its callers see of it."""

from __future__ import annotations

import random
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from callers import QUESTIONS, Ask, Call, Crowd, ask_all, greedy, print_pauses, quantile
from paged_client import Client, RequestCancelled, RequestTimeout, ServerError, Unavailable
from servers import (
    LOAD_TIMEOUT_S,
    ORPHAN_TIMEOUT_S,
    crash_stub,
    engine_of,
    engines_in,
    engines_of,
    is_alive,
    kill_engine,
    left_of,
    metrics,
    restarts,
    serve_demo,
    stubs_of,
    wait_for,
    wait_loaded,
)

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.launch.server_process import LaunchError, RunningServer
from paged_backend.process.engine_loop import STATS_INTERVAL_S
from paged_backend.tools.scrape import scrape

pytestmark = pytest.mark.server

STEP_TIMEOUT_S = 2.5
LONG: dict[str, Any] = {"max_tokens": 1800, "ignore_eos": True}


# --- one server for faults that it gets over --------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two instances; a request may be in flight at one end of the engine, but not at two."""
    folder = tmp_path_factory.mktemp("faults")
    options = {"max_crashes_per_request": 2, "step_timeout_s": STEP_TIMEOUT_S}
    with serve_demo(folder, instances=2, **options) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames and request.node.name != LAST:
        server = request.getfixturevalue("server")
        no_blocks = "blocks are still in use"
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S, no_blocks)


def mixed_asks() -> list[Ask]:
    """Sixteen requests of every sort, none of which ends within its first 40 tokens."""
    long: dict[str, Any] = {"max_tokens": 140, "ignore_eos": True}
    seeded = {"temperature": 1.0, "top_p": 0.95, **long}
    kinds: list[tuple[dict[str, Any], bool]] = [
        ({"temperature": 0.0, **long}, False),
        ({"temperature": 0.0, **long}, True),
        ({"seed": 7, "structured_outputs": {"regex": "([a-z]{2,9}, ){60}"}, **seeded}, False),
        ({"seed": 8, "n": 2, **seeded}, False),
        ({"seed": 9, "n": 2, **seeded}, True),
        ({"seed": 10, "stop": [" the ", ". "], "min_tokens": 60, **seeded}, False),
        ({"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2, **long}, False),
        ({"seed": 11, "repetition_penalty": 1.2, "logprobs": 1, **seeded}, False),
    ]
    both = [*kinds, *kinds]
    return [Ask(QUESTIONS[i], params, whole) for i, (params, whole) in enumerate(both)]


def logprobs(call: Call) -> list[float]:
    """Every log-probability that a request was told."""
    assert call.completion is not None
    positions = [position for answer in call.completion.answers for position in answer.logprobs]
    positions += [position for position in call.completion.prompt_logprobs if position is not None]
    return [token.logprob for position in positions for token in position]


def test_calls_of_every_sort_go_on_where_a_killed_engine_left_them(server: RunningServer) -> None:
    asks = mixed_asks()
    started = time.monotonic()
    undisturbed = ask_all(server, asks)
    seconds = time.monotonic() - started
    before = metrics(server)
    with Crowd(server, asks) as crowd:
        wait_for(lambda: crowd.have_tokens(40), 60)
        kill_engine(server)
    for expected, call in zip(undisturbed, crowd.calls, strict=True):
        assert call.token_ids == expected.token_ids
        assert call.completion is not None and expected.completion is not None
        pairs = zip(call.completion.answers, expected.completion.answers, strict=True)
        assert all((a.text, a.finish_reason) == (b.text, b.finish_reason) for a, b in pairs)
        assert call.completion.num_input_tokens == expected.completion.num_input_tokens
        assert logprobs(call) == pytest.approx(logprobs(expected), abs=1e-4)
    produced = sum(len(tokens) for call in crowd.calls for tokens in call.token_ids)
    lost = 3 * STATS_INTERVAL_S * produced / seconds  # what it generated after its last report
    least = before["generation_tokens_total"] + produced - lost
    wait_for(lambda: metrics(server)["generation_tokens_total"] >= least, LOAD_TIMEOUT_S)
    after = metrics(server)
    assert after["engine_restarts_total"] == before["engine_restarts_total"] + 1
    fallen = {n: (before[n], after[n]) for n in before if n.endswith("_total") and n in after}
    assert all(was <= now for was, now in fallen.values()), fallen


def test_while_the_engine_loads_calls_wait_end_and_are_answered(server: RunningServer) -> None:
    before = restarts(server)
    with Client(server.grpc_url, timeout=LOAD_TIMEOUT_S) as client:
        expected = client.generate(QUESTIONS[0], temperature=0, max_tokens=20).token_ids
        open_when_killed = client.stream(QUESTIONS[1], **LONG)
        next(open_when_killed)
        kill_engine(server)
        shown = "the death is not shown"
        wait_for(lambda: metrics(server)["engine_up"] == 0, LOAD_TIMEOUT_S, shown)
        wait_for(lambda: engines_of(server), LOAD_TIMEOUT_S, "no engine is started in its place")
        next_engine = engine_of(server)
        next_engine.suspend()  # it loads for as long as this test takes

        new = Ask(QUESTIONS[0], {"temperature": 0.0, "max_tokens": 20})
        with Crowd(server, [new] * 4) as waiting:
            open_when_killed.cancel()
            with pytest.raises(RequestCancelled):
                list(open_when_killed)
            with pytest.raises(RequestTimeout, match="deadline"):
                client.generate(QUESTIONS[2], timeout_s=0.5, **LONG)
            assert metrics(server)["engine_up"] == 0, "it has loaded before it was suspended"
            assert not any(call.has_ended for call in waiting.calls)
            next_engine.resume()
        assert [call.token_ids for call in waiting.calls] == [[expected]] * 4
    wait_loaded(server, before + 1)


def test_a_request_in_flight_at_too_many_ends_of_the_engine_is_ended(server: RunningServer) -> None:
    with Client(server.grpc_url, timeout=LOAD_TIMEOUT_S) as client:
        before = restarts(server)
        stream = client.stream(QUESTIONS[0], **LONG)
        next(stream)
        kill_engine(server)
        wait_loaded(server, before + 1)
        running = "num_requests_running"
        wait_for(lambda: metrics(server)[running] == 1, LOAD_TIMEOUT_S, "it is not resumed")
        kill_engine(server)
        with pytest.raises(ServerError, match="crash_limit: .* in flight at 2 ends"):
            list(stream)
        client.generate(QUESTIONS[1], max_tokens=5)


def test_an_engine_that_hangs_is_found_and_replaced(server: RunningServer) -> None:
    asks = [greedy(i, 200) for i in range(8)]
    before = restarts(server)
    undisturbed = ask_all(server, asks)
    with Crowd(server, asks) as crowd:
        wait_for(lambda: crowd.have_tokens(50), 60)
        engine = engine_of(server)
        engine.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        found_s = wait_for(lambda: not is_alive(engine), 20, "nobody noticed")
        wait_loaded(server, before + 1)
    assert [c.token_ids for c in crowd.calls] == [c.token_ids for c in undisturbed]
    print_pauses("SIGSTOP", (p.seconds for c in crowd.calls for p in c.pauses([stopped])))
    assert STEP_TIMEOUT_S - 0.5 < found_s < STEP_TIMEOUT_S + 2, "within it, give or take"

    with Crowd(server, asks) as crowd:
        wait_for(lambda: crowd.have_tokens(50), 60)
        engine = engine_of(server)
        engine.send_signal(signal.SIGSTOP)
        time.sleep(1.0)
        engine.send_signal(signal.SIGCONT)
    assert [c.token_ids for c in crowd.calls] == [c.token_ids for c in undisturbed]
    assert engine_of(server) == engine, "it was only slow"
    assert restarts(server) == before + 1


def test_a_dead_front_end_takes_only_its_own_streams(
    server: RunningServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """This test is the last one of the server, because it stops it."""
    had_a_part = only_its_own_streams_end(server, tmp_path)
    # The server says where the front-end crashed.
    stack = capfd.readouterr().err.partition("Segmentation fault")[2]
    assert "requests/large_responses.py" in stack
    assert had_a_part, "one front-end had all streams"


def only_its_own_streams_end(server: RunningServer, tmp_path: Path) -> bool:
    """Let a front-end crash; returns False if it had all streams, or none, of several servers."""
    if takes_only_its_own_streams(server):
        return True
    # On a busy machine, Triton may give all requests to one of the two front-ends.
    for attempt in range(2):
        with serve_demo(tmp_path / str(attempt), instances=2) as another:
            if takes_only_its_own_streams(another):
                return True
    return False


LAST = test_a_dead_front_end_takes_only_its_own_streams.__name__


def takes_only_its_own_streams(server: RunningServer) -> bool:
    """Let a front-end crash, and kill the server; returns False if it had all streams, or none."""
    asks = [greedy(i, 200) for i in range(32)]
    undisturbed = ask_all(server, asks)
    engine, before = engine_of(server), num_aborted(server)
    with Crowd(server, asks) as crowd:
        wait_for(lambda: crowd.have_tokens(20), 60)
        crash_before_any_ends(server)
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 60)

        def num_others() -> int:
            return 32 - (num_aborted(server) - before)

        wait_for(lambda: crowd.num_complete == num_others(), 60, "others are cut off")
        others = num_others()
        heard = [call.error for call in crowd.calls if call.error is not None]
        crowd.hang_up()
    assert engine_of(server) == engine
    server.kill()  # it would wait 30 s for the requests of the dead front-end
    complete = [pair for pair in zip(crowd.calls, undisturbed, strict=True) if not pair[0].error]
    print(f"\n{len(heard)} of {32 - others} clients of the dead front-end heard of it", heard[:1])
    assert len(complete) == others
    assert all(call.token_ids == expected.token_ids for call, expected in complete)
    return 0 < others < 32


def crash_before_any_ends(server: RunningServer) -> None:
    """Let a front-end crash while the engine stands still.

    A crash writes stacks first. A request that ended meanwhile would be one that nobody hears of.
    """
    engine, stub = engine_of(server), stubs_of(server)[0]
    give_up = time.monotonic() + STEP_TIMEOUT_S / 2  # the engine must not look hung
    engine.suspend()
    try:
        crash_stub(stub)
        while is_alive(stub) and time.monotonic() < give_up:
            time.sleep(0.01)
    finally:
        engine.resume()


def num_aborted(server: RunningServer) -> int:
    """The number of requests that a server has cut short so far."""
    ended = scrape(server.metrics_url).by_label("request_success_total", "finished_reason")
    return int(ended["abort"])


# --- servers of their own ---------------------------------------------------------------------


@pytest.mark.soak
def test_what_waits_for_an_engine_that_cannot_load_again_is_ended(tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(MODEL_DIR, tmp_path / "checkpoint"))
    with (
        serve_demo(tmp_path, model=str(checkpoint), engine_restart_timeout_s=12) as server,
        Client(server.grpc_url, timeout=60) as client,
    ):
        stream = client.stream(QUESTIONS[0], **LONG)
        next(stream)
        checkpoint.rename(tmp_path / "elsewhere")
        killed = kill_engine(server)
        with Crowd(server, [greedy(1, 20)] * 3) as waiting:
            with pytest.raises(Unavailable, match="engine_dead"):
                list(stream)
        assert time.monotonic() - killed < 12 + 3
        for call in waiting.calls:
            assert isinstance(call.error, Unavailable) and "engine_dead" in str(call.error)
        assert metrics(server)["engine_up"] == 0
        (tmp_path / "elsewhere").rename(checkpoint)
        wait_loaded(server, 1)
        client.generate(QUESTIONS[0], max_tokens=5)


@pytest.mark.soak
def test_an_engine_that_crashes_while_it_loads_fails_the_start_and_says_how(tmp_path: Path) -> None:
    def crash() -> None:
        wait_for(lambda: engines_in(tmp_path), LOAD_TIMEOUT_S)
        engines_in(tmp_path)[0].send_signal(signal.SIGABRT)

    crashing = threading.Thread(target=crash)
    crashing.start()
    said = r"the engine ended while the model was loading \(killed by SIGABRT\)"
    with pytest.raises(LaunchError, match=said), serve_demo(tmp_path):
        pass
    crashing.join()
    wait_for(lambda: not left_of(tmp_path), ORPHAN_TIMEOUT_S)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_64_streams_survive_ten_kills_of_the_engine(tmp_path: Path) -> None:
    """Each stream goes on with the tokens that it would have had."""
    seed = random.randrange(2**32)
    print(f"\nseed {seed}")
    chance = random.Random(seed)
    asks = [greedy(i, chance.randrange(200, 800)) for i in range(64)]
    total = sum(ask.params["max_tokens"] for ask in asks)
    with serve_demo(tmp_path, instances=2, max_crashes_per_request=50) as server:
        undisturbed = ask_all(server, asks)
        kills: list[float] = []
        with Crowd(server, asks, timeout_s=600) as crowd:

            def kill() -> None:
                kills.append(kill_engine(server))

            time.sleep(chance.uniform(0, 0.3))
            kill()  # while it takes the prompts
            time.sleep(chance.uniform(0, 2))
            kill()  # while it loads
            wait_loaded(server, 1)
            time.sleep(chance.uniform(0, 0.3))
            kill()  # while it takes the prompts again
            kill()  # and the next as soon as there is one
            for number, part in enumerate(sorted(chance.uniform(0.05, 0.9) for _ in range(6)), 2):
                wait_loaded(server, number)
                wait_for(lambda part=part: crowd.num_tokens >= part * total, 300)
                kill()
        assert [c.token_ids for c in crowd.calls] == [c.token_ids for c in undisturbed]
        assert len(kills) == 10
        assert restarts(server) == 8, "two were killed while they loaded"
        pauses = [pause for call in crowd.calls for pause in call.pauses(kills)]
        print_pauses("several kills in one", (p.seconds for p in pauses if p.num_faults > 1))
        of_one = [pause.seconds for pause in pauses if pause.num_faults == 1]
        print_pauses("one kill", of_one)
        assert quantile(of_one, 0.99) < 10
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 10, "blocks are still in use")
