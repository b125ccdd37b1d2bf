"""What the soak's callers do, and what each request must come to whatever happens to the server."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from callers import QUESTIONS, Ask, Call, ask_all, greedy
from paged_client import (
    Client,
    Completion,
    CompletionBuilder,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
)
from paged_client.errors import from_text
from servers import MODEL

from paged_backend.launch.server_process import RunningServer
from paged_backend.tools.demo import load_questions

TIMEOUT_S = 120.0  # nobody waits longer: a request that has no end by then is lost
GREEDY = [greedy(i, 20 + 10 * i) for i in range(24)]
PAIRS = [
    Ask(QUESTIONS[i], {"n": 2, "seed": i, "temperature": 1.0, "max_tokens": 80, "stop": ["\n\n"]})
    for i in range(8)
]
CHATS = load_questions()[:64]
_LONG = {"temperature": 1.0, "max_tokens": 1500, "ignore_eos": True}
_SLOW_MESSAGES = 15
_BAD = [{"temperature": -1}, {"n": 0}, {"max_tokens": 10**9}, {"stop": 5}, {"no_such_field": 1}]


class Wrong(Exception):
    """A request came to something else than it must."""


@dataclass(frozen=True)
class Known:
    """The right answers, which an undisturbed server gives."""

    greedy: Sequence[Completion]
    pairs: Sequence[Completion]


def learn(server: RunningServer) -> Known:
    """Ask everything once."""
    calls = ask_all(server, [*GREEDY, *PAIRS])
    completions = [call.completion for call in calls if call.completion is not None]
    assert len(completions) == len(calls), [call.error for call in calls if call.error]
    return Known(completions[: len(GREEDY)], completions[len(GREEDY) :])


class Caller:
    """One caller: a way to the server, and a chance of its own."""

    def __init__(
        self, server: RunningServer, client: Client, known: Known, chance: random.Random
    ) -> None:
        self.chance = chance
        self._server = server
        self._client = client
        self._known = known

    # --- kinds of requests: each returns how it ended, if that is how it had to ----------------

    def stream(self) -> Call:
        """The one kind whose pauses are noted, so it returns the whole ``Call``."""
        index = self.chance.randrange(len(GREEDY))
        return self._grpc(GREEDY[index], self._known.greedy[index])

    def whole(self) -> str:
        index = self.chance.randrange(len(GREEDY))
        self._grpc(replace(GREEDY[index], whole=True), self._known.greedy[index])
        return "right"

    def pair(self) -> str:
        index = self.chance.randrange(len(PAIRS))
        self._grpc(PAIRS[index], self._known.pairs[index])
        return "right"

    def chat(self) -> str:
        question = self.chance.choice(CHATS)
        messages = [{"role": "user", "content": question.question}]
        params = {"temperature": 0.0, "max_tokens": 64, **self._whose()}
        said = self._client.generate(messages, timeout=TIMEOUT_S, **params).text
        return _right(said, question.answer)

    def http_stream(self) -> str:
        index = self.chance.randrange(len(GREEDY))
        events = self._post("generate_stream", {"stream": True, **self._fields(GREEDY[index])})
        said = "".join(event["text_output"] for event in events)
        return _right(said, self._known.greedy[index].text)

    def http_whole(self) -> str:
        index = self.chance.randrange(len(GREEDY))
        fields = {"exclude_input_in_output": True, **self._fields(GREEDY[index])}
        (answer,) = self._post("generate", fields)
        return _right(answer["text_output"], self._known.greedy[index].text)

    def cancel(self) -> str:
        stream = self._client.stream(QUESTIONS[0], timeout=TIMEOUT_S, **_LONG, **self._whose())
        for _ in range(self.chance.randrange(1, 40)):
            next(stream)
        stream.cancel()
        with suppress(RequestCancelled):
            for _ in stream:
                pass
            raise Wrong("a cancelled stream went on to its end")
        return "cancelled"

    def vanish(self) -> str:
        """Ask over HTTP or gRPC and be gone at some moment, without a word."""
        if self.chance.random() < 0.5:
            with Client(self._server.grpc_url) as client:
                stream = client.stream(QUESTIONS[1], timeout=TIMEOUT_S, **_LONG)
                for _ in range(self.chance.randrange(3)):
                    next(stream)
            return "vanished"
        body = json.dumps({"text_input": QUESTIONS[1], "stream": True, **_LONG}).encode()
        head = f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: x\r\n"
        with socket.create_connection(self._address, timeout=TIMEOUT_S) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            connection.settimeout(self.chance.uniform(0.01, 0.5))
            with suppress(TimeoutError):
                connection.recv(4096)
        return "vanished"

    def bad(self) -> str:
        params = self.chance.choice(_BAD)
        with suppress(InvalidRequest):
            if self.chance.random() < 0.5:
                self._client.generate(QUESTIONS[2], timeout=TIMEOUT_S, **params)
            else:
                self._post("generate", {"text_input": QUESTIONS[2], **params})
            raise Wrong(f"{params} was answered")
        return "rejected"

    def timed(self) -> str:
        timeout_s = self.chance.uniform(0.1, 1.0)
        with suppress(RequestTimeout):
            self._client.generate(QUESTIONS[3], timeout=TIMEOUT_S, timeout_s=timeout_s, **_LONG)
            raise Wrong(f"1500 tokens came in {timeout_s:.1f} s")
        return "timed out"

    def read_slowly(self) -> str:
        """A message a second for a while, then the rest."""
        ask, known = GREEDY[-1], self._known.greedy[-1]
        builder = CompletionBuilder()
        with self._client.stream(ask.prompt, timeout=TIMEOUT_S, **ask.params) as stream:
            for number, chunk in enumerate(stream):
                builder.add(chunk)
                time.sleep(number < _SLOW_MESSAGES)
        return _right(builder.build().text, known.text)

    # --- how they ask ---------------------------------------------------------------------------

    def _grpc(self, ask: Ask, known: Completion) -> Call:
        ask = replace(ask, params={**ask.params, **self._whose()})
        call = Call(ask, TIMEOUT_S).run(self._client)
        if call.token_ids != [answer.token_ids for answer in known.answers]:
            raise Wrong(f"{call.token_ids} in place of {known.answers}")
        return call

    def _whose(self) -> dict[str, Any]:
        return {"tenant": self.chance.choice("abc"), "priority": self.chance.randrange(2)}

    def _fields(self, ask: Ask) -> dict[str, Any]:
        return {"text_input": ask.prompt, **ask.params, **self._whose()}

    def _post(self, verb: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """The objects of a response; raises the error in it, if there is one."""
        with self._connection() as connection:
            connection.request("POST", f"/v2/models/{MODEL}/{verb}", json.dumps(fields))
            body = connection.getresponse().read().decode()
        lines = (line.removeprefix("data: ") for line in body.splitlines() if line)
        events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        for event in events:
            if "error" in event:
                raise from_text(event["error"])
        return events

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(*self._address, timeout=TIMEOUT_S)
        try:
            yield connection
        finally:
            connection.close()

    @property
    def _address(self) -> tuple[str, int]:
        host, _, port = self._server.http_url.removeprefix("http://").rpartition(":")
        return host, int(port)


def _right(said: str, known: str) -> str:
    if said != known:
        raise Wrong(f"{said!r} in place of {known!r}")
    return "right"
