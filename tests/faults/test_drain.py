"""A server, or a version of a model, that goes away while requests are open."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from callers import Crowd, greedy
from paged_client import Client, ClientError, Unavailable, UnknownModel
from servers import MODEL, left_of, serve_demo_with_log, wait_for
from wires import WIRES, WireCall

from paged_backend.launch.server_process import LaunchError, RunningServer

pytestmark = pytest.mark.server

PAGED_BACKEND = Path(sys.executable).parent / "paged-backend"
DRAIN_S = 3.0
LATE_S = 4.0  # for the notice and the last responses of a server on busy cores
AWAITING = re.compile(r"\[paged\] Awaiting remaining (\d+) requests")
LONG = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}
SHORT = LONG | {"max_tokens": 60}  # goes on for a while after it has begun
DRAINING = b"draining: the server stops"


async def ask(server: RunningServer, params: dict[str, Any]) -> list[WireCall]:
    """Four requests over each wire."""
    return [await WireCall.start(server, wire, params) for wire in WIRES for _ in range(4)]


async def hear_to_the_end(call: WireCall) -> None:
    """And hang up: the server waits for HTTP connections that are kept, too."""
    await call.wait(60)
    call.close()


async def all_have_begun(calls: list[WireCall]) -> None:
    while not all(call.arrivals for call in calls):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("exit_timeout_s", "drain_timeout_s", "limit_s"),
    [
        (30, DRAIN_S, DRAIN_S),
        # Less 3 s to spare and 1.5 s for an instance.
        pytest.param(8, 3600.0, 3.5, marks=pytest.mark.soak),
    ],
)
def test_calls_end_before_a_stopping_server_does(
    tmp_path: Path, exit_timeout_s: int, drain_timeout_s: float, limit_s: float
) -> None:
    flags = [f"--exit-timeout-secs={exit_timeout_s}"]
    with serve_demo_with_log(tmp_path, *flags, drain_timeout_s=drain_timeout_s) as (server, log):

        async def callers() -> tuple[list[WireCall], list[WireCall], WireCall, float]:
            long = await ask(server, LONG)
            short = await ask(server, SHORT)
            await all_have_begun([*long, *short])
            os.kill(server.pid, signal.SIGTERM)
            told_s = time.monotonic()
            while not AWAITING.search(log.read_text()):
                await asyncio.sleep(0.01)
            late = await WireCall.start(server, "grpc", SHORT)  # is taken as long as HTTP is open
            await asyncio.gather(*map(hear_to_the_end, [*short, *long, late]))
            return long, short, late, told_s

        long, short, late, told_s = asyncio.run(callers())
        with pytest.raises(LaunchError, match="exit status 0"):
            server.wait()
        lines = log.read_text()
    assert all(b"error" not in call.received and DRAINING not in call.received for call in short)
    took_s = [call.arrivals[-1] - told_s for call in long]
    print(f"\nlong requests ended {min(took_s):.1f} to {max(took_s):.1f} s after SIGTERM")
    assert all(DRAINING in call.received for call in long)
    assert limit_s <= min(took_s) and max(took_s) < exit_timeout_s
    assert DRAINING in late.received
    assert late.arrivals[-1] < min(call.arrivals[-1] for call in long)
    awaited = AWAITING.findall(lines)
    assert len(awaited) >= 2 and "8" in awaited
    assert "[paged] Shutdown complete" in lines


def post(server: RunningServer, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.http_url.removeprefix("http://"), timeout=120)
    body = json.dumps({"text_input": "What does", "max_tokens": 2})
    connection.request("POST", path, body if path.endswith("generate") else "{}")
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def generate(server: RunningServer, version: str = "") -> tuple[int, str]:
    return post(server, f"/v2/models/{MODEL}{version}/generate")


def engines_of_version(tmp_path: Path, version: int) -> int:
    number = 0
    for process in left_of(tmp_path):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            number += any(f"/{MODEL}-{version}-" in word for word in process.cmdline())
    return number


EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")


@pytest.mark.soak
def test_an_unloaded_model_takes_no_more_calls_and_ends_those_that_it_has(tmp_path: Path) -> None:
    asks = [greedy(i, 600) for i in range(8)]
    with serve_demo_with_log(tmp_path, *EXPLICIT) as (server, log):
        with Crowd(server, asks) as crowd:
            wait_for(lambda: crowd.have_tokens(10), 60)
            assert post(server, f"/v2/repository/models/{MODEL}/unload")[0] == 200
            with Client(server.grpc_url) as client, pytest.raises(UnknownModel, match="no avail"):
                client.generate("What does")
            assert generate(server)[0] == 404
            assert crowd.num_complete == 0
        assert all(len(call.token_ids[0]) == 600 for call in crowd.calls)
        wait_for(lambda: "[paged] Shutdown complete" in log.read_text(), 10)
        wait_for(lambda: len(left_of(tmp_path)) == 1, 10, "more than the server is left")


@pytest.mark.soak
def test_a_new_version_takes_over_while_the_old_one_ends_its_calls(tmp_path: Path) -> None:
    asks = [greedy(i, 1800) for i in range(8)]
    with serve_demo_with_log(tmp_path, *EXPLICIT) as (server, log):
        with Crowd(server, asks) as crowd:
            wait_for(lambda: crowd.have_tokens(10), 60)
            folder = tmp_path / "repository" / MODEL
            shutil.copytree(folder / "1", folder / "2")
            options = {"model": "demo", "max_model_len": 64}
            (folder / "2" / "model.json").write_text(json.dumps(options))
            started_s = time.monotonic()
            assert post(server, f"/v2/repository/models/{MODEL}/load")[0] == 200
            print(f"\nloaded in {time.monotonic() - started_s:.1f} s beside 8 streams")
            assert crowd.num_complete == 0
            assert [engines_of_version(tmp_path, version) for version in (1, 2)] == [1, 1]
            status, text = generate(server)
            assert (status, json.loads(text)["model_version"]) == (200, "2")
            status, text = generate(server, "/versions/1")
            assert (status, "not at ready state" in text) == (503, True)
        assert all(len(call.token_ids[0]) == 1800 for call in crowd.calls)
        wait_for(lambda: engines_of_version(tmp_path, 1) == 0, 15, "the old engine stays")
        assert generate(server)[0] == 200
        assert log.read_text().count("[paged] Shutdown complete") == 1


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_ends_its_calls_and_then_itself(number: signal.Signals) -> None:
    command = [str(PAGED_BACKEND), "serve", "demo", "--drain-timeout-s", str(DRAIN_S)]
    ports = [word for name in ("http", "grpc", "metrics") for word in (f"--{name}-port", "0")]
    with ExitStack() as stack:
        launcher = stack.enter_context(
            subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(launcher.kill)  # launcher of a test that failed
        assert launcher.stdout is not None
        listening = re.search(r"gRPC (\S+),", launcher.stdout.readline())
        assert listening is not None
        with Client(listening[1], timeout=60) as client:
            long = client.stream("What does", **LONG)
            short = client.stream("What does", **SHORT)
            next(long), next(short)
            launcher.send_signal(number)
            told_s = time.monotonic()
            assert sum(chunk.num_output_tokens for chunk in short) > 0
            with pytest.raises(Unavailable, match=DRAINING.decode()):
                list(long)
            took_s = time.monotonic() - told_s
            with pytest.raises(ClientError):
                client.generate("What does")
        assert launcher.wait(30) == 0
    assert DRAIN_S <= took_s < DRAIN_S + LATE_S
