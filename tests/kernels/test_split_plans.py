"""Plans of attention: the splits of the keys with the shortest modeled time."""

from __future__ import annotations

import heapq
import json
import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from paged_kernels.device import Device, pretend
from paged_kernels.paged_decode import plan_decode
from paged_kernels.reference.splits import modeled_us
from paged_kernels.splits import SplitPlan, SplitShape
from paged_kernels.tuning.decode import FEW_PROGRAMS, decode_config
from paged_kernels.tuning.prefill import prefill_config

H200 = Device(arch=90, num_sms=132)
HEADS, KV_HEADS, DIM = 32, 8, 128  # sizes of Llama-3-8B
MOST_PARTS = 64
RESULTS = Path(__file__).parents[2] / "loadtest/results"


def planned(device: torch.device, lengths: list[int], window: int | None = None) -> SplitPlan:
    """The plan for an H200, wherever the kernel runs."""
    q = torch.empty(len(lengths), HEADS, DIM, dtype=torch.bfloat16, device=device)
    cache = torch.empty(1, 2, KV_HEADS, 16, DIM, dtype=torch.bfloat16, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    with pretend(H200):
        return plan_decode(q, cache, seq_lens, window=window)


def shape_of(num_seqs: int) -> SplitShape:
    """What determines the plan of a number of sequences, besides their lengths."""
    few = num_seqs * KV_HEADS <= FEW_PROGRAMS
    config = decode_config(H200.arch, DIM, 2, 16, quantized=False, few=few)
    slots = H200.num_sms * config.programs_per_sm
    return SplitShape(num_seqs, KV_HEADS, slots, config.tile, None, config.costs)


def shortest_us(shape: SplitShape, tiles: list[int]) -> float:
    """The modeled time of the best size that a plan has room for."""
    return min(modeled_us(shape, tiles, size) for size in fitting_sizes(shape, tiles))


def fitting_sizes(shape: SplitShape, tiles: list[int]) -> list[int]:
    """The sizes that a plan chooses from."""
    longest = max(tiles, default=0)
    sizes = {max(1, -(-longest // parts)) for parts in range(1, MOST_PARTS + 1)}
    return sorted(size for size in sizes if num_splits(tiles, size) <= shape.max_splits)


def num_splits(tiles: list[int], size: int) -> int:
    return sum(-(-each // size) for each in tiles)


LENGTHS = st.lists(
    st.one_of(st.integers(0, 200), st.integers(1000, 1100), st.integers(0, 40_000)), max_size=70
)


@settings(
    max_examples=examples(12),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lengths=LENGTHS, window=st.sampled_from([None, 1000]))
@example(lengths=[1024] * 64, window=None)
@example(lengths=[8192] * 8, window=None)
@example(lengths=[1024] * 65 + [32_768], window=None)
@example(lengths=[1024] * 255 + [32_768], window=None)
@example(lengths=[0] * 300 + [5], window=None)
@example(lengths=[2_000_000, 1], window=None)
def test_splits_cover_all_keys_in_the_shortest_modeled_time(device, window, lengths):
    plan = planned(device, lengths, window)
    begins = [max(0, n - window) // plan.tile * plan.tile if window else 0 for n in lengths]
    tiles = [-(-(n - first) // plan.tile) for n, first in zip(lengths, begins, strict=True)]
    used = [split for split in plan.splits.tolist() if split[0] >= 0]
    assert plan.splits.tolist()[: len(used)] == used  # programs without work start last
    size = max((-(-(end - begin) // plan.tile) for _, begin, end, _ in used), default=1)
    assert sorted(used) == sorted(
        [seq, begin, min(begin + size * plan.tile, length), int(each <= size)]
        for seq, (first, length, each) in enumerate(zip(begins, lengths, tiles, strict=True))
        for begin in range(first, length, size * plan.tile)
    )
    for seq, (first, number) in enumerate(
        zip(plan.first_split.tolist(), plan.num_splits.tolist(), strict=True)
    ):
        assert [split for split in used if split[0] == seq] == used[first : first + number]
    shape = shape_of(len(lengths))
    assert len(plan.splits) == shape.max_splits
    if used:
        assert modeled_us(shape, tiles, size) <= 1.0001 * shortest_us(shape, tiles)


def test_the_programs_of_many_long_sequences_are_more_than_int32_holds(device):
    config = decode_config(H200.arch, DIM, 4, 16, quantized=False)
    shape = SplitShape(2048, HEADS, H200.num_sms, config.tile, None, config.costs)
    tiles = [2**20 // shape.tile] * shape.num_items
    assert sum(tiles) * shape.programs_per_split >= 2**31
    plan = shape.plan(torch.full((shape.num_items,), 2**20, dtype=torch.int32, device=device))
    size = int(plan.splits[0, 2] - plan.splits[0, 1]) // shape.tile
    assert modeled_us(shape, tiles, size) <= 1.0001 * shortest_us(shape, tiles)


@pytest.mark.parametrize("count", [100, 131, 132, 133, 198, 264])
def test_a_long_sequence_does_not_delay_many_short_ones(count, device):
    """Also where the number of programs fills the last wave, so that it costs nothing."""
    plan = planned(device, [1024] * (count - 1) + [131_072])
    assert plan.num_splits.tolist()[:-1] == [1] * (count - 1)
    assert plan.num_splits.tolist()[-1] > 20


def simulated_us(shape: SplitShape, tiles: list[int], size: int) -> float:
    """The time of programs that start in the plan's order, each as soon as another one ends.

    All programs that run read at the same rate.
    """
    costs, pieces = shape.costs, [splits_of(each, size) for each in tiles]
    divided = [piece for each in pieces if len(each) > 1 for piece in each]
    whole = [piece for each in pieces if len(each) == 1 for piece in each]
    waiting = [piece for piece in divided + whole for _ in range(shape.programs_per_split)][::-1]
    ends: list[float] = []  # the ends of the programs that run, as a heap
    now_us, read = costs.start, 0.0  # tiles that a program since the beginning would have read
    while waiting or ends:
        while waiting and len(ends) < shape.programs_per_wave:
            heapq.heappush(ends, read + waiting.pop())
        now_us += (ends[0] - read) * math.hypot(costs.tile, len(ends) * costs.share)
        read = heapq.heappop(ends)
    if divided:
        now_us += costs.merge + costs.merge_split * max(map(len, pieces))
        now_us += costs.merge_program * shape.programs_per_split * len(divided)
    return now_us


def splits_of(tiles: int, size: int) -> list[int]:
    """The tiles of each split of an item."""
    return [min(size, tiles - begin) for begin in range(0, tiles, size)]


def test_plans_of_mixed_lengths_are_nearly_the_fastest_ones():
    random = Random(0)
    for count in (20, 67, 100, 131, 132, 197, 256):
        shape = shape_of(count)
        for mean in (4, 16, 64):
            tiles = [1 + int(random.expovariate(1 / mean)) for _ in range(count)]
            tiles[0] = random.choice([tiles[0], 128, 2048])
            sizes = fitting_sizes(shape, tiles)
            chosen = min(sizes, key=lambda size: modeled_us(shape, tiles, size))
            best_us = min(simulated_us(shape, tiles, size) for size in {*sizes[::3], chosen})
            assert simulated_us(shape, tiles, chosen) <= 1.2 * best_us, tiles


# Splits of each sequence, and waves of programs: 528 at once, or 132 for few sequences.
EIGHT_SHAPES = {
    "1x1k": (16, 0.97),
    "1x8k": (16, 0.97),
    "8x1k": (4, 0.48),
    "8x8k": (8, 0.97),
    "64x1k": (1, 0.97),
    "32x8k": (2, 0.97),
    "128x4k": (1, 1.94),
    "256x1k": (1, 3.88),
}


@pytest.mark.parametrize("name", EIGHT_SHAPES)
def test_plans_of_the_measured_shapes(name, device):
    lengths = lengths_of(name)
    splits, waves = EIGHT_SHAPES[name]
    plan, shape = planned(device, lengths), shape_of(len(lengths))
    assert plan.num_splits.tolist() == [splits] * len(lengths)
    programs = int(plan.num_splits.sum()) * KV_HEADS
    assert programs / shape.programs_per_wave == pytest.approx(waves, abs=0.01)


def lengths_of(name: str) -> list[int]:
    """Lengths by a name such as 32x8k."""
    count, length = name.split("x")
    keys = int(length.removesuffix("k")) * (1024 if length.endswith("k") else 1)
    return [keys] * int(count)


def rows_of(file: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / file).read_text())["rows"]


def measured(num_seqs: int) -> dict[str, Any]:
    """The fields of a measured row that identify the configuration for `num_seqs` sequences."""
    few = num_seqs * KV_HEADS <= FEW_PROGRAMS
    config = decode_config(H200.arch, DIM, 2, 16, quantized=False, few=few)
    return {"stages": config.num_stages, "regs": config.max_registers}


def test_modeled_times_are_within_ten_percent_of_the_measured_ones():
    compared, best_of = 0, {}
    for row in rows_of("decode-attention-h200.json"):
        lengths = lengths_of(row["shape"])
        shape = shape_of(len(lengths))
        if row["empties"] or row["splits"] > shape.max_splits:
            continue
        if any(row[key] != value for key, value in measured(len(lengths)).items()):
            continue
        modeled = modeled_us(shape, [-(-each // shape.tile) for each in lengths], row["size"])
        assert modeled == pytest.approx(row["us"], rel=0.1), row
        best_of.setdefault(row["shape"], []).append((modeled, row["us"]))
        compared += 1
    assert compared >= 65 and set(EIGHT_SHAPES) <= set(best_of)
    for times in best_of.values():  # what the model chooses is as fast as the best
        assert min(times)[1] <= 1.05 * min(us for _, us in times)


def test_modeled_times_of_short_prompts_are_within_ten_percent_of_the_measured_ones():
    config = prefill_config(H200.arch, DIM, 2)
    queries, compared = config.rows // (HEADS // KV_HEADS), 0
    for row in rows_of("prefill-attention-h200.json"):
        ends = [min(first + queries, row["new"]) for first in range(0, row["new"], queries)]
        tiles = [-(-(row["keys"] - row["new"] + end) // config.tile) for end in ends]
        shape = SplitShape(len(tiles), KV_HEADS, H200.num_sms, config.tile, None, config.costs)
        if num_splits(tiles, row["size"]) > shape.splits_per_wave:
            continue
        assert modeled_us(shape, tiles, row["size"]) == pytest.approx(row["us"], rel=0.1), row
        compared += 1
    assert compared >= 25


def test_a_plan_of_few_sequences_has_room_for_one_wave_only(device):
    """Programs beyond it would start for nothing in each layer."""
    for count in (1, 4, 33):
        shape = shape_of(count)
        assert len(planned(device, [1024] * count).splits) == shape.splits_per_wave
