"""The worker of the first rank, and its connections to the other ranks of a model."""

from __future__ import annotations

import contextlib
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import zmq

from paged_backend.core.scheduler_output import (
    LaunchedStep,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
    TokenMasks,
)
from paged_backend.engine.rank_process import address
from paged_backend.engine.rank_processes import RankProcesses
from paged_backend.engine.worker import Worker
from paged_backend.executor.messages import LoadModel, decode_model_loaded, digest, encode
from paged_backend.platforms.select import open_ranks
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, EngineDead, PagedError

_FOLDERS = "/tmp"  # the path of a socket must be short
_NOTICE_S = 1.0  # how long it may take to notice that a process has ended


class LeadingWorker(Worker):
    """The worker of the first rank, which sends each step to those of the other ranks.

    All ranks sample the same tokens, and the engine gets those of this rank. With each step, the
    other ranks send a digest of what they have computed, which must equal this rank's.
    """

    def __init__(self, config: EngineConfig, folder: Path, tokenizer: Path | None) -> None:
        size, timeout_s = config.num_ranks, config.distributed_timeout_seconds
        # Only this user can enter the folder, which is not needed once all ranks are connected.
        with tempfile.TemporaryDirectory(prefix="pb-ranks-", dir=_FOLDERS) as name:
            store = Path(name) / "store"
            self._others = others = OtherRanks(Path(name), size, timeout_s)
            try:
                others.load(_load_message(config, folder, tokenizer, store))
                with others.reasons():
                    ranks = open_ranks(config, store, 0)
                    super().__init__(config, folder, tokenizer, ranks)
                others.wait_until_loaded()
            except BaseException:
                others.close()
                raise
        weakref.finalize(self, others.close)

    def check(self) -> None:
        """Raise EngineDead if another rank has ended."""
        self._others.check()

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start the forward pass of a step on all ranks.

        Raises:
            EngineDead: another rank has ended.
        """
        message = encode(output)
        self._others.send(message)
        with self._others.reasons():
            return _LeadingStep(self._others, message, super().launch(output))


def _load_message(
    config: EngineConfig, folder: Path, tokenizer: Path | None, store: Path
) -> LoadModel:
    tokenizer_path = None if tokenizer is None else str(tokenizer)
    return LoadModel(asdict(config), str(folder), tokenizer_path, str(store))


class OtherRanks:
    """The processes of all ranks but the first one, and the connections to them.

    Args:
        folder: a private folder for sockets.
        size: number of all ranks.
        timeout_s: how long they may take to answer.
    """

    def __init__(self, folder: Path, size: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets = {rank: self._context.socket(zmq.PAIR) for rank in range(1, size)}
        for rank, socket in self._sockets.items():
            socket.set_hwm(0)
            socket.bind(address(folder, rank))
        self._processes = RankProcesses(folder, list(self._sockets))

    def load(self, message: LoadModel) -> None:
        """Wait until all processes have started, and tell them what to load."""
        for rank in self._sockets:
            self._receive(rank)
        self.send(encode(message))

    def wait_until_loaded(self) -> None:
        """Wait until all ranks have loaded their share of the model.

        Raises:
            ConfigError: a rank cannot.
            EngineDead: a rank has ended, or does not answer.
        """
        for rank in self._sockets:
            problem = decode_model_loaded(self._receive(rank)).problem
            if problem is not None:
                raise ConfigError(problem)

    def send(self, message: bytes) -> None:
        """Send a message to each rank."""
        for socket in self._sockets.values():
            socket.send(message)

    def compare(self, expected: bytes) -> None:
        """Compare the digest of the oldest step that was not compared yet.

        Raises:
            EngineDead: a rank has computed something else, has ended, or does not answer.
        """
        for rank in self._sockets:
            if self._receive(rank) != expected:
                raise EngineDead(f"rank {rank} has computed another result than rank 0")

    def check(self) -> None:
        """Raise EngineDead if a rank has ended."""
        if self._processes.problem is not None:
            raise EngineDead(self._processes.problem)

    @contextmanager
    def reasons(self) -> Iterator[None]:
        """Raise the reason in place of the error of a connection that a rank's end has closed."""
        try:
            yield
        except PagedError:
            raise
        except RuntimeError as error:
            if self._processes.wait_for_end(_NOTICE_S):
                raise self._reason() from error
            if "Timed out" in str(error):
                limit = f"waits for the other ranks for more than {self._timeout_s:g} s"
                raise EngineDead(f"rank 0 {limit} (distributed_timeout_seconds)") from error
            raise

    def close(self) -> None:
        """End all ranks."""
        self._processes.close()
        self._context.destroy(linger=0)

    def _reason(self) -> PagedError:
        """Return why the first rank has ended, as it may have said before."""
        for socket in self._sockets.values():
            if socket.poll(0):
                with contextlib.suppress(msgspec.DecodeError):  # it is the digest of a step
                    problem = decode_model_loaded(socket.recv()).problem
                    if problem is not None:
                        return ConfigError(problem)
        return EngineDead(self._processes.problem or "")

    def _receive(self, rank: int) -> bytes:
        socket, ended = self._sockets[rank], self._processes.ended
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(ended, zmq.POLLIN)
        ready = dict(poller.poll(int(self._timeout_s * 1000)))
        if socket in ready:
            return socket.recv()
        self.check()
        raise EngineDead(f"rank {rank} has not answered for {self._timeout_s:g} s")


@dataclass(frozen=True, slots=True)
class _LeadingStep(LaunchedStep):
    others: OtherRanks
    message: bytes  # the encoded SchedulerOutput
    launched: LaunchedStep

    def greedy_token_ids(self) -> Mapping[int, int]:
        return self.launched.greedy_token_ids()

    def sample(self, masks: TokenMasks | None = None) -> _LeadingResult:
        message = encode(masks)
        self.others.send(message)
        with self.others.reasons():
            pending = self.launched.sample(masks)
        return _LeadingResult(self.others, self.message, message, pending)


@dataclass(frozen=True, slots=True)
class _LeadingResult:
    others: OtherRanks
    output: bytes  # the encoded SchedulerOutput
    masks: bytes  # the encoded TokenMasks
    pending: PendingOutput

    def result(self) -> ModelRunnerOutput:
        with self.others.reasons():
            result = self.pending.result()
        self.others.compare(digest(self.output, self.masks, result))
        return result
