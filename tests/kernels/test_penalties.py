"""Penalties, forbidden stops and counts against lists of tokens."""

from __future__ import annotations

import math

import pytest
import torch
from paged_kernels.errors import ArgumentError
from paged_kernels.penalties import Penalties, apply_penalties, count_tokens
from paged_kernels.reference.penalties import penalized
from torch import Tensor

NONE = (1.0, 0.0, 0.0)


def penalties_of(
    params: list[tuple[float, float, float]],
    device: torch.device,
    min_positions: list[int] | None = None,
    stop_ids: list[list[int]] | None = None,
) -> Penalties:
    columns = [torch.tensor(column, device=device) for column in zip(*params, strict=True)]
    slots = len(params)
    return Penalties(
        *columns,
        ints(min_positions or [0] * slots, device),
        ints(stop_ids or [[-1]] * slots, device),
    )


def ints(values: list[int] | list[list[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def counts_of(prompts: list[list[int]], outputs: list[list[int]], vocab: int) -> Tensor:
    counts = torch.zeros(len(prompts), vocab, dtype=torch.int32)
    for row, prompt, output in zip(counts, prompts, outputs, strict=True):
        row[prompt] = 1
        row += 2 * torch.tensor(output, dtype=torch.int64).bincount(minlength=vocab).int()
    return counts


@pytest.mark.parametrize("vocab", [5, 300, 2 * 16384 + 3])
def test_penalties(vocab: int, device: torch.device) -> None:
    params = [NONE, (1.3, 0.0, 0.0), (0.7, 0.5, -0.2), (1.0, -1.0, 0.0), (1.0, 0.0, 1.5)]
    slots = [3, 1, 0, 4, 2]
    prompts = [torch.randint(vocab, (50,)).tolist() for _ in params]
    outputs = [torch.randint(vocab, (40,)).tolist() * 2 for _ in params]
    outputs[1][:2] = [0, vocab - 1]
    counts = counts_of(prompts, outputs, vocab).to(device)
    logits = torch.randn(5, vocab)
    logits[:, ::7] = -math.inf
    found = logits.to(device).clone()
    nines, penalties = ints([9] * 5, device), penalties_of(params, device)
    apply_penalties(found, ints(slots, device), nines, nines.long(), counts, penalties)
    for row, slot in enumerate(slots):
        expected = penalized(logits[row], prompts[slot], outputs[slot], *params[slot])
        torch.testing.assert_close(found[row].cpu().double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[2].cpu(), logits[2])


def test_stops_are_forbidden_before_their_position(device: torch.device) -> None:
    """Penalized ones too, in any chunk; ids that are no tokens are ignored."""
    vocab = 20000
    stop_ids = [[5, 16384, 19999, vocab, 2**31 - 1, -1]] * 3
    penalties = penalties_of([(2.0, 0.5, 0.5), NONE, NONE], device, [10, 10, 0], stop_ids)
    counts = counts_of([[5, 6]] * 3, [[16384, 7]] * 3, vocab).to(device)
    guarded = torch.ones(6, vocab)
    found = guarded.to(device).clone()
    slots, positions = [0, 1, 0, 2], [9, 9, 10, 0]
    inputs = ints([11, 5, 12, 3], device).long()
    where = ints(slots, device), ints(positions, device), inputs
    apply_penalties(found[1:5], *where, counts, penalties)
    forbidden = [5, 16384, 19999]
    changed = penalized(guarded[0], [5, 6], [16384, 7], 2.0, 0.5, 0.5, forbidden)
    late = penalized(guarded[0], [5, 6], [16384, 7], 2.0, 0.5, 0.5)
    expected = guarded.clone()
    expected[1], expected[3] = changed, late
    expected[2, forbidden] = -math.inf
    assert torch.equal(found.cpu(), expected)


def test_padding_is_left_alone(device: torch.device) -> None:
    logits = torch.randn(2, 100, device=device)
    before = logits.clone()
    penalties = penalties_of([(2.0, 1.0, 1.0)], device, [99], [[1, 2]])
    counts = torch.full((1, 100), 3, dtype=torch.int32, device=device)
    zeros = ints([0, 0], device)
    apply_penalties(logits, ints([-1, -1], device), zeros, zeros.long(), counts, penalties)
    assert torch.equal(logits, before)


def test_drafts_count_as_output(device: torch.device) -> None:
    """Each row of a slot counts the drafts before it, and no token of another slot."""
    vocab, prompt, output, drafts = 300, [3, 4, 5], [5, 6, 6], [6, 7, 3, 7]
    params = (1.3, 0.5, 0.25)
    counts = counts_of([prompt] * 3, [output] * 3, vocab).to(device)
    logits = torch.randn(8, vocab)
    found = logits.to(device).clone()
    slots, inputs = ints([2, 0, 0, 0, 0, 0, 1, -1], device), [6, 6, *drafts, 6, 0]
    penalties, zeros = penalties_of([params] * 3, device), ints([0] * 8, device)
    apply_penalties(found, slots, zeros, ints(inputs, device).long(), counts, penalties)
    for row, offset in enumerate([0, 0, 1, 2, 3, 4, 0]):
        expected = penalized(logits[row], prompt, output + drafts[:offset], *params)
        torch.testing.assert_close(found[row].cpu().double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found[7].cpu(), logits[7])


@pytest.mark.parametrize("num_before", [0, 126])
def test_tokens_are_counted(device: torch.device, num_before: int) -> None:
    """Padding, what is no token, and the tokens after a wrong draft are not counted.

    The rows of a slot may lie in two programs of the kernel. The mark of the prompt stays.
    """
    guarded = torch.zeros(6, 52, dtype=torch.int32, device=device)
    guarded[2, 7] = 1
    # Slot 1: both drafts are right. Slot 2: the second of three is wrong. Slot 3: none.
    slots = [-1] * num_before + [1, 1, 1, 2, 2, 2, 2, 3, -1, -1, 0]
    tokens = [5] * num_before + [7, 7, 51, 9, 8, 6, 5, 52, 3, 3, 0]
    inputs = [5] * num_before + [4, 7, 7, 1, 9, 2, 6, 0, 3, 3, 5]
    count_tokens(
        guarded[1:5], ints(slots, device), ints(tokens, device), ints(inputs, device).long()
    )
    expected = torch.zeros(6, 52, dtype=torch.int32)
    expected[2, 7], expected[2, 51] = 5, 2
    expected[3, 9], expected[3, 8] = 2, 2
    expected[1, 0] = 2
    assert torch.equal(guarded.cpu(), expected)


def test_bad_calls_are_refused(device: torch.device) -> None:
    logits = torch.zeros(4, 16, device=device)
    ids = ints([0] * 4, device)
    inputs = ids.long()
    counts = torch.zeros(2, 16, dtype=torch.int32, device=device)
    good = penalties_of([NONE] * 2, device)
    three = penalties_of([NONE] * 3, device)
    bad = {
        "logits": (logits.double(), ids, ids, inputs, counts, good),
        "slots": (logits, ids[:3], ids, inputs, counts, good),
        "positions": (logits, ids, ids.long(), inputs, counts, good),
        "inputs": (logits, ids, ids, ids, counts, good),
        "token_counts": (logits, ids, ids, inputs, counts[:, :8].contiguous(), good),
        "repetition": (logits, ids, ids, inputs, counts, three),
        "stop_ids": (
            logits,
            ids,
            ids,
            inputs,
            counts,
            penalties_of([NONE] * 2, device, stop_ids=[[1]] * 3),
        ),
    }
    apply_penalties(logits, ids, ids, inputs, counts, good)
    for name, arguments in bad.items():
        with pytest.raises(ArgumentError) as refused:
            apply_penalties(*arguments)
        assert refused.value.name == name
    for name, others in {
        "token_counts": (counts.long(), ids, ids, inputs),
        "slots": (counts, ids.long(), ids, inputs),
        "tokens": (counts, ids, ids[:3], inputs),
        "inputs": (counts, ids, ids, inputs[:3]),
    }.items():
        with pytest.raises(ArgumentError) as refused:
            count_tokens(*others)
        assert refused.value.name == name
    empty = ids[:0]
    apply_penalties(logits[:0], empty, empty, empty.long(), counts, good)
    count_tokens(counts, empty, empty, empty.long())
