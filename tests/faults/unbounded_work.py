"""Hostile requests, which cause far more work than their size shows, and honest ones to compare.

``python unbounded_work.py SHAPE KIND SECONDS REQUESTS TOKENS TRITON_HTTP GATEWAY KEY`` sends the
requests of a shape in a separate process, so that its own work is not measured as the server's.
Hostile requests follow each other as fast as they are answered. Honest ones have the same form, and
as many of them, with as many tokens, are spread evenly over the time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

HOSTILE, HONEST = "hostile", "honest"
_QUESTION = "What does os.path.join do?"
_WORDS = "The quick brown fox jumps over the lazy dog. "
_ANSWER_S = 120.0


@dataclass(frozen=True)
class Server:
    """The addresses of a server, and a key of its gateway."""

    triton: str
    gateway: str
    key: str


@dataclass(frozen=True)
class Request:
    """One HTTP request, and the size of the pieces in which its body is sent; 0: in one."""

    address: str
    path: str
    body: bytes
    key: str = ""
    chunk: int = 0

    def head(self) -> bytes:
        """Return the request line and the headers; nothing without a path."""
        if not self.path:
            return b""
        length = "Transfer-Encoding: chunked" if self.chunk else f"Content-Length: {len(self.body)}"
        authorization = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return (
            f"POST {self.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"{authorization}{length}\r\n\r\n"
        ).encode()

    def pieces(self) -> Iterator[bytes]:
        """Return the body as it is sent."""
        if not self.chunk:
            yield self.body
            return
        for begin in range(0, len(self.body), self.chunk):
            piece = self.body[begin : begin + self.chunk]
            yield b"%x\r\n%s\r\n" % (len(piece), piece)
        yield b"0\r\n\r\n"


@dataclass(frozen=True)
class Shape:
    """One kind of abuse.

    Attributes:
        num_open: requests that are open at once.
        hostile: makes the request with a number.
        honest: makes a request of the same form that generates so many tokens per completion.
        n: completions of each request.
        num_at_once: honest requests that are sent at once.
    """

    num_open: int
    hostile: Callable[[Server, int], Request]
    honest: Callable[[Server, int, int], Request]
    n: int = 1
    num_at_once: int = 1


def _generate(server: Server, **fields: object) -> Request:
    body = {"text_input": _QUESTION, "temperature": 1.0, **fields}
    return Request(server.triton, "/v2/models/paged_llm/generate", json.dumps(body).encode())


def _chat(server: Server, chunk: int = 0, key: str | None = None, **fields: object) -> Request:
    body = {"messages": [{"role": "user", "content": _QUESTION}], **fields}
    key = server.key if key is None else key
    content = json.dumps(body).encode()
    return Request(server.gateway, "/v1/chat/completions", content, key, chunk)


# --- ambiguous grammars: each mask takes seconds --------------------------------------------------

_AMBIGUOUS = 'start: s\ns: s s | s s s | s s s s | "a" | "b" | ""'


def _ambiguous(server: Server, number: int, n: int) -> Request:
    constraint = json.dumps({"grammar": f"{_AMBIGUOUS} | {json.dumps(str(number))}"})
    tenant = f"tenant-{number % 16}"
    return _generate(server, n=n, tenant=tenant, max_tokens=1000, structured_outputs=constraint)


def _unconstrained(server: Server, number: int, num_tokens: int, n: int) -> Request:
    tenant = f"tenant-{number % 16}"
    return _generate(server, n=n, tenant=tenant, max_tokens=num_tokens, ignore_eos=True)


# --- white space before a tool call ---------------------------------------------------------------

_TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


def _spaces(server: Server, number: int) -> Request:
    constraint = {"regex": f" {{1800}}{number}"}
    return _chat(server, n=8, max_tokens=1900, tools=[_TOOL], structured_outputs=constraint)


def _plain_chat(server: Server, number: int, num_tokens: int) -> Request:
    return _chat(server, n=8, max_tokens=num_tokens, ignore_eos=True)


# --- bodies in pieces of one byte -----------------------------------------------------------------


def _long_chat(server: Server, size: int, chunk: int, key: str | None) -> Request:
    note = "x" * size  # an unknown field, which is refused after the body was read
    return _chat(server, chunk, key, max_tokens=1, unknown=note)


# --- schemas that take all of their time ----------------------------------------------------------


def _hostile_schema(server: Server, number: int) -> Request:
    patterns = [{"type": "string", "pattern": f"a{{{k}}}{number}"} for k in range(1, 60)]
    return _with_schema(server, {"allOf": patterns}, 1)


def _honest_schema(server: Server, number: int, num_tokens: int) -> Request:
    schema = {"type": "object", "properties": {f"a{number}": {"type": "string"}}}
    return _with_schema(server, schema, num_tokens)


def _with_schema(server: Server, schema: object, num_tokens: int) -> Request:
    json_schema = {"name": "answer", "schema": schema}
    response_format = {"type": "json_schema", "json_schema": json_schema}
    return _chat(server, max_tokens=num_tokens, response_format=response_format)


# --- logits of prompts ----------------------------------------------------------------------------


def _with_logits(server: Server, number: int) -> Request:
    text = f"{number} {_WORDS * 60}"
    return _generate(server, text_input=text, max_tokens=1, return_context_logits=True)


def _long_prompt(server: Server, number: int, num_tokens: int) -> Request:
    return _generate(server, text_input=f"{number} {_WORDS * 60}", max_tokens=num_tokens)


SHAPES = {
    "ambiguous grammars, n 16": Shape(
        1, lambda s, i: _ambiguous(s, i, 16), lambda s, i, k: _unconstrained(s, i, k, 16), n=16
    ),
    "ambiguous grammars of 16 tenants": Shape(
        16, lambda s, i: _ambiguous(s, i, 8), lambda s, i, k: _unconstrained(s, i, k, 8), n=8
    ),
    "ambiguous grammars, n 64": Shape(
        1, lambda s, i: _ambiguous(s, i, 64), lambda s, i, k: _unconstrained(s, i, k, 64), n=64
    ),
    "spaces before a tool call": Shape(2, _spaces, _plain_chat, n=8, num_at_once=2),
    "pieces of one byte without a key": Shape(
        10,
        lambda s, i: _long_chat(s, 24_000, 1, ""),
        lambda s, i, k: _long_chat(s, 24_000, 0, ""),
    ),
    "pieces of one byte with a key": Shape(
        4,
        lambda s, i: _long_chat(s, 900_000, 1, None),
        lambda s, i, k: _long_chat(s, 900_000, 0, None),
    ),
    "idle connections": Shape(
        300, lambda s, i: Request(s.gateway, "", b""), lambda s, i, k: _long_chat(s, 1, 0, None)
    ),
    "hostile schemas": Shape(40, _hostile_schema, _honest_schema),
    "logits of prompts": Shape(20, _with_logits, _long_prompt),
}


async def _send(request: Request) -> str:
    """Send a request; returns the status of its answer, which is read to its end."""
    host, _, port = request.address.rpartition(":")
    writer = None
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request.head())
        sending = asyncio.create_task(_send_body(writer, request))
        line = await asyncio.wait_for(reader.readline(), _ANSWER_S)
        sending.cancel()
        await asyncio.wait_for(_read_body(reader), _ANSWER_S)
        return line.decode().split(" ")[1] if line else "closed"
    except (TimeoutError, OSError) as error:
        return type(error).__name__
    finally:
        if writer is not None:
            writer.close()


async def _send_body(writer: asyncio.StreamWriter, request: Request) -> None:
    with suppress(OSError):  # refused before all of it was sent
        for piece in request.pieces():
            writer.write(piece)
            await writer.drain()


async def _read_body(reader: asyncio.StreamReader) -> None:
    """Read an answer's headers and body, which has a length unless the connection ends it."""
    length = 2**62
    while header := (await reader.readline()).strip().lower():
        if header.startswith(b"content-length:"):
            length = int(header.split(b":")[1])
    while length > 0 and (piece := await reader.read(min(length, 2**16))):
        length -= len(piece)


