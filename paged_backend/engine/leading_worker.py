"""The worker of the first rank, and its connections to the other ranks of a model."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import zmq

from paged_backend.checkpoint.fingerprint import fingerprint
from paged_backend.core.scheduler_output import (
    DraftGuide,
    DrawnDrafts,
    LaunchedStep,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
    TokenMasks,
)
from paged_backend.engine.local_ranks import FOLDERS, LocalRanks
from paged_backend.engine.node_sockets import resolve
from paged_backend.engine.other_ranks import OtherRanks, Ranks
from paged_backend.engine.rank_adapters import RankAdapters
from paged_backend.engine.remote_ranks import RemoteRanks
from paged_backend.engine.worker import Worker
from paged_backend.executor.messages import LoadModel, digest, encode
from paged_backend.models.division import Place
from paged_backend.platforms.select import is_gpu, open_ranks, resolve_device
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.nodes import Nodes, read_key

_LOOPBACK = "127.0.0.1"


class LeadingWorker(Worker):
    """The worker of the first rank, which sends each step to those of the other ranks.

    All ranks sample the same tokens, and the engine gets those of this rank. With each step, the
    other ranks send a digest of what they have computed, which must equal this rank's.

    Args:
        config: the engine's options.
        nodes: the hosts of the ranks; this one is node 0.
        folder: the checkpoint.
        tokenizer: see :class:`~paged_backend.engine.worker.Worker`.
    """

    def __init__(
        self, config: EngineConfig, nodes: Nodes, folder: Path, tokenizer: Path | None
    ) -> None:
        if nodes.rank != 0:
            raise option_error(
                "node_rank",
                f"must be 0 for the server, got {nodes.rank}: the other nodes run "
                "paged-backend worker",
            )
        if config.distributed_executor_backend == "ray":
            nodes = _in_cluster_of_ray(config, nodes)
        timeout_s = config.distributed_timeout_seconds
        ranks_per_node = nodes.ranks_of_node(config.num_ranks)
        host = _LOOPBACK if nodes.number == 1 else resolve(nodes, timeout_s)
        message = LoadModel(
            asdict(config),
            str(folder),
            None if tokenizer is None else str(tokenizer),
            fingerprint(folder),
            ranks_per_node,
            host,
        )
        place = Place(rank=0, ranks_per_node=ranks_per_node, host=host)
        # Only this user can enter the folder, which is not needed once all ranks are connected.
        with tempfile.TemporaryDirectory(prefix="pb-ranks-", dir=FOLDERS) as name:
            self._others = others = _start(config, nodes, host, ranks_per_node, Path(name))
            try:
                others.load(encode(message))
                with others.reasons():
                    ranks = open_ranks(config, others, place)
                    others.wait_until_connected()
                    super().__init__(config, folder, tokenizer, ranks)
                others.wait_until_loaded()
            except BaseException:
                others.close()
                raise
        self._lead_adapters()
        weakref.finalize(self, others.close)

    def _lead_adapters(self) -> None:
        """Let the other ranks follow each change of this rank's adapters."""
        if self.adapters is not None:
            self.adapters = RankAdapters(self.adapters, self._others)

    def check(self) -> None:
        """Raise EngineDead if another rank has ended."""
        self._others.check()

    def launch(self, output: SchedulerOutput, guide: DraftGuide | None = None) -> LaunchedStep:
        """Start the forward pass of a step on all ranks.

        All ranks draw the same drafts. No other rank knows the grammars, so drafts have no masks.
        If there is a guide, this rank waits for its drafts, as the masks of the step follow them.

        Raises:
            EngineDead: another rank has ended.
        """
        message = encode(output)
        self._others.send_step(message)
        with self._others.reasons():
            unmasked = None if guide is None else _NoMasks()
            return _LeadingStep(self._others, message, super().launch(output, unmasked))


class _NoMasks(DraftGuide):
    """Allows all drafts."""

    def mask(self, seq_id: int, draft_token_ids: list[int]) -> None:
        """Return None for each draft."""


def _in_cluster_of_ray(config: EngineConfig, nodes: Nodes) -> Nodes:
    """Return the nodes with the address of this host in its cluster of Ray.

    Raises:
        ConfigError: Ray is not installed, this host is in no cluster, or there is only one node.
    """
    if nodes.number == 1:
        raise option_error("distributed_executor_backend", "can be ray only with 2 nnodes or more")
    try:
        from paged_backend.engine.ray_ranks import join_cluster
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install 'paged-backend[ray]'") from None
    address = join_cluster()
    return nodes if config.master_addr is not None else replace(nodes, address=address)


def _start(
    config: EngineConfig, nodes: Nodes, host: str, ranks_per_node: int, folder: Path
) -> OtherRanks:
    """Start the other ranks of this node, and listen for the other nodes.

    Raises:
        ConfigError: this host cannot listen for other nodes, or there is no secret.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    parts: list[Ranks] = []
    try:
        if config.distributed_executor_backend == "ray":
            from paged_backend.engine.ray_ranks import RayRanks

            uses_gpus = is_gpu(resolve_device(config.device))
            parts.append(RayRanks(context, nodes, ranks_per_node, uses_gpus=uses_gpus))
        elif nodes.number > 1:
            key = read_key(config, os.environ)
            parts.append(RemoteRanks(context, nodes, host, key, ranks_per_node))
        if ranks_per_node > 1:
            parts.append(LocalRanks(context, folder, range(1, ranks_per_node)))
    except BaseException:
        context.destroy(linger=0)
        raise
    return OtherRanks(context, parts, config.distributed_timeout_seconds)


@dataclass(frozen=True, slots=True)
class _LeadingStep(LaunchedStep):
    others: OtherRanks
    message: bytes  # the encoded SchedulerOutput
    launched: LaunchedStep

    def drawn_drafts(self) -> DrawnDrafts | None:
        return self.launched.drawn_drafts()

    def drafts_from_texts(self) -> Mapping[int, list[int]]:
        return self.launched.drafts_from_texts()

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
