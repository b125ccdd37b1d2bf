"""A client that abuses a server: ``python abuser.py SHAPE SECONDS TRITON_HTTP GATEWAY``.

It runs in a separate process, so that its work is not measured as the server's. It has one
request open at a time, and prints how many it has sent and how they were answered.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator

from bad_constraints import CONSTRAINTS, Bad
from bad_constraints import GATEWAY as GATEWAY_FORMS
from bad_constraints import TRITON as TRITON_FORMS
from bad_constraints import Request as BadRequest
from hostile_schemas import hostile_schema

MODEL = "paged_llm"
MIB = 2**20
_NOTE_READ = 200  # bytes of a stream that are read before it is left
Request = tuple[str, bytes]  # path, body


def _generate(fields: dict[str, object]) -> Request:
    return f"/v2/models/{MODEL}/generate_stream", json.dumps(fields | {"stream": True}).encode()


def _complete(prompt: object, **fields: object) -> Request:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **fields}
    return "/v1/completions", json.dumps(body).encode()


def _chat(body: str) -> Request:
    return "/v1/chat/completions", body.encode()


def _constraints(form: Callable[[Bad], BadRequest | None]) -> list[Request]:
    """Constraints that must be refused."""
    requests = filter(None, map(form, CONSTRAINTS.values()))
    return [(request.path, json.dumps(request.body).encode()) for request in requests]


def _hostile_constraints() -> list[Request]:
    """Constraints that take too much time, each another one."""
    constraints = ({"json": hostile_schema(number)} for number in range(200))
    fields = {"text_input": "x", "max_tokens": 1}
    return [_generate(fields | {"structured_outputs": json.dumps(one)}) for one in constraints]


def _long_note(size: int) -> Request:
    """D3: a note that comes back with each token, of a stream that is hardly read."""
    fields = {"text_input": "What does", "max_tokens": 200, "ignore_eos": True}
    return _generate(fields | {"pass_through": "n" * size})


_WORDS = "The quick brown fox jumps over the lazy dog. "
_DENSE = "7;q)K3" * 650  # nearly as many tokens as characters, which is more than the model takes
_NAMES = {"role": "user", "content": "x"}

# Not a shape: a client that uses a core and sends nothing, to tell what that alone does.
CONTROL = "a busy core"
# Each shape: the door, and the requests that are sent in turn.
TRITON: dict[str, Callable[[], list[Request]]] = {
    "a long note, hardly read": lambda: [_long_note(4096), _long_note(8 * MIB)],
    "a long text": lambda: [_generate({"text_input": _WORDS * 900, "max_tokens": 1})],
    "bad constraints": lambda: _constraints(TRITON_FORMS["generate"]),
    "hostile constraints": _hostile_constraints,
    "a long name": lambda: [_generate({"text_input": "x", "y" * MIB: 1})],
}
GATEWAY: dict[str, Callable[[], list[Request]]] = {
    "256 long prompts": lambda: [
        _complete([f"{number} " + text for number in range(256)]) for text in (_DENSE, _WORDS * 700)
    ],
    "bad constraints in chats": lambda: _constraints(GATEWAY_FORMS["chat"]),
    "26 prompts of a length that is tokenized": lambda: [
        _complete([f"{number} " + _WORDS * 850 for number in range(26)])
    ],
    "nested empty lists": lambda: [
        _chat('{"messages": [' + "[],".join([""] * (size // 3)) + "[]]}")
        for size in (MIB - 64, 8 * MIB)
    ],
    "a name as long as the body": lambda: [
        _chat(f'{{"{"y" * size}": 1}}') for size in (MIB - 64, 8 * MIB)
    ],
    "messages with long unknown names": lambda: [
        _chat(json.dumps({"messages": [_NAMES | {"z" * size: 1}] * 4000})) for size in (200, 2000)
    ],
    "ids as long as the body": lambda: [
        _complete([7] * (size // 3)) for size in (MIB - 1024, 8 * MIB)
    ],
}


def main() -> None:
    """Send one shape of request for a number of seconds, one after the other."""
    shape, seconds, triton, gateway = sys.argv[1:]
    if shape == CONTROL:
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until:
            pass
        print("{}")
        return
    is_at_gateway = shape in GATEWAY
    requests = (GATEWAY if is_at_gateway else TRITON)[shape]()
    address = gateway if is_at_gateway else triton
    until = time.monotonic() + float(seconds)
    seen: Counter[str] = Counter()
    while time.monotonic() < until:
        for path, body in requests:
            seen[_send(address, path, body)] += 1
            if time.monotonic() > until:
                break
    print(json.dumps(seen))


def _send(address: str, path: str, body: bytes) -> str:
    with _connection(address) as connection:
        try:
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read(_NOTE_READ)
        except OSError as error:  # refused before the body was read
            return type(error).__name__
        return str(response.status)


@contextlib.contextmanager
def _connection(address: str) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


if __name__ == "__main__":
    main()
