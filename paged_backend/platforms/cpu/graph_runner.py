"""The model runner of a CPU with kernels: a step of a known shape replays a graph."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.base import Model
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.step_context import StepContext
from paged_backend.platforms.cpu.arena import Arena
from paged_backend.platforms.cpu.graphs import Graph, capture
from paged_backend.platforms.cpu.memory import zeros
from paged_backend.platforms.cpu.model_runner import (
    ComputedStep,
    CpuModelRunner,
    PooledStep,
)
from paged_backend.platforms.cpu.threads import wake_helpers
from paged_backend.platforms.input_batch import InputBatch, Ints
from paged_backend.values.options.scheduling import StepLimits

_ARENA_BYTES = 2**28  # bytes of a step's activations; larger steps run without a graph
_MAX_SHAPES = 512  # that are remembered, with their graphs
_MAX_ROWS = 64  # tokens of a step that may share the graphs of decodes, or max_num_seqs if larger
_MAX_UNREAD_LOGITS = 2**19  # logits of such a step that nobody reads; more would take too long


class CpuGraphRunner(CpuModelRunner):
    """Captures a graph when a step of a shape comes for the second time.

    The first time, layers make what they keep.

    Args:
        model: a model with code that does the same at each step of a shape.
        attention: reads the tensors of its metadata by their addresses.
        spec: the KV pool.
        limits: limits of a step.
        context: what the layers know about a step's rows; None for layers without adapters.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        spec: KVCacheSpec,
        limits: StepLimits,
        context: StepContext | None = None,
    ) -> None:
        super().__init__(model, attention, spec, context)
        self._buffers = _Buffers(spec, limits, model)
        self._graphs = _Graphs()

    @property
    def num_graphs(self) -> int:
        """The number of captured graphs."""
        return self._graphs.num_captured

    def launch(self, scheduled_batch: ScheduledBatch) -> ComputedStep | PooledStep:
        """Copy blocks, and compute the hidden states and logits of a step."""
        wake_helpers()  # while this thread prepares the inputs
        return super().launch(scheduled_batch)

    def _compute(self, batch: InputBatch, tables: Ints) -> tuple[Tensor, Tensor]:
        shape = self._buffers.shape_of(batch, tables)
        if shape is not None and self._context is not None:
            shape = shape._replace(has_adapters=self._context.has_adapters)
            if not shape.is_by_tokens:
                self._context.need(batch.logits_indices)
        if shape is None or not self._graphs.may_run(shape):
            return super()._compute(batch, tables)
        self._buffers.fill(shape, batch, tables)
        logits = self._graphs.run(shape, lambda: self._forward_buffers(shape))
        if shape.is_by_tokens and not np.array_equal(batch.logits_indices, np.arange(len(logits))):
            logits = logits[torch.from_numpy(batch.logits_indices)]
        return logits, logits[:0]

    def _forward_buffers(self, shape: _GraphShape) -> Tensor:
        """Compute logits [num_logits, vocab_size] from the inputs in the buffers."""
        input_ids, meta, indices = self._buffers.of(shape)
        hidden = self._model.forward(input_ids, self._attention, meta, indices)
        return self._model.compute_logits(hidden).float()


class _GraphShape(NamedTuple):
    """The sizes that the arguments of a step's kernels depend on.

    If there are as many sequences as tokens, each token has logits, and the last sequences may have
    no tokens. So decodes, drafts, tokens that a grammar forces and short prompts share graphs,
    unless too many logits would not be read.
    """

    num_tokens: int
    num_seqs: int
    num_logits: int
    has_adapters: bool = False  # the kernels of adapters run, too

    @property
    def is_by_tokens(self) -> bool:
        """Return True if steps of any sequences with this number of tokens have the shape."""
        return self.num_seqs == self.num_tokens


class _Graphs:
    """The graphs of the shapes that came last."""

    def __init__(self) -> None:
        self._arena = Arena(_ARENA_BYTES)
        self._by_shape: OrderedDict[_GraphShape, Graph | None] = OrderedDict()  # None: seen once
        # A step with this number of tokens could not be captured: the arena is too small for it, or
        # the code depends on values.
        self._too_many_tokens: int | None = None

    @property
    def num_captured(self) -> int:
        """The number of graphs."""
        return sum(graph is not None for graph in self._by_shape.values())

    def may_run(self, shape: _GraphShape) -> bool:
        """Return True if there is a graph of a shape, or if one should be captured now."""
        if self._too_many_tokens is not None and shape.num_tokens >= self._too_many_tokens:
            return False
        was_seen = shape in self._by_shape
        self._by_shape.setdefault(shape, None)
        self._by_shape.move_to_end(shape)
        if len(self._by_shape) > _MAX_SHAPES:
            self._by_shape.popitem(last=False)
        return was_seen

    def run(self, shape: _GraphShape, function: Callable[[], Tensor]) -> Tensor:
        """Return the result of a function by its graph, which is captured if there is none."""
        graph = self._by_shape[shape]
        if graph is not None:
            return graph.replay()
        result, self._by_shape[shape] = capture(function, self._arena)
        if self._by_shape[shape] is None:
            self._too_many_tokens = shape.num_tokens
        return result


