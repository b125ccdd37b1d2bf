"""A pool of layers with different heads gives each of them the numbers that it stored."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from mixed_layers import GROUPS, Make, Steps, mixed_spec

from paged_backend.models.kv_cache import KVCacheFormat, KVCacheSpec, KVScales
from paged_backend.models.kv_pool import PoolTensor
from paged_backend.platforms.cpu.attention import CpuAttention
from paged_backend.platforms.portable.attention import TorchAttention
from paged_backend.values.kv_cache_groups import (
    KVSizes,
    group_layers,
    group_layers_of_stage,
)

CPU = torch.device("cpu")
FORMATS = [
    KVCacheFormat(torch.float32),
    KVCacheFormat(torch.int8, KVScales.TOKEN_HEAD),
]
LARGE, SMALL = KVSizes(2, 32, 32), KVSizes(1, 16, 16)


@pytest.mark.parametrize("stored", FORMATS, ids=str)
@pytest.mark.parametrize(
    "make", [CpuAttention, partial(TorchAttention, device=CPU)], ids=["cpu", "torch"]
)
def test_layers_compute_in_one_pool_what_they_compute_alone(
    make: Make, stored: KVCacheFormat
) -> None:
    together, alone = Steps(CPU).together(make, stored), Steps(CPU).alone(make, stored)
    for number, (got, wanted) in enumerate(zip(together, alone, strict=True)):
        assert torch.equal(got, wanted), f"layer {number % 4}, step {number // 4}"


def test_a_block_has_room_for_the_largest_group() -> None:
    spec = mixed_spec(FORMATS[1])
    # 2 heads of 32 in one layer, or 1 head of 16 in two: as many scales, but half the numbers.
    assert spec.bytes_per_block == 8 * (2 * 2 * 32 + 4 * 2 * 2)
    assert spec.bytes_per_token == 2 * 2 * 32 + 2 * 2 * 16 + 4 * (4 + 4)
    assert not spec.is_uniform


def test_no_layer_writes_to_the_memory_of_another() -> None:
    pool = PoolTensor(mixed_spec(FORMATS[0]), 3, lambda sizes: (sizes.numbers,), torch.zeros)
    for block, layers in enumerate([(0,), (1, 2), (1,)]):
        for layer in layers:
            pool.of(layer)[block] += 1
    written = pool.memory[0]
    assert written.tolist() == [[1.0] * 128, [1.0] * 64 + [0.0] * 64, [1.0] * 32 + [0.0] * 96]
    pool.copy_block(0, 2)
    assert pool.of(0)[2].tolist() == [1.0] * 128


def test_layers_that_are_alike_have_contiguous_tensors() -> None:
    sizes = {layer: LARGE for group in GROUPS for layer in group.layers}
    spec = KVCacheSpec(GROUPS, sizes, 8, torch.float32)
    pool = PoolTensor(spec, 3, lambda each: (each.numbers,), torch.zeros)
    assert pool.memory.shape == (2, 3, 128)
    assert all(pool.of(layer).is_contiguous() for layer in range(3))
    assert pool.of(0).data_ptr() == pool.of(1).data_ptr() != pool.of(2).data_ptr()


def test_groups_keep_as_many_numbers_of_a_token() -> None:
    """5 large layers that see everything, 20 small ones with a window: 4 of them in a block."""
    windows = [None if layer % 5 == 4 else 64 for layer in range(25)]
    kept = [LARGE if window is None else SMALL for window in windows]
    groups = group_layers(windows, 4096, kept)
    sizes = [(group.window, len(group.layers)) for group in groups]
    assert sizes == [(64, 20), (None, 5)]
    assert sorted(layer for group in groups for layer in group.layers) == list(range(25))
    # In the groups of the two layers of a stage, each kind has its share.
    of_stage = group_layers_of_stage(windows, 4096, range(3, 5), kept)
    assert [group.layers for group in of_stage] == [(3,), (4,)]
