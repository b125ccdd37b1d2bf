"""Who is let in, and how much they may send."""

from __future__ import annotations

import json
import re
import socket
import time
from importlib.metadata import version

import openai
import pytest
from gateways import MODEL, Gateway, running_gateway
from paged_client.gateway import KEYS_VARIABLE, ApiKey, read_keys

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 1}
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("GET", f"/v1/models/{MODEL}"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
    ("GET", "/"),
]


@pytest.fixture(scope="module")
def guarded(server):
    with running_gateway("--triton", server.running.grpc_url, keys="first, second") as gateway:
        yield gateway


def raw(gateway: Gateway, *parts: bytes) -> bytes:
    """What comes back for bytes as they are."""
    with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
            while data := connection.recv(65536):
                received += data
        except ConnectionError:
            pass  # refused before all was sent
        return received


@pytest.mark.server
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_answers_without_a_key(guarded, method, path):
    for headers in (
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer firs"},
        {"Authorization": "Bearer first, second"},
        {"Authorization": "Bearer firstx"},
        {"Authorization": "Basic first"},
        {"Authorization": "first"},
        {"Authorization": "Bearer \u00e9"},
        {"X-Api-Key": "wrong"},
        {"X-Api-Key": "Bearer first"},
        {"Authorization": "Bearer wrong", "X-Api-Key": "first"},
    ):
        response = guarded.request(method, path, b"{}", headers)
        assert response.status == 401, headers
        assert response.headers["www-authenticate"] == "Bearer"
        if path.startswith("/v1/messages"):
            assert response.error["type"] == "authentication_error"
        else:
            assert response.error["code"] == "invalid_api_key"


@pytest.mark.server
@pytest.mark.parametrize("key", ["first", "second"])
def test_each_key_opens_every_route(guarded, key):
    for method, path in ROUTES:
        for given in (
            {"Authorization": f"Bearer {key}"},
            {"Authorization": f"bearer {key}"},
            {"X-Api-Key": key},
            {"Authorization": f"Bearer {key}", "X-Api-Key": "of something else"},
        ):
            headers = {**given, "Content-Type": "application/json"}
            response = guarded.request(method, path, json.dumps(BODY).encode(), headers)
            assert response.status != 401


