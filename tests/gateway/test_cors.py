"""Web pages of other origins call the gateway from a browser, if the operator lets them."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
from dataclasses import fields

import pytest
from gateways import Gateway, running_gateway
from paged_client.gateway import GatewayOptions

from paged_backend.cli import gateway as gateway_command
from paged_backend.cli import main, serve
from paged_backend.cli.gateway_options import gateway_flags, gateway_values

pytestmark = pytest.mark.server
PAGE, OTHER = "https://chat.example.org", "https://evil.example.org"
BODY = {"prompt": "x", "max_tokens": 2}
ALLOWED = "Access-Control-Allow-Origin"


@pytest.fixture(scope="module")
def gateway_for_a_page(server):
    origins = ("--allowed-origins", f'["{PAGE}", "http://localhost:3000"]')
    with running_gateway("--triton", server.running.grpc_url, *origins, keys="secret") as gateway:
        yield gateway


def preflight(gateway: Gateway, origin: str, method: str = "POST", headers: str = ""):
    """What a browser asks before the request itself; it sends no key."""
    asked = {"Origin": origin, "Access-Control-Request-Method": method}
    if headers:
        asked["Access-Control-Request-Headers"] = headers
    return gateway.request("OPTIONS", "/v1/chat/completions", None, asked)


def test_a_preflight_needs_no_key(gateway_for_a_page):
    for origin in (PAGE, "http://localhost:3000"):
        answer = preflight(gateway_for_a_page, origin, headers="authorization,content-type")
        assert answer.status == 200
        headers = {name.lower(): value for name, value in answer.headers.items()}
        assert headers["access-control-allow-origin"] == origin
        assert "POST" in headers["access-control-allow-methods"]
        assert "authorization" in headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in headers
        assert "Origin" in headers["vary"] and headers["x-request-id"].startswith("req_")
    refused = preflight(gateway_for_a_page, OTHER)
    assert refused.status == 400
    assert not any(name.lower() == ALLOWED.lower() for name in refused.headers)
    plain = gateway_for_a_page.request("OPTIONS", "/v1/completions", None, {"Origin": PAGE})
    assert plain.status == 401  # not a preflight


def test_a_page_can_read_answers_and_errors(gateway_for_a_page):
    key = {"Authorization": "Bearer secret"}
    for path, body, headers, status in (
        ("/v1/completions", BODY, key, 200),
        ("/v1/completions", BODY | {"stream": True}, key, 200),
        ("/v1/completions", BODY, {}, 401),
        ("/v1/completions", {"prompt": 1}, key, 400),
        ("/v1/completions", b" " * 2**21, key, 413),
        ("/v1/completions", BODY | {"model": "x"}, key, 404),
        ("/nothing", BODY, key, 404),
        ("/v1/messages", {}, {}, 401),
    ):
        answer = gateway_for_a_page.post(path, body, Origin=PAGE, **headers)
        assert answer.status == status
        given = {name.lower(): value for name, value in answer.headers.items()}
        assert given["access-control-allow-origin"] == PAGE
        assert "x-request-id" in given["access-control-expose-headers"]
        other = gateway_for_a_page.post(path, body, Origin=OTHER, **headers)
        assert other.status == status and ALLOWED.lower() not in map(str.lower, other.headers)


def ask_wrongly(gateway: Gateway, request: bytes) -> http.client.HTTPResponse:
    """Send bytes that are not a valid request, and read the answer."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection:
        connection.sendall(request)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        answer.error = json.loads(answer.read())
        return answer


