"""A server that dies while a bench and Locust send requests: both end with what they have."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path

import pytest
from demo_server import MODEL
from metrics_page import read_metrics
from paged_loadtest.results import load_report
from test_bench_commands import command, started, wait_for_tokens
from test_locust import LOCUST, SHORT, rows, totals

from paged_backend.launch.gateway_process import GatewayProcess
from paged_backend.launch.ports import bind
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server

pytestmark = pytest.mark.server


@pytest.mark.parametrize(
    "backend",
    ["triton", *(pytest.param(name, marks=pytest.mark.soak) for name in ("triton-http", "openai"))],
)
def test_a_server_that_dies_ends_runs_with_their_results(backend: str, tmp_path: Path) -> None:
    write_model_repository(tmp_path / "repository", MODEL, {"model": "demo"}, instances=1)
    path, prefix = tmp_path / "run.json", tmp_path / "run"
    with ExitStack() as stack:
        server = stack.enter_context(start_server(tmp_path / "repository"))
        url = {"triton": server.grpc_url, "triton-http": server.http_url}.get(backend)
        if url is None:
            listener = bind("127.0.0.1", 0, "port")
            url = stack.enter_context(GatewayProcess(listener, server.grpc_url)).address
        # A rate that leaves the engine time while Locust starts.
        argv = [*command("serve", url, backend, path), "--max-concurrency", "8"]
        bench = stack.enter_context(started([*argv, "--request-rate", "40"]))
        wait_for_tokens(server, 640)
        users = ["-u", "4", "-r", "4", "-t", "60s", "--csv", str(prefix), *SHORT]
        users += ["--grpc-url", server.grpc_url, "--http-url", server.http_url]
        locust = stack.enter_context(
            started([*LOCUST, "--headless", "--only-summary", *users, "GrpcUser", "HttpUser"])
        )
        assert locust.stderr is not None
        line = locust.stderr.readline()
        while "All users spawned" not in line:
            assert line, "it ended"
            line = locust.stderr.readline()
        wait_for_tokens(server, num_tokens(server) + 1000)
        server.kill()
        ended = [process.communicate(timeout=120) for process in (bench, locust)]
    check_bench(bench.returncode, *ended[0], path)
    check_locust(locust.returncode, *ended[1], prefix)


def num_tokens(server: RunningServer) -> float:
    return read_metrics(server.metrics_url)["generation_tokens_total"]


def check_bench(status: int, out: str, err: str, path: Path) -> None:
    assert status == 2
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("paged-backend: error: the server was lost after ")
    assert "start it again" in err
    assert "Successful requests" in out
    (saved,) = load_report(path).runs
    assert saved.num_completed > 20 and saved.num_failed >= 1
    assert saved.num_output_tokens == 16 * saved.num_completed


def check_locust(status: int, out: str, log: str, prefix: Path) -> None:
    assert status == 2, log
    tokens, num_requests, failed = totals(out)
    assert tokens > 0 and num_requests > failed > 0
    assert re.match(r"locust: error: --(grpc|http)-url: nobody answers", log.splitlines()[-1])
    assert "Traceback" not in log
    assert int(rows(prefix)["", "Aggregated"]["Request Count"]) == num_requests
