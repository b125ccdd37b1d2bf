"""Headers of a router in front of the gateway count if the operator trusts it, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from gateways import Gateway, running_gateway
from paged_client.gateway import read_objectives
from paged_client.gateway.backend_pool import _server_at
from paged_client.gateway.errors import ApiError
from paged_client.gateway.options import GatewayOptions
from paged_client.gateway.routing_headers import (
    FAIRNESS_ID,
    KV_SOURCE,
    OBJECTIVE,
    SESSION_ID,
    TPOT_MS,
    TTFT_MS,
    routed_fields,
    routing_hints,
)
from paged_client.routing import PrefixRouter, RoutingHints, session_hash
from starlette.requests import Request

TRUSTING = GatewayOptions(trust_routing_headers=True, objective_priorities={"chat": -3, "batch": 4})
ALL = {
    FAIRNESS_ID: "team",
    OBJECTIVE: "batch",
    TTFT_MS: "500",
    TPOT_MS: "20.5",
    SESSION_ID: "s1",
    KV_SOURCE: "10.0.0.7:8000",
}


def request_with(
    headers: dict[str, str] | list[tuple[str, str]], options: GatewayOptions = TRUSTING
) -> Request:
    pairs = headers.items() if isinstance(headers, dict) else headers
    scope = {
        "type": "http",
        "headers": [(name.encode(), value.encode()) for name, value in pairs],
        "app": SimpleNamespace(state=SimpleNamespace(options=options)),
    }
    return Request(scope)


def test_the_headers_of_a_trusted_router_count() -> None:
    request = request_with(ALL)
    assert routed_fields(request, {"max_tokens": 11}) == {
        "tenant": "team",
        "priority": 4,
        "timeout_s": pytest.approx(0.5 + 10 * 0.0205),
    }
    assert routing_hints(request) == RoutingHints("s1", "10.0.0.7:8000")


def test_other_headers_are_not_read() -> None:
    request = request_with(ALL | {TTFT_MS: "soon"}, GatewayOptions())
    assert routed_fields(request, {"max_tokens": 11}) == {}
    assert routing_hints(request) == RoutingHints()


@pytest.mark.parametrize(
    ("headers", "params"),
    [
        ({}, {"max_tokens": 5}),
        ({FAIRNESS_ID: ""}, {"max_tokens": 5}),
        ({OBJECTIVE: "unknown"}, {"max_tokens": 5}),
        ({TTFT_MS: "500"}, {"max_tokens": 5}),
        ({TPOT_MS: "500"}, {"max_tokens": 5}),
        ({TTFT_MS: "500", TPOT_MS: "20"}, {"max_tokens": None}),
        ({TTFT_MS: "500", TPOT_MS: "20"}, {}),
    ],
)
def test_headers_that_say_nothing_change_nothing(
    headers: dict[str, str], params: dict[str, Any]
) -> None:
    assert routed_fields(request_with(headers), params) == {}


def test_the_shorter_time_counts() -> None:
    headers = {TTFT_MS: "500", TPOT_MS: "500"}
    for own, shorter in ((0.1, 0.1), (60, 5)):
        fields = routed_fields(request_with(headers), {"max_tokens": 10, "timeout_s": own})
        assert fields == {"timeout_s": shorter}
    endless = {TTFT_MS: "1e300", TPOT_MS: "1e300"}
    assert routed_fields(request_with(endless), {"max_tokens": 10}) == {"timeout_s": 86400}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (TTFT_MS, "soon"),
        (TTFT_MS, "-1"),
        (TPOT_MS, "0"),
        (TPOT_MS, "nan"),
        (TTFT_MS, "inf"),
        (FAIRNESS_ID, "a" * 257),
    ],
)
def test_a_header_that_lies_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ApiError, match=f"^{name}: "):
        routed_fields(request_with({name: value}), {"max_tokens": 5})


@pytest.mark.parametrize("name", [FAIRNESS_ID, OBJECTIVE, TTFT_MS])
def test_a_header_that_is_given_twice_is_refused(name: str) -> None:
    with pytest.raises(ApiError, match=f"^{name}: is given twice"):
        routed_fields(request_with([(name, "1"), (name, "2")]), {"max_tokens": 5})
    with pytest.raises(ApiError, match=f"^{SESSION_ID}: is given twice"):
        routing_hints(request_with([(SESSION_ID, "1"), (SESSION_ID, "1")]))


def test_objectives_are_integers_by_name() -> None:
    assert read_objectives('{"chat": -3, "batch": 4}') == {"chat": -3, "batch": 4}
    for text in ("", "[]", '{"a": "b"}', '{"a": true}', '{"a": 1.5}', '{"a": 99999999999}'):
        with pytest.raises(ValueError, match="must be a JSON object of integers"):
            read_objectives(text)


def test_a_session_goes_where_it_was_although_another_server_has_the_prefix() -> None:
    router = PrefixRouter()
    loads = {"one": 0, "two": 0}
    session = session_hash("model", "s1")
    first = router.choose([b"a", session], loads).server
    (other,) = loads.keys() - {first}
    router.choose([b"b"], {other: 0})
    assert router.choose([b"b", session], loads) == (first, True)
    assert router.choose([b"b", session_hash("model", "s2")], loads).by_prefix


def test_the_server_with_the_blocks_is_chosen_unless_it_is_much_busier() -> None:
    router = PrefixRouter()
    router.choose([b"a"], {"one": 0})
    assert router.choose([b"a"], {"one": 0, "two": 3}, "two") == ("two", True)
    assert router.choose([b"c"], {"one": 0, "two": 90}, "two") == ("one", False)
    assert router.choose([b"d"], {"one": 0}, "gone") == ("one", False)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("10.0.0.7:8001", "10.0.0.7:8001"),
        ("10.0.0.7:8000", "10.0.0.7:8001"),  # its HTTP port
        ("10.0.0.8:8000", None),  # there are two
        ("10.0.0.8:8003", "10.0.0.8:8003"),
        ("10.0.0.9:8001", None),
        ("", None),
        ("nonsense", None),
    ],
)
def test_a_source_is_a_server_of_the_gateway_or_nothing(source: str, found: str | None) -> None:
    assert _server_at(source, ("10.0.0.7:8001", "10.0.0.8:8002", "10.0.0.8:8003")) == found


@pytest.mark.server
def test_objectives_end_an_answer_that_misses_them(server: Any, gateway: Gateway) -> None:
    body = {"prompt": "def", "max_tokens": 1500, "ignore_eos": True}
    late = {TTFT_MS: "1", TPOT_MS: "0.01", SESSION_ID: "s"}
    flags = ("--trust-routing-headers", "--objective-priorities", '{"batch": 5}')
    with running_gateway("--triton", server.running.grpc_url, *flags) as trusting:
        response = trusting.post("/v1/completions", body, **late)
        assert (response.status, response.error["code"]) == (504, "deadline")
        response = trusting.post("/v1/completions", body, **{TTFT_MS: "soon"})
        assert (response.status, response.error["param"]) == (400, TTFT_MS)
        good = {FAIRNESS_ID: "team", OBJECTIVE: "batch"} | {TTFT_MS: "60000", TPOT_MS: "60"}
        assert trusting.post("/v1/completions", body | {"max_tokens": 2}, **good).status == 200
    assert gateway.post("/v1/completions", body, **late).status == 200
