"""The whole server dies: who may be left. `test_engine_faults.py` has a dead front-end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from callers import Crowd, greedy
from servers import (
    ORPHAN_TIMEOUT_S,
    engine_of,
    engines_of,
    kill_engine,
    left_of,
    serve_demo,
    stubs_of,
    wait_for,
)

from paged_backend.launch.server_process import RunningServer

pytestmark = pytest.mark.server


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
