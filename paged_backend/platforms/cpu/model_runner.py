"""The model runner of a CPU: steps that only decode replay a graph."""

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


class CpuModelRunner(TorchModelRunner):
    """Captures a graph for each number of sequences when they decode for the second time.

    The first time, layers make what they keep.

    Args:
        model: a model whose code does the same at each step of a shape.
        attention: reads the tensors of its metadata by their addresses.
        spec: the KV pool.
        max_num_seqs: the maximum number of sequences in a step.
    """

    def __init__(
        self, model: Model, attention: AttentionBackend, spec: KVCacheSpec, max_num_seqs: int
    ) -> None:
        super().__init__(model, attention, spec)
        self._inputs_of_decodes = _DecodeInputs(spec, max_num_seqs, model.max_model_len)
        self._arena = Arena(_ARENA_BYTES)
        self._sizes_seen: set[int] = set()
        self._graphs: dict[int, Graph | None] = {}  # None: this size cannot be captured

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return sum(graph is not None for graph in self._graphs.values())

    def _compute(self, batch: InputBatch, tables: Ints) -> tuple[Tensor, Tensor]:
        size = len(batch.input_ids)
        inputs = self._inputs_of_decodes
        if not inputs.fit(batch, tables) or not self._may_replay(size):
            return super()._compute(batch, tables)
        inputs.fill(batch, tables)
        if size not in self._graphs:
            logits, self._graphs[size] = capture(lambda: self._decode(size), self._arena)
        else:
            graph = self._graphs[size]
            assert graph is not None  # `_may_replay`
            logits = graph.replay()
        return logits, logits[:0]

    def _may_replay(self, size: int) -> bool:
        """Return True if there is a graph of this size, or if one should be captured now."""
        if size in self._graphs:
            return self._graphs[size] is not None
        was_seen = size in self._sizes_seen
        self._sizes_seen.add(size)
        return was_seen

    def _decode(self, size: int) -> Tensor:
        """Compute the logits of the decodes in `_inputs_of_decodes`."""
        input_ids, meta = self._inputs_of_decodes.of(size)
        hidden = self._model.forward(input_ids, self._attention, meta, None)
        return self._model.compute_logits(hidden).float()


class _DecodeInputs:
    """Buffers for the inputs of steps in which each sequence computes and samples one token."""

    def __init__(self, spec: KVCacheSpec, max_num_seqs: int, max_model_len: int) -> None:
        num_groups, width = len(spec.groups), -(-max_model_len // spec.block_size)
        self._places = torch.arange(max_num_seqs + 1, dtype=torch.int32)
        self._input_ids = torch.zeros(max_num_seqs, dtype=torch.int64)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int32)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32)
        self._slot_mappings = torch.zeros(num_groups, max_num_seqs, dtype=torch.int64)
        self._tables = zeros((num_groups, max_num_seqs, width), torch.int32)

    def fit(self, batch: InputBatch, tables: Ints) -> bool:
        """Return True if the buffers can hold the inputs of a step."""
        size = len(batch.input_ids)
        _, max_num_seqs, width = self._tables.shape
        return (
            batch.num_decodes == size <= max_num_seqs
            and tables.shape[2] <= width
            and not len(batch.other_indices)
            and np.array_equal(batch.logits_indices, self._places[:size].numpy())
        )

    def fill(self, batch: InputBatch, tables: Ints) -> None:
        """Copy the inputs of a step that fits."""
        size = len(batch.input_ids)
        pairs: list[tuple[Tensor, Any]] = [
            (self._input_ids[:size], batch.input_ids),
            (self._positions[:size], batch.positions),
            (self._seq_lens[:size], batch.seq_lens),
            (self._slot_mappings[:, :size], batch.slot_mappings),
            (self._tables[:, :size, : tables.shape[2]], tables),
        ]
        for buffer, values in pairs:
            buffer.numpy()[...] = values

    def of(self, size: int) -> tuple[Tensor, AttentionMetadata]:
        """Return the token ids and the metadata of the first sequences, without copying them."""
        meta = AttentionMetadata(
            query_start_loc=self._places[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._tables[:, :size].unbind(),
            slot_mappings=self._slot_mappings[:, :size].unbind(),
            positions=self._positions[:size],
            num_decodes=size,
        )
        return self._input_ids[:size], meta
