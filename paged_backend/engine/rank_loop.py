"""The loop of a rank, which loads its share of a model and runs the steps that the engine sends."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import NamedTuple, NoReturn

import zmq

from paged_backend.core.scheduler_output import PendingOutput, SchedulerOutput
from paged_backend.engine.rank_adapters import FollowingAdapters
from paged_backend.engine.worker import Worker
from paged_backend.executor.messages import (
    GroupOpened,
    ModelLoaded,
    StoreValue,
    decode_from_first_rank,
    decode_load_model,
    decode_masks,
    decode_order,
    digest,
    encode,
)
from paged_backend.models.division import Place
from paged_backend.platforms.select import open_ranks
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, place_of
from paged_backend.values.garbage import keep_loaded
from paged_backend.values.log import LOG, log_to_stderr


def address(folder: Path) -> str:
    """Return the address of the socket to which the ranks of a host connect."""
    return f"ipc://{folder / 'ranks'}"


class _Step(NamedTuple):
    output: bytes
    masks: bytes
    pending: PendingOutput


class _SharedValues:
    """See :class:`~paged_backend.models.division.SharedValues`; the first rank passes them on."""

    def __init__(self, socket: zmq.Socket[bytes], timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s

    def publish(self, key: str, value: bytes) -> None:
        self._socket.send(encode(StoreValue(key, value)))

    def next_value(self) -> tuple[str, bytes]:
        if not self._socket.poll(int(self._timeout_s * 1000)):
            raise RuntimeError(f"rank 0 has not answered for {self._timeout_s:g} s")
        match decode_from_first_rank(self._socket.recv()):
            case StoreValue(key, value):
                return key, value
        raise RuntimeError("rank 0 says that all ranks are connected, but this one is not")

    def finish(self) -> None:
        """Wait until all ranks are connected; the values that come meanwhile are not needed."""
        self._socket.send(encode(GroupOpened()))
        while not isinstance(decode_from_first_rank(self._socket.recv()), GroupOpened):
            pass


def load(socket: zmq.Socket[bytes], rank: int) -> Worker:
    """Load this rank's share of the model that the first message names.

    Raises:
        ConfigError: it cannot be loaded.
    """
    model = decode_load_model(socket.recv())
    options = EngineConfig.from_mapping(model.options)
    log_to_stderr(options.log_level)
    place = Place(rank=rank, ranks_per_node=model.ranks_per_node, host=model.host)
    values = _SharedValues(socket, options.distributed_timeout_seconds)
    ranks = open_ranks(options, values, place)
    values.finish()
    tokenizer = None if model.tokenizer is None else Path(model.tokenizer)
    worker = Worker(options, Path(model.folder), tokenizer, ranks)
    keep_loaded()
    return worker


def serve(socket: zmq.Socket[bytes], worker: Worker) -> NoReturn:
    """Run each step that arrives, and send its digest."""
    steps: deque[_Step] = deque()  # two at most: a device computes one while another is launched
    adapters = None if worker.adapters is None else FollowingAdapters(worker.adapters)
    while True:
        if steps and (len(steps) > 1 or not socket.poll(0)):
            _answer(socket, steps.popleft())
            continue
        output = _next_order(socket, adapters)
        order = decode_order(output)
        if not isinstance(order, SchedulerOutput):
            assert adapters is not None
            adapters.follow(order)
            continue
        launched = worker.launch(order)
        # The first rank may have to know the tokens of the step before, to compute masks.
        while steps and not socket.poll(0):
            _answer(socket, steps.popleft())
        masks = socket.recv()
        steps.append(_Step(output, masks, launched.sample(decode_masks(masks))))


def _answer(socket: zmq.Socket[bytes], step: _Step) -> None:
    """Wait for a step, and send its digest."""
    socket.send(digest(step.output, step.masks, step.pending.result()))


def _next_order(socket: zmq.Socket[bytes], adapters: FollowingAdapters | None) -> bytes:
    """Wait for a message from the first rank, and send what was read meanwhile."""
    if adapters is None:
        return socket.recv()
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(adapters.ready, zmq.POLLIN)
    while True:
        for answer in adapters.take_answers():
            socket.send(answer)
        if socket.poll(0):
            return socket.recv()
        poller.poll()


def run(folder: Path, rank: int) -> int:
    """Connect to the engine in ``folder`` and serve one rank; returns the exit status."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.DEALER)
    socket.set_hwm(0)
    socket.routing_id = str(rank).encode()
    socket.connect(address(folder))
    socket.send(b"")
    try:
        worker = load(socket, rank)
        socket.send(encode(ModelLoaded(None)))
        serve(socket, worker)
    except ConfigError as error:
        socket.send(encode(ModelLoaded(str(error))))
        socket.close(linger=1000)
    except RuntimeError as error:  # usually another rank has ended, which the engine reports
        LOG.error("rank %d ends: %s (%s)", rank, str(error).splitlines()[0], place_of(error))
    return 1
