"""The interface of a server under test, independent of its protocol."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self, TypeAlias

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_loadtest.destination import Destination, ServerInfo
from paged_loadtest.options import TargetOptions
from paged_loadtest.timeline import Timeline


class Endpoint(ABC):
    """One model of a server; create and use it inside one event loop."""

    def __init__(self, target: TargetOptions) -> None:
        self._target = target
        self._destination = Destination(
            target.address,
            target.model,
            nobody=f"--base-url: nobody speaks {target.backend}",
            advice="or give its address and --backend",
        )
        self._knows_salt = False
        self._cache_salt: str | None = None

    def forget_cache(self) -> None:
        """Make later requests miss everything already in the server's prefix cache.

        If the server does not support this, the results show the tokens it finds in its cache.
        """
        self.use_cache(uuid.uuid4().hex)

    def use_cache(self, salt: str) -> None:
        """Make later requests find only what requests with the same salt have left in the cache."""
        if self._knows_salt:
            self._cache_salt = salt

    @abstractmethod
    async def check(self) -> ServerInfo:
        """Check that the server answers and has the model.

        Raises:
            ConfigError: it does not answer, or lacks the model; the message says what to do.
        """

    @abstractmethod
    async def is_ready(self) -> bool:
        """Return True if the model accepts requests now."""

    @abstractmethod
    async def send(self, request: WorkloadRequest) -> Timeline:
        """Send a request and wait for the end of its response; the timeline records a failure.

        Raises:
            ConfigError: this protocol does not support the kind of prompt.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()


MakeEndpoint: TypeAlias = Callable[[TargetOptions], Endpoint]