async def _abuse(shape: Shape, server: Server, seconds: float) -> Counter[str]:
    seen: Counter[str] = Counter()
    until, numbers = time.monotonic() + seconds, count()

    async def client() -> None:
        while time.monotonic() < until:
            seen[await _send(shape.hostile(server, next(numbers)))] += 1

    clients = [asyncio.create_task(client()) for _ in range(shape.num_open)]
    await asyncio.wait(clients, timeout=seconds)
    for task in clients:
        if not task.cancel():
            task.result()  # raises what went wrong in it
    return seen


async def _ask_honestly(
    shape: Shape, server: Server, seconds: float, requests: int, tokens: int
) -> Counter[str]:
    seen: Counter[str] = Counter()
    begun = time.monotonic()

    async def one(number: int) -> None:
        turn = number // shape.num_at_once * shape.num_at_once
        await asyncio.sleep(begun + turn * seconds / requests - time.monotonic())
        per_completion = max(1, tokens // (requests * shape.n))
        seen[await _send(shape.honest(server, number, per_completion))] += 1

    every = [asyncio.create_task(one(number)) for number in range(requests)]
    await asyncio.sleep(seconds)
    for task in every:
        if not task.cancel():
            task.result()
    return seen


def main() -> None:
    """Send the requests, and print their statuses."""
    name, kind, seconds, requests, tokens, triton, gateway, key = sys.argv[1:]
    shape, server = SHAPES[name], Server(triton, gateway, key)
    if kind == HOSTILE:
        seen = asyncio.run(_abuse(shape, server, float(seconds)))
    else:
        load = _ask_honestly(shape, server, float(seconds), int(requests), int(tokens))
        seen = asyncio.run(load)
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
