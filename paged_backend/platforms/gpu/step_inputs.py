"""The inputs of a step: flattened on the host, and sent to buffers of the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from paged_kernels.text_drafts import FIELDS, move_back
from torch import Tensor

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.core.sequence import PLACEHOLDER
from paged_backend.models.attention import AttentionMetadata
from paged_backend.models.step_context import NO_SLOT, StepContext
from paged_backend.platforms.gpu.batch import BlockTables, Rows, Staging
from paged_backend.platforms.gpu.cuda_graphs import StepShape, captured_shapes
from paged_backend.platforms.gpu.sampler import SampleRows
from paged_backend.platforms.gpu.texts import MAX_TOKENS, DeviceTexts
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.platforms.input_batch import InputBatch, InputBatchBuilder, Ints, Longs, without
from paged_backend.values.options.scheduling import StepLimits

_MOVES, _DRAWS = FIELDS.index("moves"), FIELDS.index("draws")
IntArray = TypeVar("IntArray", bound=NDArray[np.signedinteger[Any]])


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step on the host."""

    batch: InputBatch
    rows: Longs  # [num_seqs] the row of each sequence in the device's buffers
    sample_rows: Longs  # [num_samples] the row of each sample's sequence
    adapter_slots: Ints | None  # [num_tokens] the slot of each token's adapter; None without any

    @property
    def shape(self) -> StepShape:
        """The shape of the step without padding."""
        batch = self.batch
        return StepShape(
            len(batch.input_ids),
            len(self.rows),
            len(self.sample_rows),
            batch.num_decodes,
            len(batch.other_indices),
            self.adapter_slots is not None,
        )

    @property
    def new_sample_rows(self) -> list[int]:
        """The rows of `batch.scheduled_samples`."""
        rows: list[int] = self.sample_rows[len(self.batch.continued) :].tolist()
        return rows


