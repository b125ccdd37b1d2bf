"""Base classes of the decoders of all protocols."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from paged_backend.values.validation import shorten
from paged_loadtest.timeline import Timeline

T = TypeVar("T")

_MAX_MESSAGE = 300


class ResponseDecoder(ABC, Generic[T]):
    """Decodes the response to one request: ``feed`` for each chunk, then ``finish``."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.done = False  # the whole response, or an error, has arrived
        self.texts: list[str] = []

    @abstractmethod
    def feed(self, data: T, now_s: float) -> None:
        """Process a chunk that arrived at ``now_s``."""

    def finish(self) -> None:
        """Finish the timeline; call this after the last chunk."""
        self.timeline.text = "".join(self.texts)
        if not self.done:
            self.fail("the stream ended before its answer did")
        elif self.timeline.arrivals_s and not self.timeline.num_output_tokens:
            self.fail("the server does not say how many tokens it sent")

    def fail(self, message: str) -> None:
        """Record why the request failed; only the first reason is kept."""
        self.done = True
        if self.timeline.error is None:
            self.timeline.error = shorten(message, _MAX_MESSAGE, quote=False)


class EventDecoder(ResponseDecoder[bytes]):
    """Decodes server-sent events of JSON objects; chunks may split events anywhere."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._rest = b""

    def feed(self, data: bytes, now_s: float) -> None:
        for payload in self._payloads(data):
            if payload == b"[DONE]":
                self._end()
                continue
            try:
                self._take(json.loads(payload), now_s)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                self.fail(f"cannot read the event {shorten(payload)} ({error!r})")

    @abstractmethod
    def _take(self, event: Any, now_s: float) -> None:
        """Process an event."""

    def _end(self) -> None:
        """Process the end marker, in protocols that have one."""

    def _payloads(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def describe_refusal(status: int, body: bytes) -> str:
    """Describe an HTTP error: the message in the JSON body, or else the body itself."""
    try:
        error = json.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, TypeError, LookupError):
        message = body.decode(errors="replace")
    return f"HTTP {status}: {shorten(str(message).strip(), _MAX_MESSAGE, quote=False)}"
