"""Bodies of hostile shapes: what they cost, what is said about them, and what the log keeps."""

from __future__ import annotations

import asyncio
import json

import psutil
import pytest
from gateways import MODEL, Gateway, running_gateway
from hypothesis import given
from hypothesis import strategies as st
from paged_client.gateway import bodies
from paged_client.gateway.errors import ApiError
from paged_client.gateway.schema.completions import CompletionRequest
from starlette.requests import Request

SIZE = 2**20 - 64  # bytes of a body, just below the default limit
NOBODY = "127.0.0.1:1"
SECRET = "the-secret-of-this-prompt"


def filled(begin: str, unit: str, end: str) -> bytes:
    """``unit`` as often as it fits between the others."""
    return (begin + unit * ((SIZE - len(begin) - len(end)) // len(unit)) + end).encode()


def long_names() -> bytes:
    name = "n" * (SIZE // 4000 - 50)
    message = {"role": "user", "content": "x", name: 1}
    return json.dumps({"messages": [message] * 4000}).encode()


TEXT = filled('{"prompt": "x", "temprature": "', "abcdefgh ", '"}')
SHAPES = {
    "lists": ("/v1/completions", filled('{"prompt": [', "[],", "[]]}")),
    "lists in an object": ("/v1/completions", filled('{"logit_bias": [', "[[]],", "[]]}")),
    "a long name": ("/v1/completions", filled('{"prompt": "x", "', "temperatur", '": 1}')),
    "messages with long names": ("/v1/chat/completions", long_names()),
    "wrong ids": ("/detokenize", filled('{"tokens": [', "-1,", "-1]}")),
    "wrong stop strings": ("/v1/completions", filled('{"prompt": "x", "stop": [', "1,", "1]}")),
    "short names": ("/v1/completions", filled("{", '"n": 1,', '"n": 1}')),
}


@pytest.fixture(scope="module")
def alone():
    """A gateway without a server: what is refused never gets that far."""
    with running_gateway("--triton", NOBODY) as gateway:
        yield gateway


def processor_s(gateway: Gateway, path: str, body: bytes) -> float:
    """Processor time that the gateway takes for ten such requests."""
    process = psutil.Process(gateway.process.pid)
    before = process.cpu_times()
    for _ in range(10):
        # Unknown fields of messages are ignored, and there is no server for what is left.
        assert gateway.post(path, body).status in (400, 503)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


@pytest.mark.server
def test_no_refusal_costs_much_more_than_that_of_as_much_text(alone):
    text = processor_s(alone, "/v1/completions", TEXT)
    costs = {name: processor_s(alone, *shape) for name, shape in SHAPES.items()}
    assert {name: cost for name, cost in costs.items() if cost > 8 * text} == {}, text


@pytest.mark.server
@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        (*SHAPES["lists"], "a body has at most 16384 lists and objects"),
        (*SHAPES["short names"], "a body has at most 65536 strings"),
        (*SHAPES["a long name"], "temperaturt...: is not known"),
        (*SHAPES["wrong ids"], "tokens: must be a list of at most 1048576 integers from 0 to"),
        ("/v1/completions", b'{"prompt": "x", "logit_bias": {"a": 1}}', "logit_bias.a: must match"),
        (
            "/v1/completions",
            json.dumps({"prompt": "x", "logit_bias": {str(n): 1 for n in range(1025)}}).encode(),
            "logit_bias: must have at most 1024 fields",
        ),
        (
            "/v1/completions",
            json.dumps({"prompt": "x", "allowed_token_ids": [1] * (2**18 + 1)}).encode(),
            "allowed_token_ids: must be a list of at most 262144 integers",
        ),
    ],
)
def test_what_is_too_much_is_said_in_short(alone, path, body, problem):
    response = alone.post(path, body)
    assert response.status == 400
    assert problem in response.error["message"]
    assert len(response.body) < 400


@pytest.mark.server
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        *((body, "must be a JSON object") for body in (b"null", b"1", b"true", b"1.5", b'"x"')),
        *((body, "must be a JSON object") for body in (b"[]", b"[1]", b"")),
        (b" ", "the body is not valid JSON: EOF"),
        (b'{"\\ud800": 1}', "the body is not valid JSON: "),
        (b'{"\\ud800": 1, "prompt": "%b"}' % SECRET.encode(), "the body is not valid JSON: "),
        (b'{"prompt": "%b\\udc00"}' % SECRET.encode(), "the body is not valid JSON: "),
        (b'{"prompt": "%b\xff"}' % SECRET.encode(), "the body is not valid JSON: "),
        (b'{"prompt": "%b", "prompt": "x"}' % SECRET.encode(), "two fields of the same name"),
        (b'{"prompt": "x", "stream_options": {"a": 1, "a": 1}}', "two fields of the same name"),
        (b'{"prompt": "x", "a\xc3\xa9\\n\\u0000": 1}', "a\\xe9\\n\\x00: is not known"),
        (b'{"prompt": "x", "model": "\xc3\xa9"}', "model: 'x' is not known"),
    ],
)
def test_every_json_text_gets_a_clear_answer_and_leaves_no_trace(log, body, problem):
    gateway, file = log
    before = file.read_text()
    response = gateway.post("/v1/completions", body)
    if b"model" in body:
        assert response.status == 503  # there is no server that could know it
    else:
        assert response.status == 400
        assert problem in response.error["message"]
    assert response.body.isascii()
    assert SECRET not in response.body.decode()
    assert file.read_text() == before


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A gateway and what it writes."""
    file = tmp_path_factory.mktemp("gateway") / "log"
    with running_gateway("--triton", NOBODY, log=file) as gateway:
        yield gateway, file


@pytest.mark.server
def test_a_fault_is_logged_without_its_text(server, tmp_path):
    """Its exception holds what the gateway was working on, which is a prompt or an answer."""
    before = """
