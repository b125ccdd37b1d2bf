"""Whose requests they are: the account of each API key."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from gateways import MODEL, running_gateway
from metrics_page import read_metrics

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import start_server

pytestmark = pytest.mark.server
KEYS = "alice first, alice second, bob third, fourth, fifth"


@pytest.fixture(scope="module")
def guarded(server):
    with running_gateway("--triton", server.running.grpc_url, keys=KEYS) as gateway:
        yield gateway


def ask(gateway, key=None, **fields):
    body = {"model": MODEL, "prompt": "What does", "max_tokens": 1, **fields}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return gateway.post("/v1/completions", body, **headers)


def cached_tokens(response) -> int:
    assert response.status == 200, response.body
    return response.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_client_neither_names_its_tenant_nor_gets_before_others(guarded):
    for field, value in (("tenant", "bob"), ("tenant", ""), ("priority", -1)):
        response = ask(guarded, "first", **{field: value})
        assert (response.status, response.error["param"]) == (400, field)
    for priority in (0, 5):
        assert ask(guarded, "first", priority=priority).status == 200


def test_without_keys_the_client_says_all_that(gateway):
    assert ask(gateway, tenant="bob", priority=-1).status == 200


def test_a_salt_is_its_tenants_own(guarded):
    prompt = "A prompt that only this test has. " * 10
    asked = [
        cached_tokens(ask(guarded, key, prompt=prompt, cache_salt="same"))
        for key in ("first", "third", "fourth", "second", "third", "fourth")
    ]
    assert asked[:3] == [0, 0, 0]
    assert min(asked[3:]) > 16
    assert cached_tokens(ask(guarded, "first", prompt=prompt)) == 0


def test_without_a_salt_tenants_share_nothing_unless_the_operator_wants_it(server, guarded):
    """Or a tenant finds out, with a few guesses, what stands in a prompt of another."""
    prompt = "The PIN of the account that is talked about here is {0}, tell nobody. " * 4
    keys = ("first", "third", "fourth", "second", "first")  # the first two names are of one tenant
    asked = [cached_tokens(ask(guarded, key, prompt=prompt.format(4711))) for key in keys]
    assert asked[:3] == [0, 0, 0]
    assert min(asked[3:]) > 16
    share = "--share-prefix-cache"
    with running_gateway("--triton", server.running.grpc_url, share, keys=KEYS) as sharing:
        asked = [cached_tokens(ask(sharing, key, prompt=prompt.format(1234))) for key in keys]
        assert asked[0] == 0 and min(asked[1:]) > 16
        salted = {"prompt": prompt.format(1234), "cache_salt": "mine"}
        assert cached_tokens(ask(sharing, "first", **salted)) == 0
        assert cached_tokens(ask(sharing, "third", **salted)) == 0


@pytest.mark.soak
def test_who_asks_too_much_and_who_comes_too_late_are_told_when_to_come_back(tmp_path):
    """A rate that lets each tenant ask once, and room for one that runs and one that waits."""
    options = {"model": "demo", "max_num_seqs": 1, "max_waiting_requests": 1}
    options["max_tenant_request_rate"] = 0.1
    write_model_repository(tmp_path, MODEL, options, instances=1)
    with (
        start_server(tmp_path) as server,
        running_gateway("--triton", server.grpc_url, keys=KEYS) as gateway,
        ThreadPoolExecutor() as threads,
    ):
        refused = [answer for _ in range(4) if (answer := ask(gateway, "first")).status != 200][0]
        assert (refused.status, refused.error["code"]) == (429, "rate_limited")
        assert refused.error["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 10
        assert ask(gateway, "second").status == 429  # a key of the same tenant

        def long(key):
            return threads.submit(ask, gateway, key, max_tokens=1500, ignore_eos=True)

        running = long("third")
        wait_for(server, "num_requests_running")
        waiting = long("fourth")
        wait_for(server, "num_requests_waiting")
        late = ask(gateway, "fifth")
        assert (late.status, late.error["code"]) == (503, "queue_full")
        assert int(late.headers["retry-after"]) >= 1
        assert running.result().status == waiting.result().status == 200
        assert gateway.get("/health").status == 200


def wait_for(server, name):
    deadline = time.monotonic() + 10
    while not read_metrics(server.metrics_url)[name]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_request_has_its_own_time_limit(server, gateway):
    body = {"max_tokens": 1900, "ignore_eos": True, "timeout_s": 0.5}
    response = ask(gateway, **body)
    assert (response.status, response.error["code"]) == (504, "deadline")
    server.wait_for("kv_blocks_used", 0)
