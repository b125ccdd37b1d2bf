"""A server as the bench sees it, whatever it speaks."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

from paged_loadtest.request import Request
from paged_loadtest.timeline import Timeline

PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says about itself and its model; None where it does not."""

    server: str
    vocab_size: int | None = None
    max_model_len: int | None = None


class Endpoint(ABC):
    """One model of a server; to be made and used inside one event loop."""

    def __init__(self) -> None:
        self._knows_salt = False
        self._cache_salt: str | None = None

    def forget_cache(self) -> None:
        """From here on, find nothing in the server's prefix cache that was sent before.

        Where the server does not know how to do so, what it finds is seen in the results.
        """
        if self._knows_salt:
            self._cache_salt = uuid.uuid4().hex

    @abstractmethod
    async def check(self) -> ServerInfo:
        """See that the server is there and has the model.

        Raises:
            ConfigError: it is not, or has not; the message says what to do.
        """

    @abstractmethod
    async def is_ready(self) -> bool:
        """Whether the model takes requests now."""

    @abstractmethod
    async def send(self, request: Request) -> Timeline:
        """Make one call and wait for its end; one that fails says so in its timeline.

        Raises:
            ConfigError: the request is of a kind that this server cannot be sent at all.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Let go of the connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()
