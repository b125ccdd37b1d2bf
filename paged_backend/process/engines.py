"""The engines of one model, as a front end sees them: one, or several that share the requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from paged_backend.process import wire
from paged_backend.process.engine_supervisor import EngineDied, EngineSupervisor, Event
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, RequestRefused
from paged_backend.values.request import Request

if TYPE_CHECKING:
    from paged_backend.process.engine_router import EngineRouter

_LOOK_S = 0.02  # between looks at engines that have no news: they may hang, or have to be started


class Engines:
    """Sends each request to one engine, and returns the events of all of them.

    Engines are numbered from 0. With one engine, each call goes straight to its supervisor, and
    nothing is routed. As with the supervisor, one thread calls ``receive`` after ``connect`` has
    returned. ``add`` and ``release`` are called under a lock of the caller; any thread may call the
    other methods.

    Args:
        config: options of the engines.
        model: name of the model.
        version: version of the model.
        server_pid: process id of tritonserver.
    """

    def __init__(self, config: EngineConfig, model: str, version: str, server_pid: int) -> None:
        self.size = config.data_parallel_size
        self._engines = [
            EngineSupervisor(config, model, version, server_pid, number)
            for number in range(self.size)
        ]
        self._num_open = [0] * self.size
        self._charges_all = config.max_tenant_request_rate is not None
        self._next_look_s = 0.0
        self._router: EngineRouter | None = None
        if self.size > 1:
            # It imports the client's libraries, which one engine does not need.
            from paged_backend.process.engine_router import EngineRouter

            self._router = EngineRouter(self.size)

    @property
    def identity(self) -> str:
        """A prefix for ids of requests, which no other front end has."""
        return self._engines[0].identity

    @property
    def folder(self) -> Path:
        """The private folder of the first engine; `connect` has returned."""
        return self._engines[0].folder

    def connect(self) -> wire.EngineReady:
        """Wait until all engines are loaded, without a time limit.

        Raises:
            ConfigError: an engine cannot be started with these options, or the engines have loaded
                different commits of the model.
        """
        try:
            for engine in self._engines:  # so that they load at the same time
                engine.start()
            ready = [engine.connect() for engine in self._engines]
            if any(other.commits != ready[0].commits for other in ready):
                raise ConfigError(
                    "the engines of the model loaded different commits: load it again, or set "
                    "revision to a commit"
                )
        except ConfigError:
            self.close()
            raise
        return ready[0]

    # --- what is sent -----------------------------------------------------------------------

    def route(self, request: Request) -> Sequence[bytes]:
        """Return what ``add`` needs to choose an engine for a request; nothing for one engine.

        This takes up to 0.3 ms, so that it is not done under the caller's lock.
        """
        return () if self._router is None else self._router.route(request)

    def add(self, message: wire.AddRequest, route: Sequence[bytes]) -> int | None:
        """Send a request to an engine; returns its number, or None if no engine takes it now.

        The request counts as open there until `release`.
        """
        if self._router is None:
            engine = 0 if self._engines[0].send(message) else None
        else:
            engine = self._place(self._router, message, route)
        if engine is not None:
            self._num_open[engine] += 1
        return engine

    def release(self, engine: int) -> None:
        """Note that a request is no longer open at an engine."""
        self._num_open[engine] -= 1

    def _place(
        self, router: EngineRouter, message: wire.AddRequest, route: Sequence[bytes]
    ) -> int | None:
        left = {number for number, engine in enumerate(self._engines) if engine.is_ready}
        while left:
            # A request that has begun is never refused, so that it may go anywhere.
            has_begun = message.progress is not None
            with_room = {n for n in left if has_begun or self._has_room(n)}
            chosen = router.choose(route, with_room or left, self._num_open)
            if self._engines[chosen].send(message):
                if self._charges_all and not has_begun:
                    self._charge(message.request.tenant, left - {chosen})
                return chosen
            left.discard(chosen)
        return None

    def _has_room(self, number: int) -> bool:
        try:
            self._engines[number].check_room(0, 0)
        except RequestRefused:
            return False
        return True

    def _charge(self, tenant: str, others: set[int]) -> None:
        """Let the rate of a tenant count the requests of all engines."""
        for number in others:
            self._engines[number].send(wire.ChargeTenant(tenant))

    def send(self, message: wire.ToEngine, engine: int) -> bool:
        """Send a message to one engine; returns False, and drops it, if there is none."""
        return self._engines[engine].send(message)

    def send_all(self, message: wire.ToEngine) -> None:
        """Send a message to each engine that takes messages now."""
        for engine in self._engines:
            engine.send(message)

    def check_rate(self, tenant: str) -> None:
        """Refuse a request before any work is done for it, if an engine refuses its tenant.

        Raises:
            RequestRefused: the error says when to retry.
        """
        for engine in self._engines:
            engine.check_rate(tenant)

    def check_room(self, num_open: int, num_preparing: int, num_own: int = 0) -> None:
        """Refuse a request before any work is done for it, if the queues of all engines are full.

        See :meth:`EngineSupervisor.check_room`. Requests in preparation are divided equally.

        Raises:
            RequestRefused: the error says when to retry.
        """
        refusal = None
        ready = [engine for engine in self._engines if engine.is_ready] or self._engines
        for engine in ready:
            try:
                engine.check_room(num_open, self._share(num_preparing), self._share(num_own))
                return
            except RequestRefused as error:
                refusal = error
        assert refusal is not None
        raise refusal

    def _share(self, number: int) -> int:
        return -(-number // self.size)

    def close(self) -> None:
        """Disconnect from all engines; an engine ends after its last front end has disconnected."""
        for engine in self._engines:
            engine.close()

    # --- what comes back --------------------------------------------------------------------

    def receive(self, timeout_s: float) -> list[tuple[int, list[Event]]]:
        """Wait for an event, and return all that have happened, with the engines' numbers."""
        if self._router is None:
            return [(0, self._engines[0].receive(timeout_s))]
        arrived = []
        for number in self._with_news(timeout_s):
            events = self._engines[number].receive(0)
            if any(isinstance(event, EngineDied) for event in events):
                self._router.forget(number)
            arrived.append((number, events))
        return arrived

    def _with_news(self, timeout_s: float) -> list[int]:
        """Wait, and return the engines to receive from: those with news, or at intervals all."""
        waitables = [engine.waitables for engine in self._engines]
        owners = {item: number for number, items in enumerate(waitables) for item in items}
        if not all(waitables):  # an engine has to be started
            timeout_s = min(timeout_s, _LOOK_S)
        items = [(waitable, zmq.POLLIN) for waitable in owners]
        ready = zmq.zmq_poll(items, int(timeout_s * 1000))
        now = time.monotonic()
        if not ready or now >= self._next_look_s:
            self._next_look_s = now + _LOOK_S
            return list(range(self.size))
        return sorted({owners[waitable] for waitable, _ in ready})
