"""Guess the next tokens of sequences from texts that the device keeps.

The texts of a sequence are its own one, and a prediction or another text that it may repeat (a
reference).

This is prompt lookup decoding (Saxena, 2023): the last tokens of a text have occurred before, and
what followed them then may follow them now. A step verifies the guesses (drafts). The device knows
at once which of them were right, and the host only later. So the host schedules the next step as if
all drafts were right, and the device moves its slices back to where the texts really end.

One step calls, in this order: `move_back` and `draw_drafts` before the forward pass, `keep_tokens`
after sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.device import device_of
from paged_kernels.errors import check, check_tensor

FIELDS = (
    "slot",
    "sequence",
    "first_token",
    "num_tokens",
    "start",
    "first_sample",
    "num_samples",
    "sample_position",
    "moves",
    "draws",
)
"""Fields of a slice, see `move_back`."""

_FIELDS = tl.constexpr(len(FIELDS))
_MOVES, _DRAWS = (tl.constexpr(FIELDS.index(name)) for name in ("moves", "draws"))
_PREDICTED = tl.constexpr(1 << 30)  # added to places in a prediction, which come first
_TILE = 1024  # places in a text for each program
_NUM_WARPS = 4


@triton.jit
def _slice(slices_ptr, num_wrong_ptr):
    """Return the first fields of this program's slice, with its real start and its move."""
    ptr = slices_ptr + tl.program_id(0) * _FIELDS
    slot = tl.load(ptr).to(tl.int64)
    moved = tl.where(tl.load(ptr + _MOVES) != 0, tl.load(num_wrong_ptr + slot), 0)
    first_token, num_tokens = tl.load(ptr + 2), tl.load(ptr + 3)
    return slot, tl.load(ptr + 1), first_token, num_tokens, tl.load(ptr + 4) - moved, moved


@triton.jit(do_not_specialize=["group"])
def _move_kernel(
    slices_ptr,
    num_wrong_ptr,
    positions_ptr,
    seq_lens_ptr,
    sample_positions_ptr,
    slot_mapping_ptr,
    tables_ptr,
    group,
    NUM_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # entries of a row of the block tables
    TOKENS: tl.constexpr,
):
    """One program: one slice."""
    slot, sequence, first_token, num_tokens, start, moved = _slice(slices_ptr, num_wrong_ptr)
    places = tl.arange(0, TOKENS)
    inside = places < num_tokens
    positions = start + places
    tl.store(positions_ptr + first_token + places, positions, mask=inside)
    ptr = slices_ptr + tl.program_id(0) * _FIELDS
    first_sample, num_samples = tl.load(ptr + 5), tl.load(ptr + 6)
    samples = tl.load(ptr + 7) - moved + places
    tl.store(sample_positions_ptr + first_sample + places, samples, mask=places < num_samples)
    tl.store(seq_lens_ptr + sequence, start + num_tokens)
    entries = slot * WIDTH + positions // BLOCK_SIZE * NUM_GROUPS + group
    blocks = tl.load(tables_ptr + entries, mask=inside, other=0).to(tl.int64)
    written = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    tl.store(slot_mapping_ptr + first_token + places, written, mask=inside)


