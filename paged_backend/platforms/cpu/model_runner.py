"""The model runner of a CPU: steps of few tokens replay a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.base import Model
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.platforms.cpu.arena import Arena
from paged_backend.platforms.cpu.graphs import Graph, capture
from paged_backend.platforms.cpu.memory import zeros
from paged_backend.platforms.input_batch import InputBatch, Ints
from paged_backend.platforms.torch.model_runner import TorchModelRunner

_ARENA_BYTES = 2**28  # for the activations of a step; larger steps run without a graph
_MAX_KEYS_READ_AGAIN = 2048  # by the rows of a step; more would take the time that a graph saves


class CpuModelRunner(TorchModelRunner):
    """Captures a graph for each small number of tokens when a step has it for the second time.

    The first time, layers make what they keep. In a graph, each token is a separate row with its
    own block table, as in a decode. A short prompt, drafts and tokens that a grammar forces are
    several rows of one sequence. Each row reads the keys again, so only few are allowed.

    Args:
        model: a model whose code does the same at each step of a shape.
        attention: reads the tensors of its metadata by their addresses.
        spec: the KV pool.
        max_num_rows: the maximum number of tokens in a graph.
    """

    def __init__(
        self, model: Model, attention: AttentionBackend, spec: KVCacheSpec, max_num_rows: int
    ) -> None:
        super().__init__(model, attention, spec)
        self._rows = _Rows(spec, max_num_rows, model.max_model_len)
        self._arena = Arena(_ARENA_BYTES)
        self._sizes_seen: set[int] = set()
        self._graphs: dict[int, Graph | None] = {}  # None: this size cannot be captured

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return sum(graph is not None for graph in self._graphs.values())

    def _compute(self, batch: InputBatch, tables: Ints) -> tuple[Tensor, Tensor]:
        size = len(batch.input_ids)
        if not self._rows.fit(batch, tables) or not self._may_replay(size):
            return super()._compute(batch, tables)
        self._rows.fill(batch, tables)
        if size not in self._graphs:
            logits, self._graphs[size] = capture(lambda: self._decode(size), self._arena)
        else:
            graph = self._graphs[size]
            assert graph is not None  # `_may_replay`
            logits = graph.replay()
        if not np.array_equal(batch.logits_indices, np.arange(size)):
            logits = logits[torch.from_numpy(batch.logits_indices)]
        return logits, logits[:0]

    def _may_replay(self, size: int) -> bool:
        """Return True if there is a graph of this size, or if one should be captured now."""
        if size in self._graphs:
            return self._graphs[size] is not None
        was_seen = size in self._sizes_seen
        self._sizes_seen.add(size)
        return was_seen

    def _decode(self, size: int) -> Tensor:
        """Compute the logits of `_rows`."""
        input_ids, meta = self._rows.of(size)
        hidden = self._model.forward(input_ids, self._attention, meta, None)
        return self._model.compute_logits(hidden).float()


class _Rows:
    """Buffers for the inputs of a step. Each token is a row with its own block table."""

    def __init__(self, spec: KVCacheSpec, max_num_rows: int, max_model_len: int) -> None:
        num_groups, width = len(spec.groups), -(-max_model_len // spec.block_size)
        self._places = torch.arange(max_num_rows + 1, dtype=torch.int32)
        self._input_ids = torch.zeros(max_num_rows, dtype=torch.int64)
        self._positions = torch.zeros(max_num_rows, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_rows, dtype=torch.int32)
        self._slot_mappings = torch.zeros(num_groups, max_num_rows, dtype=torch.int64)
        self._tables = zeros((num_groups, max_num_rows, width), torch.int32)

    def fit(self, batch: InputBatch, tables: Ints) -> bool:
        """Return True if the buffers can hold the inputs of a step, and a graph is faster."""
        _, max_num_rows, width = self._tables.shape
        return (
            len(batch.input_ids) <= max_num_rows
            and tables.shape[2] <= width
            and not len(batch.other_indices)
            and _keys_read_again(batch) <= _MAX_KEYS_READ_AGAIN
        )

    def fill(self, batch: InputBatch, tables: Ints) -> None:
        """Copy the inputs of a step that fits."""
        size = len(batch.input_ids)
        if batch.num_decodes < size:
            tables = np.repeat(tables, np.diff(batch.query_start_loc), axis=1)
        pairs: list[tuple[Tensor, Any]] = [
            (self._input_ids[:size], batch.input_ids),
            (self._positions[:size], batch.positions),
            (self._seq_lens[:size], batch.positions + np.int32(1)),
            (self._slot_mappings[:, :size], batch.slot_mappings),
            (self._tables[:, :size, : tables.shape[2]], tables),
        ]
        for buffer, values in pairs:
            buffer.numpy()[...] = values

    def of(self, size: int) -> tuple[Tensor, AttentionMetadata]:
        """Return the token ids and the metadata of the first rows, without copying them."""
        meta = AttentionMetadata(
            query_start_loc=self._places[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._tables[:, :size].unbind(),
            slot_mappings=self._slot_mappings[:, :size].unbind(),
            positions=self._positions[:size],
            num_decodes=size,
        )
        return self._input_ids[:size], meta


def _keys_read_again(batch: InputBatch) -> int:
    """Return how many more keys are read if each token of a step reads those before it."""
    if batch.num_decodes == len(batch.input_ids):
        return 0
    return int(batch.positions.sum() + len(batch.positions) - batch.seq_lens.sum())
