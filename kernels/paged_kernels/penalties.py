"""Logit penalties that depend on a sequence's earlier tokens, and the counts of those tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.device import device_of
from paged_kernels.errors import check_tensor

_CHUNK = 16384  # logits per program: few enough to split a row, enough to be worth a program
_TILE = 2048
_NUM_WARPS = 4
_ROWS = 128  # rows per program of the counting kernel


@triton.jit
def _penalties_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    inputs_ptr,
    counts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    min_position_ptr,
    stop_ids_ptr,
    VOCAB: tl.constexpr,
    STOPS: tl.constexpr,
    STOPS_TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: one chunk of one row."""
    CHUNKS: tl.constexpr = triton.cdiv(VOCAB, CHUNK)
    row = (tl.program_id(0) // CHUNKS).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    logits_ptr += row * VOCAB
    counts_ptr += slot * VOCAB
    chunk = tl.program_id(0) % CHUNKS * CHUNK
    repetition = tl.load(repetition_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        num_drafts = 0  # rows of the slot before this one
        while tl.load(slots_ptr + row - 1 - num_drafts, mask=num_drafts < row, other=-1) == slot:
            num_drafts += 1
        for start in tl.range(chunk, chunk + CHUNK, TILE):
            tokens = start + tl.arange(0, TILE)
            counts = tl.load(counts_ptr + tokens, mask=tokens < VOCAB, other=0)
            for before in range(num_drafts):
                counts += tl.where(tokens == tl.load(inputs_ptr + row - before), 2, 0)
            seen = counts > 0
            x = tl.load(logits_ptr + tokens, mask=seen, other=0.0)
            outputs = (counts >> 1).to(tl.float32)
            x = tl.where(x > 0.0, x / repetition, x * repetition)
            x -= tl.where(outputs > 0.0, frequency * outputs + presence, 0.0)
            tl.store(logits_ptr + tokens, x, mask=seen)
    if tl.load(positions_ptr + row) < tl.load(min_position_ptr + slot):
        tl.debug_barrier()  # a penalized logit may belong to a stop token
        column = tl.arange(0, STOPS_TILE)
        stops = tl.load(stop_ids_ptr + slot * STOPS + column, mask=column < STOPS, other=-1)
        here = (stops >= chunk) & (stops < tl.minimum(chunk + CHUNK, VOCAB))
        tl.store(logits_ptr + stops, float("-inf"), mask=here)


@triton.jit(do_not_specialize=["num_rows"])
def _count_kernel(
    counts_ptr,
    slots_ptr,
    tokens_ptr,
    inputs_ptr,
    num_rows,
    VOCAB: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    slots = tl.load(slots_ptr + rows, mask=inside, other=-1).to(tl.int64)
    tokens = tl.load(tokens_ptr + rows, mask=inside, other=-1)
    valid = (slots >= 0) & (tokens >= 0) & (tokens < VOCAB)
    before = rows - 1
    drafted = _same_slot(slots_ptr, slots, before, inside)
    while tl.max(drafted.to(tl.int32), axis=0) > 0:
        sampled = tl.load(tokens_ptr + before, mask=drafted, other=0)
        draft = tl.load(inputs_ptr + before + 1, mask=drafted, other=0)
        valid &= (sampled == draft) | ~drafted
        before -= 1
        drafted &= _same_slot(slots_ptr, slots, before, inside)
    tl.atomic_add(counts_ptr + slots * VOCAB + tokens, 2, mask=valid, sem="relaxed")


@triton.jit
def _same_slot(slots_ptr, slots, rows, inside):
    inside &= (rows >= 0) & (slots >= 0)
    return inside & (tl.load(slots_ptr + rows, mask=inside, other=-1) == slots)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalty parameters of the sequence in each slot, with vLLM's names and meanings."""

    repetition: Tensor  # [num_slots] float32 > 0; 1 disables it
    presence: Tensor  # [num_slots] float32; 0 disables it
    frequency: Tensor  # [num_slots] float32; 0 disables it
    min_position: Tensor  # [num_slots] int32, first position at which stop tokens are allowed
    stop_ids: Tensor  # [num_slots, any] int32, including the end of sequence, padded with -1


def apply_penalties(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    inputs: Tensor,
    token_counts: Tensor,
    penalties: Penalties,
) -> None:
    """Penalize earlier tokens and forbid early stop tokens, in place.

    Tokens of prompt or output: positive logits are divided by `repetition`, others multiplied.
    Tokens of the output: `presence` and, for each occurrence, `frequency` are subtracted. Then, if
    the position is below `min_position`, the logits of stop tokens become minus infinity. The
    logits of rows without penalties are not read.

    Args:
        logits: [rows, vocab] float32.
        slots: [rows] int32. A negative slot is padding: its row is left alone. Consecutive rows of
            one slot sample consecutive tokens of a sequence, with a draft before each but the first
            one. The drafts count as tokens of the output.
        positions: [rows] int32, positions of the tokens to be sampled.
        inputs: [rows] int64, the tokens before them.
        token_counts: [num_slots, vocab] int32: twice the occurrences in the output, and 1 more if
            the token occurs in the prompt.
        penalties: penalties by slot; read on the device, so captured launches see updates.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_tensor("logits", logits, (None, None), torch.float32, like=logits)
    device_of("logits", logits)
    rows, vocab = logits.shape
    check_tensor("slots", slots, (rows,), torch.int32, like=logits)
    check_tensor("positions", positions, (rows,), torch.int32, like=logits)
    check_tensor("inputs", inputs, (rows,), torch.int64, like=logits)
    check_tensor("token_counts", token_counts, (None, vocab), torch.int32, like=logits)
    num_slots = token_counts.shape[0]
    for name in ("repetition", "presence", "frequency"):
        check_tensor(name, getattr(penalties, name), (num_slots,), torch.float32, like=logits)
    check_tensor("min_position", penalties.min_position, (num_slots,), torch.int32, like=logits)
    check_tensor("stop_ids", penalties.stop_ids, (num_slots, None), torch.int32, like=logits)
    stops = penalties.stop_ids.shape[1]
    if rows:
        _penalties_kernel[(rows * triton.cdiv(vocab, _CHUNK),)](
            logits,
            slots,
            positions,
            inputs,
            token_counts,
            penalties.repetition,
            penalties.presence,
            penalties.frequency,
            penalties.min_position,
            penalties.stop_ids,
            VOCAB=vocab,
            STOPS=stops,
            STOPS_TILE=triton.next_power_of_2(max(stops, 1)),
            CHUNK=_CHUNK,
            TILE=_TILE,
            num_warps=_NUM_WARPS,
        )


def count_tokens(token_counts: Tensor, slots: Tensor, tokens: Tensor, inputs: Tensor) -> None:
    """Add sampled tokens to the counts of the output, without those after a wrong draft.

    Args:
        token_counts: as for `apply_penalties`; updated.
        slots: as for `apply_penalties`.
        tokens: [rows] int32. Ids outside the vocabulary are not counted.
        inputs: as for `apply_penalties`.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_tensor("token_counts", token_counts, (None, None), torch.int32, like=token_counts)
    device_of("token_counts", token_counts)
    check_tensor("slots", slots, (None,), torch.int32, like=token_counts)
    rows = slots.shape[0]
    check_tensor("tokens", tokens, (rows,), torch.int32, like=token_counts)
    check_tensor("inputs", inputs, (rows,), torch.int64, like=token_counts)
    if rows:
        _count_kernel[(triton.cdiv(rows, _ROWS),)](
            token_counts,
            slots,
            tokens,
            inputs,
            rows,
            VOCAB=token_counts.shape[1],
            ROWS=_ROWS,
            num_warps=_NUM_WARPS,
        )