class _Buffers:
    """The inputs of a step, at addresses that stay."""

    def __init__(self, spec: KVCacheSpec, limits: StepLimits, model: Model) -> None:
        num_tokens = limits.max_num_batched_tokens
        num_rows = max(limits.max_num_seqs, min(_MAX_ROWS, num_tokens))
        num_groups, width = len(spec.groups), -(-model.max_model_len // spec.block_size)
        self._max_num_tokens = num_tokens
        self._max_unread = _MAX_UNREAD_LOGITS // model.config.vocab_size
        self._tables = zeros((num_groups, num_rows, width), torch.int32).numpy()
        self._query_start_loc = np.zeros(num_rows + 1, np.int32)
        self._seq_lens = np.zeros(num_rows, np.int32)
        self._input_ids = np.zeros(num_tokens, np.int64)
        self._positions = np.zeros(num_tokens, np.int32)
        self._slot_mappings = np.zeros((num_groups, num_tokens), np.int64)
        # Several completions can begin after one row.
        self._logits_indices = np.zeros(num_tokens + num_rows, np.int64)
        has_states = spec.states is not None
        self._state_slots = np.zeros((num_rows, 2), np.int32) if has_states else None

    def shape_of(self, batch: InputBatch, tables: Ints) -> _GraphShape | None:
        """Return the shape of a step; None if the buffers cannot hold its inputs."""
        _, max_num_rows, width = self._tables.shape
        num_tokens, num_seqs = len(batch.input_ids), len(batch.seq_lens)
        if (
            num_tokens > self._max_num_tokens
            or num_seqs > max_num_rows
            or tables.shape[2] > width
            or len(batch.other_indices)
        ):
            return None
        num_logits = len(batch.logits_indices)
        has_few_unread = num_logits > 0 and num_tokens - num_logits <= self._max_unread
        if num_tokens == num_seqs or (num_tokens <= max_num_rows and has_few_unread):
            return _GraphShape(num_tokens, num_tokens, num_tokens)
        return _GraphShape(num_tokens, num_seqs, num_logits)

    def fill(self, shape: _GraphShape, batch: InputBatch, tables: Ints) -> None:
        """Copy the inputs of a step of a shape."""
        num_tokens, num_logits = shape.num_tokens, shape.num_logits
        num_seqs = len(batch.seq_lens)  # the others of the shape have no tokens
        self._query_start_loc[num_seqs + 1 : shape.num_seqs + 1] = num_tokens
        self._input_ids[:num_tokens] = batch.input_ids
        self._positions[:num_tokens] = batch.positions
        self._slot_mappings[:, :num_tokens] = batch.slot_mappings
        self._query_start_loc[: num_seqs + 1] = batch.query_start_loc
        self._seq_lens[:num_seqs] = batch.seq_lens
        self._tables[:, :num_seqs, : tables.shape[2]] = tables
        if not shape.is_by_tokens:
            self._logits_indices[:num_logits] = batch.logits_indices
        if self._state_slots is not None:
            self._state_slots[:num_seqs] = batch.state_slots

    def of(self, shape: _GraphShape) -> tuple[Tensor, AttentionMetadata, Tensor | None]:
        """Return token ids, metadata, and the rows with logits (None: all), without copies."""
        num_tokens, num_seqs, num_logits, _ = shape
        tables = torch.from_numpy(self._tables[:, :num_seqs])
        slot_mappings = torch.from_numpy(self._slot_mappings[:, :num_tokens])
        slots = self._state_slots
        meta = AttentionMetadata(
            query_start_loc=torch.from_numpy(self._query_start_loc[: num_seqs + 1]),
            seq_lens=torch.from_numpy(self._seq_lens[:num_seqs]),
            block_tables=tables.unbind(),
            slot_mappings=slot_mappings.unbind(),
            positions=torch.from_numpy(self._positions[:num_tokens]),
            num_decodes=0,  # not read on a CPU
            state_slots=None if slots is None else torch.from_numpy(slots[:num_seqs]),
        )
        indices = self._logits_indices[:num_logits]
        return (
            torch.from_numpy(self._input_ids[:num_tokens]),
            meta,
            None if shape.is_by_tokens else torch.from_numpy(indices),
        )
