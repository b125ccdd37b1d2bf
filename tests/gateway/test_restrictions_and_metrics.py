"""Routes that need a header, and the servers' metrics on the gateway's page."""

from __future__ import annotations

import http.client
import subprocess
import sys

import pytest
from demo_server import Server
from gateway.gateways import running_gateway
from paged_client.gateway.restrictions import read_restrictions
from paged_client.gateway.server_metrics import join_pages
from prometheus_client.parser import text_string_to_metric_families

GATEWAY = [sys.executable, "-m", "paged_backend.cli", "gateway"]


def status(address: str, path: str, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(address, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


@pytest.mark.server
def test_a_restricted_route_needs_its_header(server: Server) -> None:
    flags = ["--triton", server.running.grpc_url]
    flags += ["--openai-restricted-api", "model-repository,health", "Admin-Key", "secret"]
    flags += ["--openai-restricted-api", "inference", "infer-key", "other"]
    with running_gateway(*flags) as gateway:
        right, wrong = {"admin-key": "secret"}, {"admin-key": "Secret"}
        for path in ("/v1/models", "/v1/models/paged_llm", "/health", "/health/ready"):
            assert status(gateway.address, path, right) == 200
            for headers in ({}, wrong, {"infer-key": "other"}):
                assert status(gateway.address, path, headers) == 401
        assert status(gateway.address, "/metrics", {}) == 200
        body = {"prompt": "What does len do?", "max_tokens": 4}
        for path in ("/v1/completions", "/v1//completions", "/tokenize"):
            assert gateway.post(path, body).status in (401, 404)
        refused = gateway.post("/v1/completions", body)
        assert (refused.status, refused.error["code"]) == (401, "invalid_auth")
        assert "secret" not in str(refused.json) and "other" not in str(refused.json)
        assert gateway.post("/v1/completions", body, **{"infer-key": "other"}).status == 200


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (("everything", "key", "value"), "the groups are inference, embedding, model-repository"),
        (("health,health", "key", "value"), "the group health is given twice"),
        (("health", "a key", "value"), "must be printable ASCII without spaces"),
        (("health", "key", ""), "must be printable ASCII without spaces"),
    ],
)
def test_a_wrong_restriction_is_refused(option: tuple[str, str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        read_restrictions([option])


def test_the_command_names_a_wrong_option() -> None:
    for flags, problem in (
        (["--openai-restricted-api", "x", "k", "v"], "--openai-restricted-api: the groups are"),
        (["--triton-metrics", "http://x:1/metrics"], "--triton-metrics: must be host:port"),
    ):
        run = subprocess.run([*GATEWAY, *flags], capture_output=True, text=True, timeout=30)
        assert run.returncode == 2
        assert problem in run.stderr


@pytest.mark.server
def test_the_page_has_the_metrics_of_the_server(server: Server) -> None:
    metrics = server.running.metrics_url.removeprefix("http://").removesuffix("/metrics")
    flags = ["--triton", server.running.grpc_url, "--triton-metrics", metrics]
    with running_gateway(*flags, "--triton-metrics", "127.0.0.1:9") as gateway:
        page = gateway.get("/metrics").body.decode()
    names = {family.name for family in text_string_to_metric_families(page)}
    assert {"nv_cpu_utilization", "paged_num_requests_running", "paged_gateway_server_up"} <= names


def test_pages_of_several_servers_are_told_apart() -> None:
    page = (
        "# HELP a_total A\n# TYPE a_total counter\na_total 1\n"
        "# HELP b B\n# TYPE b histogram\n"
        'b_bucket{le="1",model="m"} 2\nb_bucket{le="+Inf",model="m"} 3\n'
        'b_sum{model="m"} 4.5\nb_count{model="m"} 3\n'
    )
    assert join_pages({}) == ""
    assert join_pages({"one:1": page}) == page
    joined = join_pages({"one:1": page, "two:2": page})
    families = {family.name: family for family in text_string_to_metric_families(joined)}
    assert set(families) == {"a", "b"}
    for family, count in (("a", 1), ("b", 4)):
        for server in ("one:1", "two:2"):
            samples = [s for s in families[family].samples if s.labels["server"] == server]
            assert len(samples) == count
    assert joined.count("# TYPE b histogram") == 1