from paged_client.gateway.options import GatewayOptions
from paged_client.gateway.schema.completions import CompletionRequest
def engine_fields(self):
    raise ValueError(self.prompt)
CompletionRequest.engine_fields = engine_fields
"""
    file = tmp_path / "log"
    with running_gateway("--triton", server.running.grpc_url, before=before, log=file) as gateway:
        response = gateway.post("/v1/completions", {"model": MODEL, "prompt": SECRET})
        assert (response.status, response.error["type"]) == (500, "server_error")
        assert gateway.get("/health").status == 200
    written = file.read_text()
    assert "internal error: ValueError at <string>:" in written
    assert SECRET not in written and "Traceback" not in written


@pytest.mark.server
def test_brackets_and_quotes_in_a_prompt_are_text(gateway):
    text = 'a[i]["k"] = {"x": [1, 2], "y": "\\"}' * 100
    body = {"model": MODEL, "prompt": "\\" + '[{"' * 30_000 + text}
    assert "has 9" in gateway.post("/v1/completions", body).error["message"]  # characters
    body["prompt"] = text[:1000]
    assert gateway.post("/v1/completions", body | {"max_tokens": 1}).status == 200


Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('\\"[]{}:,ax\u00e9', max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text('\\"[:', max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text('\\"[:a', max_size=4), Json), st.integers(1, 7), st.booleans())
def test_parts_are_counted_outside_of_strings_only(body, piece, ascii_only):
    """However the text is cut into pieces."""
    content = json.dumps(body, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_PIECE_BYTES", piece)
        assert bodies.parse(content) == body


def test_a_large_body_is_read_beside_the_event_loop():
    """While the loop goes on; more of them than may wait are refused."""

    def request(content: bytes) -> Request:
        async def receive():
            return {"type": "http.request", "body": content, "more_body": False}

        headers = [(b"content-type", b"application/json")]
        return Request({"type": "http", "headers": headers}, receive)

    async def scenario():
        reader = bodies.BodyReader()
        large = json.dumps({"prompt": "x" * bodies.SMALL_BYTES}).encode()
        readings = [
            asyncio.create_task(reader.read(request(large), CompletionRequest))
            for _ in range(bodies.MAX_WAITING_OF_ONE + 1)
        ]
        small = await reader.read(request(b'{"prompt": "x"}'), CompletionRequest)
        assert small.prompt == ["x"]
        *read, refused = await asyncio.gather(*readings, return_exceptions=True)
        assert {len(body.prompt[0]) for body in read} == {bodies.SMALL_BYTES}
        assert isinstance(refused, ApiError) and refused.status == 503
        assert (await reader.read(request(large), CompletionRequest)).prompt  # there is room again
        reader.close()

    asyncio.run(scenario())


@pytest.mark.server
def test_the_documentation_has_every_field_of_every_body(alone):
    document = alone.get("/openapi.json").json
    schemas = document["components"]["schemas"]
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        body = document["paths"][path]["post"]["requestBody"]
        reference = body["content"]["application/json"]["schema"]["$ref"]
        schema = schemas[reference.removeprefix("#/components/schemas/")]
        assert {"/detokenize": "tokens"}.get(path, "add_special_tokens") in schema["properties"]
    references = set(json.dumps(document).split('"#/components/schemas/')[1:])
    assert {reference.partition('"')[0] for reference in references} <= set(schemas)
