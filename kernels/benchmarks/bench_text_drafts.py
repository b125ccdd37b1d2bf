"""Benchmark of drafts that the device draws from the texts of sequences."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call, Work
from paged_kernels.text_drafts import FIELDS, Texts, draw_drafts, keep_tokens, move_back

DRAFTS = 16  # drafts of each sequence
BLOCK_SIZE, MATCH = 16, 24
_INT, _LONG = torch.int32.itemsize, torch.int64.itemsize


def texts_of(bench: Bench, rows: int, length: int) -> Texts:
    """Return texts that repeat themselves after each 1000 tokens."""
    width = 1 << (length + DRAFTS - 1).bit_length()
    period = torch.randint(bench.vocab_size, (rows, 1000), dtype=torch.int32, device=bench.device)
    tokens = period.repeat(1, -(-width // 1000))[:, :width].contiguous()
    zeros = torch.zeros(rows, dtype=torch.int32, device=bench.device)
    return Texts(tokens, *(zeros.clone() for _ in range(4)))


def slices_of(bench: Bench, rows: int, length: int) -> torch.Tensor:
    """Return slices with `DRAFTS` drafts after the last token of each text."""
    numbers = torch.arange(rows, dtype=torch.int32, device=bench.device)
    values = {
        "slot": numbers,
        "sequence": numbers,
        "first_token": numbers * (DRAFTS + 1),
        "num_tokens": torch.full_like(numbers, DRAFTS + 1),
        "start": torch.full_like(numbers, length - 1),
        "first_sample": numbers * (DRAFTS + 1),
        "num_samples": torch.full_like(numbers, DRAFTS + 1),
        "sample_position": torch.full_like(numbers, length),
        "moves": torch.ones_like(numbers),
        "draws": torch.ones_like(numbers),
    }
    return torch.stack([values[name] for name in FIELDS], dim=1)


def draw(bench: Bench, rows: int, length: int) -> Call:
    longs = torch.zeros(rows * (DRAFTS + 1), dtype=torch.int64, device=bench.device)
    texts, slices = texts_of(bench, rows, length), slices_of(bench, rows, length)
    return partial(draw_drafts, slices, DRAFTS + 1, length, texts, longs.clone(), longs, 1, MATCH)


def move(bench: Bench, rows: int, length: int) -> Call:
    slices = slices_of(bench, rows, length)
    ints = torch.zeros(rows * (DRAFTS + 1), dtype=torch.int32, device=bench.device)
    tables = ints.new_zeros(rows, (length + DRAFTS) // BLOCK_SIZE + 1)
    step = (ints, ints[:rows].clone(), ints.clone(), ints.long(), tables)
    return partial(move_back, slices, DRAFTS + 1, ints.new_zeros(rows), *step, 0, 1, BLOCK_SIZE)


def keep(bench: Bench, rows: int, length: int) -> Call:
    texts = texts_of(bench, rows, length)
    slots = torch.arange(rows, dtype=torch.int32, device=bench.device)
    slots = slots.repeat_interleave(DRAFTS + 1)
    positions = torch.arange(DRAFTS + 1, dtype=torch.int32, device=bench.device).repeat(rows)
    tokens = torch.ones_like(slots)
    return partial(keep_tokens, texts, slots, positions + length - 1, tokens, tokens.long())


def run(bench: Bench) -> None:
    lengths = bench.sizes(1024, 32768)
    for length in lengths:
        bench.warm_up(*(make(bench, 1, length) for make in (draw, move, keep)))
    for rows in bench.sizes(1, 16, 64):
        drafted = rows * (DRAFTS + 1)
        for length in lengths:
            read = Work(bytes=rows * (length * _INT + DRAFTS * (_INT + _LONG)))
            make = partial(draw, bench, rows, length)
            bench.time("draw_drafts", f"{rows} texts of {length}", read, make, dtype=torch.int32)
        moved = Work(bytes=drafted * (2 * _INT + _LONG))
        kept = Work(bytes=drafted * (4 * _INT + _LONG))
        for name, work, step in (("move_back", moved, move), ("keep_tokens", kept, keep)):
            made = partial(step, bench, rows, lengths[0])
            bench.time(name, f"{rows} texts", work, made, dtype=torch.int32)
