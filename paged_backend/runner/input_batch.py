"""The plan of a step as the flat tensors that a model reads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paged_backend.core.scheduler_output import SampleSpec, SchedulerOutput
from paged_backend.runner.attention import AttentionMetadata


@dataclass(frozen=True, slots=True)
class InputBatch:
    """All slices of one step, one after the other, without padding."""

    input_ids: Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    logits_indices: Tensor  # [num_samples] int64, rows whose next token is sampled
    samples: list[SampleSpec]  # one for each entry of logits_indices

    @classmethod
    def build(cls, plan: SchedulerOutput, block_size: int, device: torch.device) -> InputBatch:
        """Flatten a plan; the number of array operations does not depend on the batch."""
        items = plan.scheduled
        lens = np.array([len(item.token_ids) for item in items], np.int32)
        starts = np.array([item.start for item in items], np.int32)
        query_start_loc = np.zeros(len(items) + 1, np.int32)
        np.cumsum(lens, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        input_ids = np.fromiter(
            chain.from_iterable(item.token_ids for item in items), np.int64, num_tokens
        )
        block_table = _block_table([item.block_ids for item in items])
        rows = np.repeat(np.arange(len(items)), lens)
        positions = np.arange(num_tokens) + np.repeat(starts - query_start_loc[:-1], lens)
        blocks = block_table[rows, positions // block_size].astype(np.int64)
        num_samples = [len(item.samples) for item in items]
        logits_indices = np.repeat(query_start_loc[1:].astype(np.int64) - 1, num_samples)

        def put(array: npt.NDArray[Any]) -> Tensor:
            return torch.from_numpy(array).to(device)

        metadata = AttentionMetadata(
            query_start_loc=put(query_start_loc),
            seq_lens=put(starts + lens),
            block_table=put(block_table),
            slot_mapping=put(blocks * block_size + positions % block_size),
        )
        samples = [sample for item in items for sample in item.samples]
        return cls(put(input_ids), metadata, put(logits_indices), samples)


def _block_table(tables: list[list[int]]) -> npt.NDArray[np.int32]:
    """Rows of block ids, padded with the null block: [num_seqs, longest table] int32."""
    widths = np.array([len(table) for table in tables])
    padded = np.zeros((len(tables), int(widths.max())), np.int32)
    filled = np.arange(padded.shape[1]) < widths[:, None]
    padded[filled] = np.fromiter(chain.from_iterable(tables), np.int32, int(widths.sum()))
    return padded
