"""What the decoders of all protocols share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from paged_backend.validation import shorten
from paged_loadtest.timeline import Timeline

T = TypeVar("T")

_MAX_MESSAGE = 300


class Decoder(ABC, Generic[T]):
    """Takes in what arrives of one call: ``feed`` for each piece, then ``finish``."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.done = False  # the whole answer has come, or an error in its place
        self.texts: list[str] = []

    @abstractmethod
    def feed(self, data: T, now_s: float) -> None:
        """Take in a piece that arrived at ``now_s``."""

    def finish(self) -> None:
        """To be called when no more will come."""
        self.timeline.text = "".join(self.texts)
        if not self.done:
            self.fail("the stream ended before its answer did")
        elif self.timeline.arrivals_s and not self.timeline.num_output_tokens:
            self.fail("the server does not say how many tokens it sent")

    def fail(self, message: str) -> None:
        """Note why the call failed; the first reason stays."""
        self.done = True
        if self.timeline.error is None:
            self.timeline.error = shorten(message, _MAX_MESSAGE, quote=False)


class EventDecoder(Decoder[bytes]):
    """Server-sent events, each of them a JSON object, in pieces as the network cuts them."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__(timeline)
        self._rest = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Take in some bytes of the body that arrived at ``now_s``."""
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
        """Take in an event."""

    def _end(self) -> None:
        """Take in the mark of the end, in protocols that have one."""

    def _payloads(self, data: bytes) -> Iterator[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def describe_refusal(status: int, body: bytes) -> str:
    """Why an HTTP server did not begin to answer: the text in its JSON, or what there is."""
    try:
        error = json.loads(body)["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, TypeError, LookupError):
        message = body.decode(errors="replace")
    return f"HTTP {status}: {shorten(str(message).strip(), _MAX_MESSAGE, quote=False)}"
