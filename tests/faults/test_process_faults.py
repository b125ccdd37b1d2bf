"""A front-end or the whole server dies: who else may notice, and who may be left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from callers import Crowd, ask_all, greedy
from servers import (
    ORPHAN_TIMEOUT_S,
    engine_of,
    engines_of,
    kill_engine,
    kill_stub,
    left_of,
    metrics,
    serve_demo,
    stubs_of,
    wait_for,
)

from paged_backend.launch.server_process import RunningServer
from paged_backend.tools.scrape import scrape

pytestmark = pytest.mark.server


def test_a_dead_front_end_takes_only_its_own_streams(tmp_path: Path) -> None:
    # On a busy machine, Triton may give all requests to one of the two front-ends.
    assert any(takes_only_its_own_streams(tmp_path / str(attempt)) for attempt in range(3))


def takes_only_its_own_streams(folder: Path) -> bool:
    """Kill a front-end; returns False if it had all streams, or none."""
    folder.mkdir()
    asks = [greedy(i, 200) for i in range(32)]
    with serve_demo(folder, instances=2) as server:
        undisturbed = ask_all(server, asks)
        engine = engine_of(server)
        with Crowd(server, asks) as crowd:
            wait_for(lambda: crowd.have_tokens(20), 60)
            kill_stub(stubs_of(server)[0])
            wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 60)

            def num_others() -> int:
                page = scrape(server.metrics_url)
                return 32 - int(page.by_label("request_success_total", "finished_reason")["abort"])

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


def decodes(server: RunningServer) -> None:
    """The engine is in the middle of something."""


def loads_anew(server: RunningServer) -> None:
    kill_engine(server)
    wait_for(lambda: engines_of(server), 30, "no engine is started in place of the killed one")


def hangs(server: RunningServer) -> None:
    engine_of(server).send_signal(signal.SIGSTOP)


@pytest.mark.parametrize(
    "engine_does",
    [
        # `tests/integration/test_processes.py` has this in each run of the tests.
        pytest.param(decodes, marks=pytest.mark.thorough),
        pytest.param(loads_anew, marks=pytest.mark.soak),
        pytest.param(hangs, marks=pytest.mark.soak),
    ],
)
def test_no_process_outlives_a_killed_server(
    tmp_path: Path, engine_does: Callable[[RunningServer], None]
) -> None:
    """Stubs and the engine end by themselves, whatever the engine does at that moment."""
    asks = [greedy(i, 1500) for i in range(8)]
    with serve_demo(tmp_path, instances=2) as server, Crowd(server, asks) as crowd:
        wait_for(lambda: crowd.have_tokens(10), 60)
        assert {*stubs_of(server), engine_of(server)} < {*left_of(tmp_path)}
        engine_does(server)
        os.kill(server.pid, signal.SIGKILL)
        took_s = wait_for(lambda: not left_of(tmp_path), ORPHAN_TIMEOUT_S)
        print(f"\nall gone {took_s:.1f} s after the server")
    assert all(call.error is not None for call in crowd.calls)
