"""Ranks as threads of this process: they start at once, and exchange tensors through queues.

All but the transport is the real thing: each rank has a worker of its own and gets each step as a
message, and its digest is compared with the first rank's. Models that transformers computes need
processes, because transformers cannot load two models at a time.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from paged_backend.core.scheduler_output import SchedulerOutput
from paged_backend.engine.engine import Engine
from paged_backend.engine.executors import open_executor
from paged_backend.engine.leading_worker import LeadingWorker
from paged_backend.engine.rank_adapters import FollowingAdapters, Readings
from paged_backend.engine.worker import Worker
from paged_backend.executor.messages import (
    ReadingDone,
    decode_answer,
    decode_masks,
    decode_order,
    digest,
)
from paged_backend.models.division import Ranks
from paged_backend.platforms.portable.group import TorchGroup
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import EngineDead

TIMEOUT_S = 60

Channels = dict[tuple[int, int], "queue.SimpleQueue[Tensor]"]
"""Tensors on their way, by the numbers of sender and receiver."""


class Over:
    """A call that is over."""

    def wait(self) -> None:
        """Return at once."""


class ThreadProcesses:
    """The part of torch's groups of processes that `TorchGroup` calls."""

    def __init__(self, channels: Channels, rank: int, size: int) -> None:
        self._channels, self._rank, self._size = channels, rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> Over:
        (x,) = tensors
        self._channels[self._rank, to].put(x.clone())
        return Over()

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Over:
        (x,) = tensors
        x.copy_(self._channels[source, self._rank].get(timeout=TIMEOUT_S))
        return Over()

    def broadcast(self, x: Tensor, source: int) -> Over:
        if source != self._rank:
            return self.recv([x], source, 0)
        for other in self._others():
            self.send([x], other, 0)
        return Over()

    def _allgather_base(self, out: Tensor, x: Tensor) -> Over:
        parts = out.view(self._size, -1)
        parts[self._rank] = x
        for other in self._others():
            self.send([x], other, 0)
        for other in self._others():
            self.recv([parts[other]], other, 0)
        return Over()

    def _others(self) -> Iterator[int]:
        return (other for other in range(self._size) if other != self._rank)


def groups_in_threads(size: int) -> list[TorchGroup]:
    """The members of one group."""
    numbers = range(size)
    channels: Channels = {(a, b): queue.SimpleQueue() for a in numbers for b in numbers}
    return [
        TorchGroup(ThreadProcesses(channels, rank, size), sums_in_order=True) for rank in numbers
    ]


def _groups(size: int) -> list[TorchGroup | None]:
    return [None] if size == 1 else list(groups_in_threads(size))


def _all_ranks(config: EngineConfig) -> list[Ranks]:
    width, depth = config.tensor_parallel_size, config.pipeline_parallel_size
    stages = [_groups(width) for _ in range(depth)]
    pipelines = [_groups(depth) for _ in range(width)]
    return [
        Ranks(tensor=stages[stage][place], pipeline=pipelines[place][stage])
        for stage in range(depth)
        for place in range(width)
    ]


class _Rank:
    """The thread of a rank but the first one."""

    def __init__(self, load: partial[Worker]) -> None:
        self.messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        self.adapters: FollowingAdapters | None = None
        Thread(target=self._run, args=(load,), daemon=True).start()

    def answer(self) -> bytes:
        answer = self.answers.get(timeout=TIMEOUT_S)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _run(self, load: partial[Worker]) -> None:
        try:
            self.worker = worker = load()
            if worker.adapters is not None:
                self.adapters = FollowingAdapters(worker.adapters)
            self.answers.put(b"")
            while (output := self.messages.get()) is not None:
                order = decode_order(output)
                if not isinstance(order, SchedulerOutput):
                    assert self.adapters is not None
                    self.adapters.follow(order)
                    continue
                launched = worker.launch(order)
                masks = self.messages.get()
                assert masks is not None
                result = launched.sample(decode_masks(masks)).result()
                self.answers.put(digest(output, masks, result))
        except Exception as error:  # the first rank raises it
            self.answers.put(error)


class _Others:
    """See `OtherRanks`."""

    def __init__(self, ranks: list[_Rank]) -> None:
        self.ranks = ranks
        self.readings = Readings(range(1, len(ranks) + 1))

    def send(self, message: bytes | None) -> None:
        for rank in self.ranks:
            rank.messages.put(message)

    def send_step(self, message: bytes) -> None:
        self.check()
        self.send(message)

    def compare(self, expected: bytes) -> None:
        for number, rank in enumerate(self.ranks, 1):
            if rank.answer() != expected:
                raise EngineDead(f"rank {number} has computed another result than rank 0")

    @contextmanager
    def reasons(self) -> Iterator[None]:
        yield

    def check(self) -> None:
        """Exchange what there is about adapters; threads do not end by themselves."""
        for order in self.readings.take_orders():
            self.send(order)
        for number, rank in enumerate(self.ranks, 1):
            for message in [] if rank.adapters is None else rank.adapters.take_answers():
                answer = decode_answer(message)
                assert isinstance(answer, ReadingDone)
                self.readings.note(number, answer)


class ThreadedRanks(LeadingWorker):
    """The executor of an engine with several ranks in this process."""

    def __init__(self, config: EngineConfig, folder: Path, tokenizer: Path | None = None) -> None:
        first, *others = _all_ranks(config)
        started = [_Rank(partial(Worker, config, folder, tokenizer, ranks)) for ranks in others]
        self._others: Any = _Others(started)
        Worker.__init__(self, config, folder, tokenizer, first)
        for rank in started:
            rank.answer()
        self._lead_adapters()
        weakref.finalize(self, self._others.send, None)

    @property
    def workers(self) -> list[Worker]:
        """The workers of all ranks."""
        return [self, *(rank.worker for rank in self._others.ranks)]

    @property
    def sent_bytes(self) -> list[int]:
        """Bytes that each rank has sent so far."""
        ranks = [worker.ranks for worker in self.workers]
        groups: list[list[Any]] = [[each.tensor, each.pipeline] for each in ranks]
        return [sum(group.sent_bytes for group in pair if group is not None) for pair in groups]


@contextmanager
def torch_threads_restored() -> Iterator[None]:
    """Undo that each rank divides torch's threads of this process."""
    number = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(number)


def config_of(folder: Path, **options: object) -> EngineConfig:
    """The options of an engine in float32 over a small pool."""
    values = {"dtype": "float32", "kv_cache_memory_bytes": 16 * 2**20, **options}
    return EngineConfig.from_mapping({"model": str(folder), **values})


def make_ranks_engine(folder: Path, **options: object) -> Engine:
    """An engine as `oracle.make_engine` makes it, with the ranks in this process."""
    config = config_of(folder, **options)
    with torch_threads_restored():
        several = config.num_ranks > 1
        executor = ThreadedRanks(config, folder) if several else open_executor(config, folder)
    return Engine(config, executor)


def load_first_rank(folder: Path, **options: object) -> None:
    """Load the first of several ranks, which must be refused before it waits for the others."""
    config = config_of(folder, **options)
    Worker(config, folder, None, _all_ranks(config)[0])