@pytest.mark.server
@pytest.mark.parametrize(
    "path",
    [
        *("/health/", "//health", "/%68ealth", "/health%2f", "/Health", "/health;x", "/./health"),
        *("/health/../v1/models", "/health%00", "/v1/models?/health", "/v1/models#/health"),
        *("http://x/health", "/health\\", "*", "/health%3f"),
    ],
)
def test_only_one_spelling_is_free(guarded, path):
    answer = raw(guarded, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith((b"HTTP/1.1 401 ", b"HTTP/1.1 400 ")), answer


@pytest.mark.server
def test_health_needs_no_key(guarded):
    assert guarded.get("/health").status == 200
    assert guarded.get("/health?x=1").status == 200
    assert guarded.get("/health/live").status == guarded.get("/health/ready").status == 200
    assert guarded.get("/health/live/").status == guarded.get("/version").status == 401


@pytest.mark.server
def test_the_documentation_needs_no_key_and_no_other_host(guarded):
    page = guarded.get("/docs")
    assert page.status == 200
    loaded = re.findall(r'(?:src|href)="([^"]*)"', page.body.decode())
    assert len(loaded) == 3
    for path in loaded:
        assert path.startswith("/static-offline-docs/")
        assert guarded.get(path).status == 200
    assert guarded.get("/static-offline-docs/redoc.standalone.js").status == 401
    document = guarded.get("/openapi.json").json
    assert document["security"] == [{"key": []}]
    assert document["components"]["securitySchemes"] == {
        "key": {"type": "http", "scheme": "bearer"}
    }


@pytest.mark.server
def test_a_request_has_a_name(gateway):
    own = gateway.get("/version", **{"X-Request-Id": "job-7"})
    assert (own.headers["x-request-id"], own.headers["request-id"]) == ("job-7", "job-7")
    assert own.json == {"version": version("paged-backend")}
    for given in ("", "a b", "x" * 129):
        made = gateway.get("/health/live", **{"X-Request-Id": given}).headers["x-request-id"]
        assert made.startswith("req_")
    refused = gateway.post("/v1/completions", b"{")
    assert refused.status == 400 and refused.headers["x-request-id"].startswith("req_")


@pytest.mark.server
def test_two_authorizations_are_none(guarded):
    head = "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    key = "Authorization: Bearer first\r\n"
    assert raw(guarded, (head + key + "\r\n").encode()).startswith(b"HTTP/1.1 200 ")
    assert raw(guarded, (head + key + key + "\r\n").encode()).startswith(b"HTTP/1.1 401 ")


@pytest.mark.server
def test_an_upgrade_is_no_way_in(guarded):
    head = "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    head += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    assert raw(guarded, head.encode()).startswith(b"HTTP/1.1 401 ")


@pytest.mark.server
def test_the_sdk_knows_its_key_is_wrong(guarded):
    with guarded.sdk("wrong") as api, pytest.raises(openai.AuthenticationError):
        api.models.list()
    with guarded.sdk("second") as api:
        assert [model.id for model in api.models.list()] == [MODEL]


@pytest.mark.server
def test_a_body_over_the_limit_is_refused(gateway):
    large = gateway.post("/v1/completions", b" " * 2**24)  # sent to its end
    assert (large.status, large.error["code"]) == (413, "content_too_large")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    announced = raw(gateway, head + b"Content-Length: 100000000000\r\n\r\n")
    assert announced.startswith(b"HTTP/1.1 413 ")
    assert b"a body has at most 1048576 bytes" in announced
    chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
    chunked = raw(gateway, head + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 80)
    assert chunked == b"" or chunked.startswith(b"HTTP/1.1 413 ")
    fits = b'{"prompt": "x", "max_tokens": 1' + b" " * (2**20 - 40) + b"}"
    assert gateway.post("/v1/completions", fits).status == 200


@pytest.mark.server
def test_headers_are_limited_in_number_and_size(gateway):
    def get(lines):
        head = ["GET /v1/models HTTP/1.1", "Host: x", "Connection: close", *lines, "", ""]
        return raw(gateway, "\r\n".join(head).encode())

    assert get(f"X-{n}: y" for n in range(50)).startswith(b"HTTP/1.1 200 ")
    assert get(f"X-{n}: y" for n in range(200)).startswith(b"HTTP/1.1 431 ")
    assert get([f"X: {'y' * 20_000}"]).startswith(b"HTTP/1.1 200 ")
    too_large = (b"HTTP/1.1 431 ", b"HTTP/1.1 400 ")  # ours, or the HTTP parser's
    assert get([f"X: {'y' * 40_000}"]).startswith(too_large)
    assert get([f"X: {'y' * 300_000}"])[:13] in (b"", *too_large)


@pytest.mark.server
def test_a_body_that_does_not_come_holds_up_nobody(gateway):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", gateway.port)) as waiting:
        waiting.sendall(head)
        started = time.monotonic()
        assert gateway.post("/v1/completions", BODY).status == 200
        assert time.monotonic() - started < 5


@pytest.mark.server
def test_a_connection_is_used_again_after_an_error(gateway):
    with gateway.connection() as connection:
        for _ in range(3):
            for body, status in ((b"{}", 400), (json.dumps(BODY).encode(), 200)):
                connection.request(
                    "POST", "/v1/completions", body, {"Content-Type": "application/json"}
                )
                response = connection.getresponse()
                response.read()
                assert response.status == status


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# of the team\nsk-one\n\n  sk-two  \n")
    monkeypatch.delenv(KEYS_VARIABLE, raising=False)
    assert read_keys(None) == ()
    monkeypatch.setenv(KEYS_VARIABLE, "a,b ,")
    assert [key.key for key in read_keys(None)] == ["a", "b"]
    assert [key.key for key in read_keys(file)] == ["sk-one", "sk-two"]


def test_keys_may_have_a_tenants_name(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("alice sk-one\nalice  sk-two\nsk-three\n")
    one, two, three = read_keys(file)
    assert (one, two) == (ApiKey("sk-one", "alice"), ApiKey("sk-two", "alice"))
    assert three.key == "sk-three" and three.tenant.startswith("key-")
    assert not {"sk", "three"} & set(three.tenant.split("-")[1:])
    monkeypatch.setenv(KEYS_VARIABLE, "alice sk-one,sk-three")
    assert read_keys(None) == (one, three)


@pytest.mark.parametrize(
    "content",
    [
        *("", "# only this\n", "now three words\n", "\u00e9\n", "x" * 2000, "sk-one #mine\n"),
        *("a sk-one\nb sk-one\n", "a@b sk-one\n", f"{'x' * 65} sk-one\n"),
    ],
)
def test_keys_that_open_nothing_let_nobody_start(tmp_path, monkeypatch, content):
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(ValueError, match="API key"):
        read_keys(file)
    with pytest.raises(ValueError, match="cannot read"):
        read_keys(tmp_path / "missing")
    monkeypatch.setenv(KEYS_VARIABLE, "")
    with pytest.raises(ValueError, match=KEYS_VARIABLE):
        read_keys(None)
