"""Requests whose grammars are being compiled, before the scheduler knows them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from typing import NamedTuple, Protocol

from paged_backend.core.grammar import Grammar
from paged_backend.values.request import Request

WAIT_S = 0.01  # longest wait of an engine that has nothing else to do

Progress = Collection[Collection[int] | None]
"""The tokens of each completion of a request so far; None for one that has ended."""


class GrammarCompiler(Protocol):
    """Compiles the grammars of requests on a separate thread."""

    def start(self, request: Request, progress: Progress) -> Future[Mapping[int, Grammar]]:
        """Start to compile a request's grammar.

        The result has a grammar at its start for each unfinished completion, by its index.
        """
        ...


class CompilingRequest(NamedTuple):
    """A request that waits for its grammars."""

    request: Request
    progress: Progress
    grammars: Future[Mapping[int, Grammar]]


class CompilingRequests:
    """The requests that wait for their grammars, in the order of their arrival."""

    def __init__(self) -> None:
        self._by_id: dict[str, CompilingRequest] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[CompilingRequest]:
        return iter(self._by_id.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def add(self, waiting: CompilingRequest) -> None:
        """Add a request."""
        self._by_id[waiting.request.request_id] = waiting

    def pop(self, request_id: str) -> CompilingRequest | None:
        """Remove a request and stop compiling; returns None for an unknown id."""
        waiting = self._by_id.pop(request_id, None)
        if waiting is not None:
            waiting.grammars.cancel()
        return waiting

    def take_ready(self, *, wait: bool) -> Iterator[CompilingRequest]:
        """Remove and yield the requests whose grammars are compiled or have failed.

        Args:
            wait: wait for one, but not for long: other messages may arrive.
        """
        if wait and self._by_id:
            futures = [waiting.grammars for waiting in self._by_id.values()]
            wait_for(futures, timeout=WAIT_S, return_when=FIRST_COMPLETED)
        for waiting in list(self._by_id.values()):
            if waiting.grammars.done():
                del self._by_id[waiting.request.request_id]
                yield waiting