class DeviceInputs:
    """Assigns rows of the device's buffers to sequences, and fills the buffers for each step.

    Args:
        block_size: tokens in a block.
        num_groups: the KV cache groups.
        limits: the limits of a step.
        max_model_len: the longest sequence.
        transfer: the way to the device.
        context: knows the slots of adapters; None for layers without any.
        has_states: whether layers keep states of sequences.
    """

    def __init__(
        self,
        block_size: int,
        num_groups: int,
        limits: StepLimits,
        max_model_len: int,
        transfer: Transfer,
        context: StepContext | None = None,
        *,
        has_states: bool = False,
    ) -> None:
        self._context = context
        self._has_states = has_states
        self._block_size = block_size
        self._transfer = transfer
        self.rows = Rows(limits.max_num_seqs)
        self._builder = InputBatchBuilder(block_size, num_groups)
        self._decode_rows = np.zeros(0, np.int64)  # rows of the decodes of the previous step
        max_blocks = -(-max_model_len // block_size)
        self._tables = BlockTables(limits.max_num_seqs + 1, max_blocks, num_groups, transfer)
        self._slot_mappings = [f"slot_mapping {group}" for group in range(num_groups)]
        # All of the buffers is sent with each step, so the steps that graphs replay, and others of
        # their size, have smaller ones.
        tokens, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
        shapes = captured_shapes(limits)
        few = max(shape.num_tokens for shape in shapes)
        most_seqs = max(seqs, *(shape.num_seqs for shape in shapes))
        most_samples = max_num_samples(limits)
        self._buffers = {
            size: self._new_buffers(size, most_seqs, most_samples, transfer)
            for size in sorted({seqs, few, tokens})
        }

    def update(self, scheduled_batch: ScheduledBatch) -> StepInputs:
        """Flatten a step, and send the new blocks of its sequences."""
        batch = self._builder.build(scheduled_batch)
        continued = scheduled_batch.continued
        others = [self.rows[item.seq_id] for item in scheduled_batch.scheduled]
        rows = without(self._decode_rows, continued.dropped)
        if others:
            rows = np.append(rows, np.array(others, np.int64))
        num_continued = len(continued.sequences)
        self._decode_rows = rows[: num_continued + scheduled_batch.num_decodes]
        sample_rows = rows[:num_continued]
        if batch.scheduled_samples:
            sampled = [self.rows[spec.seq_id] for spec in batch.scheduled_samples]
            sample_rows = np.append(sample_rows, np.array(sampled, np.int64))
        self._tables.update(scheduled_batch, rows)
        return StepInputs(batch, rows, sample_rows, self._adapter_slots(scheduled_batch, batch))

    def send(self, inputs: StepInputs, shape: StepShape) -> None:
        """Fill the buffers, padded to a shape; the padding of decodes lies behind the decodes."""
        batch, rows, sample_rows = inputs.batch, inputs.rows, inputs.sample_rows
        num_decodes, padding = batch.num_decodes, self.rows.padding
        gap = shape.num_decodes - num_decodes
        input_ids, logits_indices = batch.input_ids, batch.needed_indices
        starts = batch.query_start_loc
        if shape.num_tokens and input_ids.min(initial=0) < 0:
            places = self._places_of_placeholders(inputs)
            input_ids = np.where(input_ids == PLACEHOLDER, -1 - places, input_ids)
        if gap:
            later = starts[num_decodes:] + np.int32(gap)
            starts = np.append(np.arange(shape.num_decodes, dtype=np.int32), later)
            logits_indices = logits_indices + gap * (logits_indices >= num_decodes)

        def padded(values: IntArray, length: int, filler: int) -> IntArray:
            return _padded(values, length, filler, num_decodes, gap)

        adapters = {}
        if shape.has_adapters:
            slots = inputs.adapter_slots
            if slots is None:  # a graph is captured
                slots = np.full(len(input_ids), NO_SLOT, np.int32)
            adapters["adapter_slots"] = padded(slots, shape.num_tokens, NO_SLOT)
        states = {}
        if self._has_states:
            slots = (
                batch.state_slots if len(batch.state_slots) else np.zeros((len(rows), 2), np.int32)
            )
            states["state_slots"] = _padded(
                slots.reshape(-1), 2 * shape.num_seqs, 0, 2 * num_decodes, 2 * gap
            )
        self.buffers(shape).send(
            {
                **adapters,
                **states,
                "input_ids": padded(input_ids, shape.num_tokens, 0),
                "positions": padded(batch.positions, shape.num_tokens, 0),
                "query_start_loc": _padded(starts, shape.num_seqs + 1, int(starts[-1])),
                "seq_lens": padded(batch.seq_lens, shape.num_seqs, 0),
                "table_rows": padded(rows, shape.num_seqs, padding),
                # An MTP layer writes after each of these rows. The last row is sampled from, or
                # what is written after it is restored.
                "logits_indices": _padded(
                    logits_indices,
                    shape.num_samples + shape.num_prompt_rows,
                    max(int(starts[-1]) - 1, 0),
                ),
                # Padded samples store their token in the padding row, and are not counted at all.
                "sample_rows": _padded(sample_rows, shape.num_samples, padding),
                "sample_row_or_none": _padded(sample_rows.astype(np.int32), shape.num_samples, -1),
                "sample_positions": _padded(batch.sample_positions, shape.num_samples, 0),
                **{
                    name: padded(slots, shape.num_tokens, -1)
                    for name, slots in zip(self._slot_mappings, batch.slot_mappings, strict=True)
                },
            }
        )

    def prepare(
        self, inputs: StepInputs, shape: StepShape, num_wrong: Tensor, texts: DeviceTexts | None
    ) -> bool:
        """Let the device complete what was sent of slices that depend on tokens in flight.

        Args:
            inputs: the step.
            shape: the shape that it was sent with.
            num_wrong: [max_num_seqs + 1] int32, by how many tokens the slices of a row move back.
            texts: the texts that drafts are drawn from; None without any.

        Returns:
            True if drafts were drawn from texts, which are in the buffers now.
        """
        ahead = inputs.batch.ahead
        moves = bool(ahead[:, _MOVES - 1].any())
        draws = texts is not None and texts.draws and bool(ahead[:, _DRAWS - 1].any())
        if not (moves or draws):
            return False
        gap = shape.num_decodes - inputs.batch.num_decodes
        slices = np.column_stack((inputs.rows[ahead[:, 0]].astype(np.int32), ahead))
        # The padding of decodes lies before the other sequences.
        is_later = ahead[:, 0] >= inputs.batch.num_decodes
        slices[:, 1:3] += (gap * is_later)[:, None].astype(np.int32)
        sent = self._transfer.send(slices)
        if moves:
            self._move_back(sent, shape, num_wrong)
        if texts is not None and draws:
            input_ids = self.buffers(shape).part("input_ids", shape.num_tokens)
            texts.draw(slices, sent, input_ids)
        return draws

    def _move_back(self, slices: Tensor, shape: StepShape, num_wrong: Tensor) -> None:
        """Move slices back to the ends of their texts, in all groups."""
        part, num_groups = self.buffers(shape).part, len(self._slot_mappings)
        for group, name in enumerate(self._slot_mappings):
            move_back(
                slices,
                MAX_TOKENS,
                num_wrong,
                part("positions", shape.num_tokens),
                part("seq_lens", shape.num_seqs),
                part("sample_positions", shape.num_samples),
                part(name, shape.num_tokens),
                self._tables.tensor,
                group,
                num_groups,
                self._block_size,
            )

    @property
    def max_num_tokens(self) -> int:
        """The number of tokens of the largest step."""
        return max(self._buffers)

    def buffers(self, shape: StepShape) -> Staging:
        """Return the buffers of steps of this shape, which are always the same."""
        size = next(size for size in self._buffers if size >= shape.num_tokens)
        return self._buffers[size]

    def metadata(self, shape: StepShape, num_shared_blocks: int) -> AttentionMetadata:
        """Return the metadata of attention in the buffers."""
        part = self.buffers(shape).part
        return AttentionMetadata(
            query_start_loc=part("query_start_loc", shape.num_seqs + 1),
            seq_lens=part("seq_lens", shape.num_seqs),
            block_tables=self._tables.select(part("table_rows", shape.num_seqs)),
            slot_mappings=tuple([part(name, shape.num_tokens) for name in self._slot_mappings]),
            positions=part("positions", shape.num_tokens),
            num_decodes=shape.num_decodes,
            num_shared_blocks=num_shared_blocks,
            state_slots=(
                part("state_slots", 2 * shape.num_seqs).view(-1, 2) if self._has_states else None
            ),
        )

    def sample_rows(self, shape: StepShape) -> SampleRows:
        """Return the rows of the samples in the buffers."""
        part, count = self.buffers(shape).part, shape.num_samples
        return SampleRows(
            rows=part("sample_rows", count),
            row_or_none=part("sample_row_or_none", count),
            positions=part("sample_positions", count),
        )

    def _places_of_placeholders(self, inputs: StepInputs) -> Longs:
        """Return where the device finds each token, if it is a placeholder.

        The first one of a slice is the token that was sampled last in the row of its sequence, and
        the others are drafts of this row, or what the texts of another model have.
        """
        batch = inputs.batch
        places = np.repeat(inputs.rows, np.diff(batch.query_start_loc))
        for _, first, number, *_ in batch.ahead.tolist():
            places[first : first + number] += np.arange(number) * (self.rows.padding + 1)
        return places

    def _adapter_slots(self, scheduled_batch: ScheduledBatch, batch: InputBatch) -> Ints | None:
        if self._context is None or not any(adapters := scheduled_batch.adapters):
            return None
        return self._context.slots_of(adapters, np.diff(batch.query_start_loc))

    def _new_buffers(
        self, num_tokens: int, num_seqs: int, num_samples: int, transfer: Transfer
    ) -> Staging:
        return Staging(
            {
                "input_ids": (torch.int64, num_tokens),
                "positions": (torch.int32, num_tokens),
                "query_start_loc": (torch.int32, num_seqs + 1),
                "seq_lens": (torch.int32, num_seqs),
                "table_rows": (torch.int64, num_seqs),
                "logits_indices": (torch.int64, num_samples + num_tokens),
                "sample_rows": (torch.int64, num_samples),
                "sample_row_or_none": (torch.int32, num_samples),
                "sample_positions": (torch.int32, num_samples),
                "adapter_slots": (torch.int32, num_tokens if self._context is not None else 0),
                "state_slots": (torch.int32, 2 * num_seqs if self._has_states else 0),
                **{name: (torch.int64, num_tokens) for name in self._slot_mappings},
            },
            transfer,
        )


def max_num_samples(limits: StepLimits) -> int:
    """Return the number of samples of the largest step, with the padding of captured shapes."""
    step = limits.max_num_seqs + limits.max_num_drafts
    return max(step, *(shape.num_samples for shape in captured_shapes(limits)))


def _padded(values: IntArray, length: int, filler: int, place: int = 0, gap: int = 0) -> IntArray:
    """Return values with ``gap`` fillers inserted at a place, and as many at the end as needed."""
    if len(values) == length:
        return values
    fillers = np.full(length - len(values), filler, values.dtype)
    parts = (values[:place], fillers[:gap], values[place:], fillers[gap:])
    padded: IntArray = np.concatenate(parts)
    return padded