@triton.jit(do_not_specialize=["min_match", "max_match"])
def _find_kernel(
    slices_ptr,
    num_wrong_ptr,
    texts_ptr,
    begins_ptr,
    best_ptr,
    min_match,
    max_match,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: compares the end of one text with TILE earlier places of it."""
    slot, _, _, _, start, _ = _slice(slices_ptr, num_wrong_ptr)
    if tl.load(slices_ptr + tl.program_id(0) * _FIELDS + _DRAWS) == 0:
        return
    texts_ptr += slot * WIDTH
    length = start + 1
    begin = tl.load(begins_ptr + slot)
    oldest = tl.maximum(length - WIDTH, begin)
    ends = length - 1 - tl.program_id(1) * TILE - tl.arange(0, TILE)  # tokens up to each place
    # A match lies in the prediction, before place 0, or in the text.
    first = tl.where(ends < 0, oldest, tl.maximum(oldest, 0))
    is_equal = ends > first
    match = tl.zeros([TILE], tl.int32)
    most = tl.minimum(max_match, length)
    place = 1
    while (place <= most) & (tl.max(is_equal.to(tl.int32), axis=0) > 0):
        is_equal &= ends - place >= first
        tail = tl.load(texts_ptr + ((length - place) & (WIDTH - 1)))
        earlier = tl.load(texts_ptr + ((ends - place) & (WIDTH - 1)), mask=is_equal, other=-1)
        is_equal &= earlier == tail
        match += is_equal.to(tl.int32)
        place += 1
    # Of the longest matches, those in the prediction are best, and among these the newest one.
    places = tl.where(ends < 0, _PREDICTED + ends - begin, ends)
    keys = tl.where(match >= min_match, (match.to(tl.int64) << 32) | places.to(tl.int64), 0)
    best = tl.max(keys, axis=0)
    if best > 0:
        tl.atomic_max(best_ptr + tl.program_id(0), best, sem="relaxed")


@triton.jit
def _draw_kernel(
    slices_ptr,
    num_wrong_ptr,
    texts_ptr,
    begins_ptr,
    num_predicted_ptr,
    best_ptr,
    input_ids_ptr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One program: one slice."""
    slot, _, first_token, num_tokens, start, _ = _slice(slices_ptr, num_wrong_ptr)
    if tl.load(slices_ptr + tl.program_id(0) * _FIELDS + _DRAWS) == 0:
        return
    best = tl.load(best_ptr + tl.program_id(0))
    place = (best & 0x7FFFFFFF).to(tl.int32)
    is_predicted = place >= _PREDICTED
    place = tl.where(is_predicted, place - _PREDICTED + tl.load(begins_ptr + slot), place)
    end = tl.where(best > 0, place, start)  # without a match, the last token repeats
    num_predicted = tl.where(is_predicted, tl.minimum(-end, num_tokens - 1), 0)
    tl.store(num_predicted_ptr + slot, num_predicted)
    places = tl.arange(0, TOKENS)
    inside = places < num_tokens - 1
    # The text after the match may go on with itself.
    from_there = (end + places % (start + 1 - end)) & (WIDTH - 1)
    drafts = tl.load(texts_ptr + slot * WIDTH + from_there, mask=inside, other=0)
    tl.store(input_ids_ptr + first_token + 1 + places, drafts.to(tl.int64), mask=inside)
    tl.store(best_ptr + tl.program_id(0), 0)


@triton.jit(do_not_specialize=["num_rows"])
def _keep_kernel(
    texts_ptr,
    last_tokens_ptr,
    num_wrong_ptr,
    slots_ptr,
    positions_ptr,
    tokens_ptr,
    inputs_ptr,
    num_rows,
    WIDTH: tl.constexpr,
):
    """One program: the rows of a slot, if this is the first of them."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    if tl.load(slots_ptr + row - 1, mask=row > 0, other=-1) == slot:
        return
    token = tl.load(tokens_ptr + row)
    texts_ptr += slot * WIDTH
    tl.store(texts_ptr + (tl.load(positions_ptr + row) & (WIDTH - 1)), token)
    row += 1
    draft = tl.load(inputs_ptr + row, mask=row < num_rows, other=-1)
    while (tl.load(slots_ptr + row, mask=row < num_rows, other=-1) == slot) & (draft == token):
        token = tl.load(tokens_ptr + row)
        tl.store(texts_ptr + (tl.load(positions_ptr + row) & (WIDTH - 1)), token)
        row += 1
        draft = tl.load(inputs_ptr + row, mask=row < num_rows, other=-1)
    num_wrong = 0
    while tl.load(slots_ptr + row, mask=row < num_rows, other=-1) == slot:
        num_wrong += 1
        row += 1
    tl.store(last_tokens_ptr + slot, token)
    tl.store(num_wrong_ptr + slot, num_wrong)


@dataclass(frozen=True, slots=True)
class Texts:
    """What a device keeps of the sequence in each slot."""

    # [num_slots, width] int32 with a power of two as width: the newest tokens of prompt and output.
    # The token at a position is at position % width; the rest is arbitrary.
    tokens: Tensor
    last_tokens: Tensor  # [num_slots] int32, the newest token
    num_wrong: Tensor  # [num_slots] int32, wrong drafts of the last step that sampled for it
    # [num_slots] int32, minus the number of tokens of the prediction or reference. These are before
    # position 0 of the text, so at the end of the row, until newer tokens of the text replace them.
    begins: Tensor
    num_predicted: Tensor  # [num_slots] int32, drafts from these tokens that were drawn last


def move_back(
    slices: Tensor,
    max_tokens: int,
    num_wrong: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    sample_positions: Tensor,
    slot_mapping: Tensor,
    block_tables: Tensor,
    group: int,
    num_groups: int,
    block_size: int,
) -> None:
    """Move slices back by the number of wrong drafts before them; call it for each group.

    A slice is the consecutive tokens of one sequence that a step computes.

    Args:
        slices: [num_slices, 10] int32 with the fields of `FIELDS`: the slot; the index in
            `seq_lens`; the index of the first token in `positions`; the number of tokens; the
            position of the first one as if no draft before it were wrong; the index of the first
            sample in `sample_positions`; the number of samples, at most that of tokens, at
            consecutive positions; the position of the first one as if no draft were wrong; 1 if the
            slice may have to move; 1 if its tokens but the first are drafts to draw.
        max_tokens: the largest number of tokens of a slice, at most 128.
        num_wrong: [num_slots] int32, by how many tokens the slices of each slot move back.
        positions: [num_tokens] int32, positions of tokens; changed.
        seq_lens: [num_seqs] int32, lengths of the sequences after the step; changed.
        sample_positions: [num_samples] int32, positions of the tokens to sample; changed.
        slot_mapping: [num_tokens] int64, places of K and V in the cache of the group; changed.
        block_tables: [num_slots, any] int32, blocks of the groups in turn.
        group: the index of a KV cache group.
        num_groups: number of KV cache groups.
        block_size: tokens in a block.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    _check_slices(slices, max_tokens)
    like = slices
    check_tensor("num_wrong", num_wrong, (None,), torch.int32, like=like)
    check_tensor("positions", positions, (None,), torch.int32, like=like)
    check_tensor("seq_lens", seq_lens, (None,), torch.int32, like=like)
    check_tensor("sample_positions", sample_positions, (None,), torch.int32, like=like)
    check_tensor("slot_mapping", slot_mapping, positions.shape, torch.int64, like=like)
    check_tensor("block_tables", block_tables, (num_wrong.shape[0], None), torch.int32, like=like)
    check(0 <= group < num_groups, "group", f"must be below {num_groups}, got {group}")
    if len(slices):
        _move_kernel[(len(slices),)](
            slices,
            num_wrong,
            positions,
            seq_lens,
            sample_positions,
            slot_mapping,
            block_tables,
            group,
            NUM_GROUPS=num_groups,
            BLOCK_SIZE=block_size,
            WIDTH=block_tables.shape[1],
            TOKENS=triton.next_power_of_2(max_tokens),
            num_warps=1,
        )


def draw_drafts(
    slices: Tensor,
    max_tokens: int,
    max_length: int,
    texts: Texts,
    best: Tensor,
    input_ids: Tensor,
    min_match: int,
    max_match: int,
) -> None:
    """Guess the tokens after the first one of slices.

    They are what followed the newest of the longest matches of the end of the text. A match in the
    prediction or reference is newer than all others. If nothing matches, they repeat the last
    token.

    Args:
        slices: as for `move_back`.
        max_tokens: as for `move_back`.
        max_length: a number of tokens that no text exceeds together with the tokens before it.
        texts: what the device keeps of sequences; `num_predicted` is changed.
        best: [at least num_slices] int64 zeros, which are zeros again after the call.
        input_ids: [num_tokens] int64, tokens of the step; changed.
        min_match: number of tokens that must be equal, at least 1.
        max_match: number of tokens that are compared; all longer matches are equally good.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    _check_slices(slices, max_tokens)
    _check_texts(texts, like=slices)
    check_tensor("best", best, (None,), torch.int64, like=slices)
    check(len(best) >= len(slices), "best", f"must have {len(slices)} elements, got {len(best)}")
    check_tensor("input_ids", input_ids, (None,), torch.int64, like=slices)
    check(1 <= min_match <= max_match, "min_match", f"must be 1 to {max_match}, got {min_match}")
    if not len(slices):
        return
    width = texts.tokens.shape[1]
    _find_kernel[(len(slices), triton.cdiv(min(max_length, width), _TILE))](
        slices,
        texts.num_wrong,
        texts.tokens,
        texts.begins,
        best,
        min_match,
        max_match,
        WIDTH=width,
        TILE=_TILE,
        num_warps=_NUM_WARPS,
    )
    _draw_kernel[(len(slices),)](
        slices,
        texts.num_wrong,
        texts.tokens,
        texts.begins,
        texts.num_predicted,
        best,
        input_ids,
        WIDTH=width,
        TOKENS=triton.next_power_of_2(max_tokens),
        num_warps=1,
    )


def keep_tokens(
    texts: Texts, slots: Tensor, positions: Tensor, tokens: Tensor, inputs: Tensor
) -> None:
    """Add sampled tokens to the texts, without those after a wrong draft; count the wrong drafts.

    Calling it again for the same step changes nothing, but for tokens that are sampled again.

    Args:
        texts: what the device keeps of sequences; changed.
        slots: [rows] int32. A negative slot is padding. Consecutive rows of one slot sample
            consecutive tokens of a sequence, with a draft before each but the first one.
        positions: [rows] int32, positions of the sampled tokens.
        tokens: [rows] int32, the sampled tokens.
        inputs: [rows] int64, the tokens before them.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    _check_texts(texts, like=slots)
    device_of("slots", slots)
    check_tensor("slots", slots, (None,), torch.int32, like=slots)
    rows = slots.shape[0]
    check_tensor("positions", positions, (rows,), torch.int32, like=slots)
    check_tensor("tokens", tokens, (rows,), torch.int32, like=slots)
    check_tensor("inputs", inputs, (rows,), torch.int64, like=slots)
    if rows:
        _keep_kernel[(rows,)](
            texts.tokens,
            texts.last_tokens,
            texts.num_wrong,
            slots,
            positions,
            tokens,
            inputs,
            rows,
            WIDTH=texts.tokens.shape[1],
            num_warps=1,
        )


def _check_texts(texts: Texts, like: Tensor) -> None:
    check_tensor("tokens", texts.tokens, (None, None), torch.int32, like=like)
    num_slots, width = texts.tokens.shape
    check(width & (width - 1) == 0, "tokens", f"must have a power of two of columns, got {width}")
    for name in ("last_tokens", "num_wrong", "begins", "num_predicted"):
        check_tensor(name, getattr(texts, name), (num_slots,), torch.int32, like=like)


def _check_slices(slices: Tensor, max_tokens: int) -> None:
    device_of("slices", slices)
    check_tensor("slices", slices, (None, len(FIELDS)), torch.int32, like=slices)
    check(0 < max_tokens <= 128, "max_tokens", f"must be 1 to 128, got {max_tokens}")
