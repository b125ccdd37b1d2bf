"""Supervises the engine for a front end: notices when it ends, and starts it again."""

from __future__ import annotations

import os
import select
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq

from paged_backend.process import wire
from paged_backend.process.admission import BlockedTenants, QueueBounds
from paged_backend.process.engine_client import GONE, EngineClient
from paged_backend.process.lifetime import ProcessId, open_process
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, EngineDead
from paged_backend.values.log import LOG
from paged_backend.values.outputs import EngineStats, QueueState

_FIRST_PAUSE_S = 1.0  # before the next attempt to start an engine that could not load
_LONGEST_PAUSE_S = 30.0
RETRY_AFTER_START_S = 10  # the retry interval for clients while an engine is starting
_GRACE_S = 0.5  # how long the engine may take to end by itself after the server


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine has ended; requests in flight must be sent again to the next one."""

    error: EngineDead


@dataclass(frozen=True, slots=True)
class EngineRestarted:
    """A new engine is ready; it knows no requests."""

    started_here: bool


@dataclass(frozen=True, slots=True)
class EngineUnavailable:
    """No engine has started within ``engine_restart_timeout_s``.

    Further attempts follow at intervals, unless that option is 0.
    """

    error: EngineDead


Event = wire.FromEngine | EngineDied | EngineRestarted | EngineUnavailable


class EngineSupervisor:
    """Sends messages to the current engine, and reports when an engine ends or starts.

    If the model has several engines (``data_parallel_size``), each of them has a supervisor, which
    starts the next engine of the same ``number``.

    After ``connect`` has returned, one thread calls ``receive``. Any thread may call the other
    methods. Messages that are sent while there is no engine are dropped.

    Attributes:
        folder: the private folder of the engine and of those after it, once `start` has returned.
    """

    folder: Path

    def __init__(
        self, config: EngineConfig, model: str, version: str, server_pid: int, number: int = 0
    ) -> None:
        self._config = config
        self._name = "the engine" if config.data_parallel_size == 1 else f"engine {number}"
        self._bounds = QueueBounds.of(config)
        self._blocked = BlockedTenants()
        server = ProcessId.of(server_pid)
        self._make_client: Callable[[], EngineClient] = lambda: EngineClient(
            config, model, version, server, self._counts, self._commits, number
        )
        self.identity = f"{os.getpid()}-{uuid.uuid4().hex[:16]}"
        self._server = open_process(server)
        self._lock = threading.Lock()  # guards _client and its sending socket
        self._client: EngineClient | None = None
        self._is_ready = False
        self._counts: EngineStats | None = None
        self._commits: dict[str, str] = {}  # commits of the first engine; its tokenizer is in use
        self._early: list[Event] = []  # arrived together with EngineReady
        self._lost_s: float | None = None  # since when there has been no engine
        self._gave_up = False
        self._next_start_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._last_error = EngineDead(GONE)

    # --- the first engine -------------------------------------------------------------------

    def start(self) -> EngineClient:
        """Start the engine, or find the one that another front end has started.

        Raises:
            ConfigError: it cannot be started with these options.
        """
        try:
            self._client = self._make_client()
        except OSError as error:
            raise ConfigError(f"{self._name} cannot be started: {error}") from error
        self.folder = self._client.folder
        return self._client

    def connect(self) -> wire.EngineReady:
        """Start the engine if ``start`` has not, and wait without a time limit until it is loaded.

        Raises:
            ConfigError: the engine cannot be started with these options.
        """
        while True:
            client = self._client or self.start()
            try:
                ready, self._early = _wait_until_ready(client)
            except EngineDead as error:
                client.abandon()
                self._client = None
                # An engine that was found running may have been about to end.
                if client.has_started:
                    raise ConfigError(
                        f"{self._name} ended while the model was loading ({client.exit_status}); "
                        "the server's log may say why"
                    ) from error
            else:
                self._is_ready = True
                self._commits = ready.commits
                self._log_start(client, ready)
                return ready

    @property
    def is_ready(self) -> bool:
        """True while an engine takes requests, as of the last call of ``receive``."""
        return self._client is not None and self._is_ready

    @property
    def waitables(self) -> Sequence[zmq.Socket[bytes] | int]:
        """What is readable when ``receive`` returns at once; empty without an engine."""
        return () if self._client is None else self._client.waitables

    # --- what is sent -----------------------------------------------------------------------

    def send(self, message: wire.ToEngine) -> bool:
        """Send a message to the engine; returns False, and drops it, if there is none.

        An engine that has ended counts as none, even before ``receive`` reports it.
        """
        with self._lock:
            if self._client is None or not self._is_ready:
                return False
            return self._client.send(message)

    def check_rate(self, tenant: str) -> None:
        """Refuse a request before any work is done for it, if the engine refuses its tenant.

        Raises:
            RequestRefused: the error says when to retry.
        """
        self._blocked.check(tenant, time.monotonic())

    def check_room(self, num_open: int, num_preparing: int, num_own: int = 0) -> None:
        """Refuse a request before any work is done for it, if the queue is full.

        While no engine is ready, all open requests of this front end count as waiting.

        Args:
            num_open: number of open requests of this front end; ignored while an engine is ready.
            num_preparing: number of requests that this front end prepares and has not sent to the
                engine yet; ``num_open`` does not include them.
            num_own: number of these that are of the tenant of the request.

        Raises:
            RequestRefused: the error says when to retry.
        """
        queue, retry_after_s = QueueState(num_open, 0, 0), RETRY_AFTER_START_S
        with self._lock:
            page = self._client.page if self._client is not None else None
            if page is not None:
                queue, retry_after_s = page.queue, page.retry_after_s
        queue = queue._replace(num_waiting=queue.num_waiting + num_preparing)
        self._bounds.check(queue, 1, retry_after_s)
        self._bounds.check_share(queue, num_own, retry_after_s)

    def close(self) -> None:
        """Disconnect from the engine.

        The engine aborts the open requests of this front end. It ends after its last front end has
        disconnected.
        """
        with self._lock:
            if self._client is not None:
                self._client.close()
                self._client = None

    # --- what comes back --------------------------------------------------------------------

    def receive(self, timeout_s: float) -> list[Event]:
        """Wait for an event, and return all that have happened."""
        if self._server_is_gone():
            return self._end_with_server()
        if self._early:
            early, self._early = self._early, []
            return early
        if self._client is None:
            return self._start_again(timeout_s)
        try:
            messages = self._client.receive(timeout_s)
            hangs = self._client.seconds_without_beat() > self._config.step_timeout_s
        except EngineDead as error:
            return self._lose(error)
        if hangs:
            LOG.error(
                "%s made no step for %g s (step_timeout_s) and is killed",
                self._name,
                self._config.step_timeout_s,
            )
            self._client.kill()
            return [*messages, *self._lose(EngineDead("it hung for over step_timeout_s"))]
        messages = [message for message in messages if not self._is_for_link(message)]
        return [*messages] if self._is_ready else self._begin(self._client, messages)

    def _is_for_link(self, message: wire.FromEngine) -> bool:
        """Handle a message for the supervisor; returns True if only the supervisor needs it."""
        if isinstance(message, wire.Stats):
            self._counts = message.stats
        if not isinstance(message, wire.TenantBlocked):
            return False
        now = time.monotonic()
        self._blocked.block(message.tenant, now + message.wait_s, now)
        return True

    def _begin(self, client: EngineClient, messages: list[wire.FromEngine]) -> list[Event]:
        """Handle the first messages of a new engine."""
        for index, message in enumerate(messages):
            if isinstance(message, wire.EngineFailed):
                return self._lose(EngineDead(message.message))
            if isinstance(message, wire.EngineReady):
                self._is_ready, self._lost_s, self._gave_up = True, None, False
                self._pause_s = _FIRST_PAUSE_S
                self._log_start(client, message)
                return [EngineRestarted(client.has_started), *messages[index + 1 :]]
        return self._give_up_in_time()

    def _lose(self, error: EngineDead) -> list[Event]:
        """Disconnect from an engine that has ended, whether it was loaded or not."""
        with self._lock:
            client, self._client = self._client, None
            was_ready, self._is_ready = self._is_ready, False
        if client is not None:
            client.abandon()
            if client.has_started:  # the other front ends know no more than this one
                status = client.exit_status
                if was_ready:
                    LOG.error("%s ended: %s", self._name, status)
                else:
                    LOG.error("%s could not start (%s): %s", self._name, status, error)
        now = time.monotonic()
        self._last_error = error
        if was_ready:
            self._lost_s, self._next_start_s = now, now
            return [EngineDied(error), *self._give_up_in_time()]
        self._next_start_s = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return self._give_up_in_time()

    def _give_up_in_time(self) -> list[Event]:
        waited_s = 0.0 if self._lost_s is None else time.monotonic() - self._lost_s
        if self._gave_up or waited_s < self._config.engine_restart_timeout_s:
            return []
        self._gave_up = True
        LOG.error(
            "%s has not started for %.0f s (engine_restart_timeout_s): without another engine, "
            "requests fail until it starts",
            self._name,
            waited_s,
        )
        return [EngineUnavailable(self._last_error)]

    def _start_again(self, timeout_s: float) -> list[Event]:
        never = self._config.engine_restart_timeout_s == 0
        wait_s = self._next_start_s - time.monotonic()
        if never or wait_s > 0:
            time.sleep(timeout_s if never else min(timeout_s, wait_s))
            return self._give_up_in_time()
        try:
            client = self._make_client()
        except (
            OSError,
            ConfigError,
        ) as error:  # the old folder was just removed
            return self._lose(EngineDead(f"it cannot be started: {error}"))
        with self._lock:
            self._client = client
        return []

    def _log_start(self, client: EngineClient, ready: wire.EngineReady) -> None:
        if client.has_started:
            LOG.info("%s runs %s: %s", self._name, self._config.model, ready.description)

    # --- without a server -------------------------------------------------------------------

    def _server_is_gone(self) -> bool:
        return self._server is None or bool(select.select([self._server], [], [], 0)[0])

    def _end_with_server(self) -> list[Event]:
        """Kill the engine and all front ends; none is started again."""
        time.sleep(_GRACE_S)
        if self._client is not None:
            self._client.kill_all()
        return []


def _wait_until_ready(client: EngineClient) -> tuple[wire.EngineReady, list[Event]]:
    """Return the message, and the ones that arrived together with it."""
    while True:
        messages = client.receive(timeout_s=1.0)
        for index, message in enumerate(messages):
            if isinstance(message, wire.EngineFailed):
                raise ConfigError(message.message)
            if isinstance(message, wire.EngineReady):
                return message, [*messages[index + 1 :]]
