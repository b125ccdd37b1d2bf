"""The LoRA adapters of a model that several ranks compute.

The first rank decides. When it reads an adapter on a thread, it asks the other ranks to do so on
threads, too. Once all of them have read the same weights, each rank puts them into its layers
between the same two steps. So no step waits for a disk.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

from paged_backend.engine.reading_thread import ReadingThread
from paged_backend.executor.base import AdapterStore, ReadAdapter
from paged_backend.executor.messages import (
    AdapterOrder,
    DropAdapter,
    ForgetReading,
    PutAdapter,
    ReadingDone,
    StartReading,
    encode,
    encode_adapter_order,
)
from paged_backend.values.errors import ConfigError, EngineDead


class Readings:
    """What the other ranks are told to read, and what they answer.

    `start` is for any thread; all else is for the thread that sends steps.

    Args:
        ranks: the numbers of the other ranks.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = frozenset(ranks)
        self._numbers = itertools.count()
        self._orders: deque[AdapterOrder] = deque()
        self._open: dict[int, _Open] = {}  # by number

    def start(self, folder: Path) -> Reading:
        """Let the other ranks read a folder soon, until nobody has the returned object."""
        reading = Reading(next(self._numbers))
        self._open[reading.number] = _Open(self._ranks, reading.answers)
        self._orders.append(StartReading(reading.number, str(folder)))
        weakref.finalize(reading, self._orders.append, ForgetReading(reading.number))
        return reading

    def take_orders(self) -> list[bytes]:
        """Remove and return the messages for all other ranks; for a moment between two steps."""
        orders: list[bytes] = []
        while self._orders:
            order = self._orders.popleft()
            if isinstance(order, ForgetReading):
                self._open.pop(order.number, None)
            orders.append(encode_adapter_order(order))
        return orders

    def note(self, rank: int, done: ReadingDone) -> None:
        """Remember the answer of a rank."""
        reading = self._open.get(done.number)
        if reading is not None:
            reading.note(rank, done)

    def close(self) -> None:
        """End all waits for answers, which raise EngineDead."""
        while self._open:
            self._open.popitem()[1].fail(EngineDead("the other ranks have ended"))


class Reading:
    """An adapter that the other ranks read.

    Args:
        number: the number of the reading.

    Attributes:
        answers: the answers of all other ranks, by their numbers.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.answers: Future[dict[int, ReadingDone]] = Future()


class _Open:
    """The answers that have come for a reading; it does not keep the reading alive."""

    def __init__(self, ranks: frozenset[int], answers: Future[dict[int, ReadingDone]]) -> None:
        self._ranks = ranks
        self._answers = answers
        self._done: dict[int, ReadingDone] = {}

    def note(self, rank: int, done: ReadingDone) -> None:
        self._done[rank] = done
        if self._done.keys() == self._ranks:
            self._answers.set_result(self._done)

    def fail(self, error: EngineDead) -> None:
        if not self._answers.done():
            self._answers.set_exception(error)


class AdapterMessages(Protocol):
    """The part of `OtherRanks` that adapters need."""

    readings: Readings

    def send(self, message: bytes) -> None:
        """Send a message to each rank; raises EngineDead if a node is gone."""
        ...


class _ReadByAll:
    """An adapter that all ranks have read."""

    def __init__(self, adapter: ReadAdapter, reading: Reading) -> None:
        self.adapter = adapter
        self.reading = reading

    @property
    def digest(self) -> str:
        return self.adapter.digest


class RankAdapters:
    """The adapters of the first rank, which sends changes to the other ranks; see `AdapterStore`.

    Args:
        own: the adapters that this rank holds.
        others: the other ranks.
    """

    def __init__(self, own: AdapterStore, others: AdapterMessages) -> None:
        self._own = own
        self._others = others

    def read(self, folder: Path) -> ReadAdapter:
        """Read and check an adapter on all ranks; see `AdapterStore.read`.

        Must run on another thread than the one that sends steps, which exchanges the messages.

        Raises:
            ConfigError: a rank cannot use it, or has other weights there.
            EngineDead: a rank has ended.
        """
        reading = self._others.readings.start(folder)
        adapter = self._own.read(folder)
        for rank, done in reading.answers.result().items():
            if done.problem:
                raise ConfigError(f"rank {rank}: {done.problem}")
            if done.digest != adapter.digest:
                raise ConfigError(f"{folder} has other weights on rank {rank} than on rank 0")
        return _ReadByAll(adapter, reading)

    def put(self, adapter: object) -> None:
        """Let all ranks hold an adapter that `read` has returned, from the next step on."""
        assert isinstance(adapter, _ReadByAll)
        self._others.send(encode_adapter_order(PutAdapter(adapter.reading.number)))
        self._own.put(adapter.adapter)

    def drop(self, digest: str) -> None:
        """Let all ranks forget an adapter that no sequence has."""
        self._others.send(encode_adapter_order(DropAdapter(digest)))
        self._own.drop(digest)


class FollowingAdapters:
    """The adapters of a rank but the first, which does what the first rank says.

    Args:
        store: the adapters that this rank holds.

    Attributes:
        ready: a file descriptor that is readable while `take_answers` has something.
    """

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._reader = ReadingThread()
        self._readings: dict[int, Future[ReadAdapter]] = {}
        self._done: deque[ReadingDone] = deque()
        self.ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def follow(self, order: AdapterOrder) -> None:
        """Do what the first rank says, between two steps."""
        match order:
            case StartReading(number, folder):
                reading = self._reader.submit(partial(self._store.read, Path(folder)))
                self._readings[number] = reading
                reading.add_done_callback(lambda reading: self._answer(number, reading))
            case ForgetReading(number):
                self._readings.pop(number).cancel()
            case PutAdapter(number):
                self._store.put(self._readings[number].result())
            case DropAdapter(digest):
                self._store.drop(digest)

    def take_answers(self) -> list[bytes]:
        """Remove and return the messages for the first rank."""
        answers: list[bytes] = []
        with suppress(BlockingIOError):  # nothing was read
            os.eventfd_read(self.ready)
        while self._done:
            answers.append(encode(self._done.popleft()))
        return answers

    def _answer(self, number: int, reading: Future[ReadAdapter]) -> None:
        if reading.cancelled():
            return
        error = reading.exception()
        if error is None:
            done = ReadingDone(number, reading.result().digest, "")
        elif isinstance(error, ConfigError):
            done = ReadingDone(number, "", str(error))
        else:
            done = ReadingDone(number, "", f"the adapter cannot be read: {type(error).__name__}")
        self._done.append(done)
        os.eventfd_write(self.ready, 1)