MESSAGES, OTHER_PATH = b"POST /v1/messages?beta=true HTTP/1.1\r\n", b"POST /v1 HTTP/1.1\r\n"
HOST, KEY = b"Host: x\r\n", b"x-api-key: secret\r\n"
TWO_LENGTHS = b"Content-Length: 1\r\ncontent-length: 1\r\n\r\n"
REFUSED = {
    "two lengths": (HOST + TWO_LENGTHS, 400),
    "too many headers": (HOST + b"a: b\r\n" * 101 + b"\r\n", 431),
    "a head without an end": (HOST + b"a: " + b"b" * 2**16, 431),
    "no host": (b"\r\n", 400),
    "a chunk of no size": (HOST + KEY + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_the_application_can_be_read_like_other_errors(
    gateway_for_a_page, name
):
    rest, status = REFUSED[name]
    for line, page in ((MESSAGES, PAGE), (OTHER_PATH, PAGE), (MESSAGES, OTHER)):
        answer = ask_wrongly(gateway_for_a_page, line + f"ORIGIN: {page}\r\n".encode() + rest)
        assert answer.status == status
        assert answer.headers[ALLOWED] == (PAGE if page == PAGE else None)
        assert answer.error.get("type") == ("error" if line == MESSAGES else None)
        assert answer.error["error"]["message"]


def test_no_page_is_allowed_unless_the_operator_says_so(gateway):
    assert preflight(gateway, PAGE).status == 405
    answer = gateway.post("/v1/completions", BODY, Origin=PAGE)
    assert answer.status == 200
    assert not any(name.lower().startswith("access-control") for name in answer.headers)


def test_all_origins_with_few_methods_and_headers():
    flags = ("--allowed-origins", '["*"]', "--allowed-methods", '["GET"]')
    flags += ("--allowed-headers", '["X-One"]', "--allow-credentials")
    with running_gateway("--triton", "127.0.0.1:1", *flags) as gateway:
        assert preflight(gateway, OTHER, "GET", "x-one").status == 200
        assert preflight(gateway, OTHER, "POST").status == 400
        refused = preflight(gateway, OTHER, "GET", "x-two")
        assert refused.status == 400
        answer = gateway.get("/v1/models", Origin=OTHER)
        given = {name.lower(): value for name, value in answer.headers.items()}
        assert answer.status == 200 and given["access-control-allow-credentials"] == "true"
        for page in (f"Origin: {OTHER}\r\n".encode(), b""):
            early = ask_wrongly(gateway, OTHER_PATH + page + TWO_LENGTHS)
            assert early.headers[ALLOWED] == (OTHER if page else None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--allowed-origins", "*"], "--allowed-origins: must be a JSON list of origins"),
        (["--allowed-origins", '"*"'], "--allowed-origins: must be a JSON list of origins"),
        (["--allowed-origins", "[1]"], "--allowed-origins: must be a JSON list of origins"),
        (["--allowed-origins", '["a.org"]'], "--allowed-origins: must be a JSON list of origins"),
        (["--allowed-origins", '["http://a/"]'], "without a path"),
        (["--allowed-methods", '["G ET"]'], "--allowed-methods: must be a JSON list of names"),
        (["--allowed-headers", "{}"], "--allowed-headers: must be a JSON list of names"),
        (["--served-model-name", "a", "a"], "--served-model-name: the name a is given twice"),
        (["--served-model-name", "a=b/c"], "--served-model-name: must be NAME or NAME=MODEL"),
        (["--max-connections", "0"], "--max-connections: must be at least 1, got 0"),
    ],
)
def test_wrong_values_are_refused_by_name(capsys, flags, message):
    assert main(["gateway", "--port", "0", *flags]) != 0
    assert message in capsys.readouterr().err
    if "--served-model-name" not in flags:
        assert main(["serve", "--openai-port", "0", *flags]) != 0
        assert message in capsys.readouterr().err
        assert main(["serve", *flags]) != 0
        assert f"{flags[0]}: needs --openai-port" in capsys.readouterr().err


def parsed(command: str, *flags: str) -> argparse.Namespace:
    """The arguments of a command."""
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers()
    for module in (serve, gateway_command):
        module.add_parser(subparsers)
    return parser.parse_args([command, *flags])


def test_serve_passes_the_gateways_flags_on(tmp_path):
    """All flags, so that a new one is not forgotten."""
    keys = tmp_path / "keys"
    keys.write_text("alice sk-one\n")
    loaders = tmp_path / "loaders"
    loaders.write_text("admin sk-two\n")
    flags = (
        *("--api-key-file", str(keys), "--request-timeout", "2.5", "--share-prefix-cache"),
        *("--runtime-lora-keys", str(loaders)),
        *("--openai-restricted-api", "inference", "X-One", "1"),
        *("--openai-restricted-api", "metrics,health", "X-Two", "-2"),
        *("--max-body-bytes", "2048", "--max-stream-backlog", "7"),
        *("--max-connections", "9", "--max-connections-per-address", "3"),
        *("--allowed-origins", f'["{PAGE}"]', "--allowed-methods", '["GET"]'),
        *("--allowed-headers", '["X-One"]', "--allow-credentials"),
        *("--trust-routing-headers", "--objective-priorities", '{"chat": -1}'),
    )
    passed_on = parsed("gateway", *gateway_flags(parsed("serve", *flags)))
    values = gateway_values(passed_on)
    assert values == gateway_values(parsed("gateway", *flags))
    names = {spec.name for spec in fields(GatewayOptions)}
    own = {"triton", "triton_metrics", "drain_timeout_s", "served_names"}
    assert values.keys() == names - own
    changed = GatewayOptions(**values)
    assert all(getattr(changed, name) != getattr(GatewayOptions(), name) for name in values)
    assert gateway_flags(parsed("serve")) == []
