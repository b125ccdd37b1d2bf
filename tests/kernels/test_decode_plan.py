"""Plans of decode attention: splits of the keys that fill the device in whole waves."""

from __future__ import annotations

from itertools import count

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from paged_kernels.device import Device, pretend
from paged_kernels.paged_decode import plan_decode
from paged_kernels.splits import SplitPlan
from paged_kernels.tuning import decode_config

H200 = Device(arch=90, num_sms=132)
HEADS, KV_HEADS, DIM = 32, 8, 128  # sizes of Llama-3-8B
CONFIG = decode_config(H200.arch, DIM, 2, 16, quantized=False)
PER_WAVE = H200.num_sms * CONFIG.programs_per_sm // KV_HEADS


def planned(device: torch.device, lengths: list[int], window: int | None = None) -> SplitPlan:
    """The plan for an H200, wherever the kernel runs."""
    q = torch.empty(len(lengths), HEADS, DIM, dtype=torch.bfloat16, device=device)
    cache = torch.empty(1, 2, KV_HEADS, 16, DIM, dtype=torch.bfloat16, device=device)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    with pretend(H200):
        return plan_decode(q, cache, seq_lens, window=window)


def num_splits(tiles: list[int], size: int) -> int:
    return sum(-(-each // size) for each in tiles)


def wanted_size(tiles: list[int]) -> int:
    """The size of splits in tiles, found by trying one after the other."""
    share = -(-sum(tiles) // PER_WAVE)
    fewest_waves = max(1, -(-sum(each > 0 for each in tiles) // PER_WAVE))
    for waves in count(fewest_waves):
        most = waves * PER_WAVE
        first = max(1, sum(tiles) // most)
        size = next(size for size in count(first) if num_splits(tiles, size) <= most)
        if size <= 2 * share or waves > fewest_waves or not share:
            return size
    raise AssertionError


LENGTHS = st.lists(
    st.one_of(st.integers(0, 200), st.integers(1000, 1100), st.integers(0, 40_000)), max_size=70
)


@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lengths=LENGTHS, window=st.sampled_from([None, 1000]))
@example(lengths=[1024] * 64, window=None)
@example(lengths=[8192] * 8, window=None)  # 56 splits if it were cut by the mean alone
@example(lengths=[1024] * (PER_WAVE - 1) + [32_768], window=None)  # not one wave: see the kernel
@example(lengths=[1024] * 255 + [32_768], window=None)
@example(lengths=[0] * 300 + [5], window=None)
@example(lengths=[2_000_000, 1], window=None)
def test_splits_cover_all_keys_in_as_few_waves_as_possible(device, window, lengths):
    plan = planned(device, lengths, window)
    begins = [max(0, n - window) // plan.tile * plan.tile if window else 0 for n in lengths]
    tiles = [-(-(n - first) // plan.tile) for n, first in zip(lengths, begins, strict=True)]
    size = wanted_size(tiles)
    used = [split for split in plan.splits.tolist() if split[0] >= 0]
    assert plan.splits.tolist()[: len(used)] == used  # programs without work start last
    assert sorted(used) == sorted(
        [seq, begin, min(begin + size * plan.tile, length), int(each <= size)]
        for seq, (first, length, each) in enumerate(zip(begins, lengths, tiles, strict=True))
        for begin in range(first, length, size * plan.tile)
    )
    for seq, (first, number) in enumerate(
        zip(plan.first_split.tolist(), plan.num_splits.tolist(), strict=True)
    ):
        assert [split for split in used if split[0] == seq] == used[first : first + number]
    num_read = sum(each > 0 for each in tiles)
    if 2 * num_read <= PER_WAVE:
        assert len(used) <= PER_WAVE
    assert len(used) <= (-(-num_read // PER_WAVE) + 1) * PER_WAVE


def test_eight_long_sequences_fill_one_wave(device):
    plan = planned(device, [8192] * 8)
    assert PER_WAVE == 49
    assert plan.num_splits.tolist() == [6] * 8


def test_a_plan_of_few_sequences_has_room_for_one_wave_only(device):
    """Programs beyond it would start for nothing in each layer."""
    assert len(planned(device, [1024]).splits) == PER_WAVE
    assert len(planned(device, [1024] * (PER_WAVE // 2)).splits) == PER_WAVE
