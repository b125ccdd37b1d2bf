"""All ranks of a model but the first one, on this host and on others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import zmq

from paged_backend.engine.node_sockets import Context
from paged_backend.engine.rank_adapters import Readings
from paged_backend.executor.messages import (
    GroupOpened,
    ModelLoaded,
    StoreValue,
    decode_answer,
    decode_from_loading_rank,
    encode,
)
from paged_backend.values.errors import ConfigError, EngineDead, PagedError

_CHECK_S = 0.5  # between two looks whether all ranks still run
_NOTICE_S = 1.0  # how long it may take to notice that a process has ended


class Ranks(Protocol):
    """The connections to some ranks."""

    ranks: Sequence[int]
    sources: tuple[Any, ...]  # sockets and file descriptors that become readable

    def wait_until_started(self, timeout_s: float) -> None:
        """Wait until all processes are connected; raises ConfigError or EngineDead."""
        ...

    def send(self, message: bytes) -> None:
        """Send a message to each rank."""
        ...

    def receive(self) -> list[tuple[int, bytes]]:
        """Return the messages that have arrived, each with its rank."""
        ...

    def check(self) -> None:
        """Raise EngineDead if a rank has ended."""
        ...

    def close(self) -> None:
        """End all ranks."""
        ...


class OtherRanks:
    """Messages to the other ranks and from them.

    While they load, they tell each other values through this object; see
    :class:`~paged_backend.models.division.SharedValues`.

    Args:
        context: the maker of the sockets; it is closed with them.
        parts: the connections.
        timeout_s: how long the ranks may take to answer.

    Attributes:
        readings: adapters that the ranks read.
    """

    def __init__(self, context: Context, parts: Sequence[Ranks], timeout_s: float) -> None:
        self._context = context
        self._parts = parts
        self._timeout_s = timeout_s
        self._poller = zmq.Poller()
        for part in parts:
            for source in part.sources:
                self._poller.register(source, zmq.POLLIN)
        ranks = [rank for part in parts for rank in part.ranks]
        self.readings = Readings(ranks)
        self._unopened, self._unloaded = set(ranks), set(ranks)
        self._values: deque[StoreValue] = deque()  # that this rank has not read
        # Digests of steps that have arrived, by rank.
        self._answers: dict[int, deque[bytes]] = {rank: deque() for rank in ranks}

    # --- while the ranks load ---------------------------------------------------------------

    def load(self, message: bytes) -> None:
        """Wait until all processes have started, and tell them what to load.

        Raises:
            ConfigError: a node does not join.
            EngineDead: a rank has ended, or does not answer.
        """
        for part in self._parts:
            part.wait_until_started(self._timeout_s)
        self.send(message)

    def publish(self, key: str, value: bytes) -> None:
        """Tell all other ranks a value."""
        self.send(encode(StoreValue(key, value)))

    def next_value(self) -> tuple[str, bytes]:
        """Wait for a value that another rank tells.

        Raises:
            ConfigError: a rank cannot load.
            EngineDead: a rank has ended, or does not answer.
        """
        self._wait_while_loading(lambda: not self._values)
        value = self._values.popleft()
        return value.key, value.value

    def wait_until_connected(self) -> None:
        """Wait until all ranks have found each other; raises like `next_value`."""
        self._wait_while_loading(lambda: bool(self._unopened))
        self.send(encode(GroupOpened()))

    def wait_until_loaded(self) -> None:
        """Wait until all ranks have loaded their share of the model; raises like `next_value`."""
        self._wait_while_loading(lambda: bool(self._unloaded))

    def _wait_while_loading(self, is_incomplete: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while is_incomplete():
            for rank, message in self._receive(deadline, min(self._unloaded)):
                self._handle(rank, message)

    def _handle(self, rank: int, message: bytes) -> None:
        match decode_from_loading_rank(message):
            case StoreValue() as value:
                self._values.append(value)
                self.send(message)
            case GroupOpened():
                self._unopened.discard(rank)
            case ModelLoaded(None):
                self._unloaded.discard(rank)
            case ModelLoaded(problem):
                raise ConfigError(str(problem))

    # --- steps ------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Send a message to each rank.

        Raises:
            EngineDead: a node is gone.
        """
        for part in self._parts:
            part.send(message)

    def send_step(self, message: bytes) -> None:
        """Send the message that begins a step; raises like `send`."""
        self._send_orders()
        self.send(message)

    def compare(self, expected: bytes) -> None:
        """Compare the digest of the oldest step that was not compared yet.

        Raises:
            EngineDead: a rank has computed something else, has ended, or does not answer.
        """
        deadline = time.monotonic() + self._timeout_s
        for rank, answers in self._answers.items():
            while not answers:
                self._keep(self._receive(deadline, rank))
            if answers.popleft() != expected:
                raise EngineDead(f"rank {rank} has computed another result than rank 0")

    def check(self) -> None:
        """Exchange what there is about readings, between two steps.

        Raises:
            EngineDead: a rank has ended.
        """
        if not self._unloaded:  # else a message may be one that `_handle` waits for
            self._send_orders()
            for part in self._parts:
                self._keep(part.receive())
        for part in self._parts:
            part.check()

    @contextmanager
    def reasons(self) -> Iterator[None]:
        """Raise the reason in place of the error of a connection that a rank's end has closed."""
        try:
            yield
        except PagedError:
            raise
        except RuntimeError as error:
            self._look_for_reason(error)
            if "Timed out" in str(error):
                limit = f"waits for the other ranks for more than {self._timeout_s:g} s"
                raise EngineDead(f"rank 0 {limit} (distributed_timeout_seconds)") from error
            raise

    def close(self) -> None:
        """End all ranks."""
        self.readings.close()
        for part in self._parts:
            part.close()
        self._context.destroy(linger=0)

    def _look_for_reason(self, error: RuntimeError) -> None:
        """Raise why a rank has ended, as it may have said before."""
        deadline = time.monotonic() + _NOTICE_S
        while time.monotonic() < deadline:
            try:
                for rank, message in self._receive(deadline + _NOTICE_S, min(self._answers)):
                    if self._unloaded:
                        self._handle(rank, message)
            except PagedError as reason:
                raise reason from error

    def _keep(self, messages: list[tuple[int, bytes]]) -> None:
        for rank, message in messages:
            answer = decode_answer(message)
            if isinstance(answer, bytes):
                self._answers[rank].append(answer)
            else:
                self.readings.note(rank, answer)

    def _send_orders(self) -> None:
        for order in self.readings.take_orders():
            self.send(order)

    def _receive(self, deadline: float, late: int) -> list[tuple[int, bytes]]:
        """Wait for messages for a moment at most, and return them.

        Args:
            deadline: when the wait for an answer is over, in seconds of the monotonic clock.
            late: the rank that the error names then.
        """
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise EngineDead(f"rank {late} has not answered for {self._timeout_s:g} s")
        self._poller.poll(int(1000 * min(left_s, _CHECK_S)) + 1)
        messages = [message for part in self._parts for message in part.receive()]
        if not messages:
            for part in self._parts:
                part.check()
        return messages
