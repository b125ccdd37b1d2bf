from __future__ import annotations

import pytest
import torch
from paged_kernels.block_copy import copy_blocks
from paged_kernels.device import INTERPRETED
from paged_kernels.errors import ArgumentError
from paged_kernels.reference import block_copy as reference
from torch import Tensor


def ids(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def pool(num_blocks: int, block: tuple[int, ...], dtype: torch.dtype, layers: int = 2) -> Tensor:
    """Random bits, so that NaN of every kind is among them; compare only bytes."""
    size = torch.empty(0, dtype=dtype).element_size()
    shape = (layers, num_blocks, *block[:-1], block[-1] * size)
    return torch.randint(256, shape, dtype=torch.uint8).view(dtype)


def pinned(tensor: Tensor) -> Tensor:
    return tensor if INTERPRETED else tensor.pin_memory()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize(
    ("dtype", "block"),
    [
        (torch.bfloat16, (2, 2, 8, 16)),
        (torch.float16, (2, 1, 8, 80)),
        (torch.float32, (2, 2, 16, 96)),  # three tiles, the last one not filled
        (torch.float8_e4m3fn, (2, 1, 8, 80)),
        (torch.int8, (2, 4, 32, 64)),  # two tiles exactly
        (torch.float32, (2, 3, 8)),  # scales for tokens and heads
        (torch.uint8, (16,)),
    ],
)
def test_copies_every_layer_and_nothing_else(
    dtype: torch.dtype, block: tuple[int, ...], device: torch.device
) -> None:
    source, target = pool(5, block, dtype).to(device), pool(7, block, dtype).to(device)
    expected, before = target.clone(), source.clone()
    source_ids, target_ids = ids([4, 0, 0, 2], device), ids([1, 6, 3, 0], device)
    reference.copy_blocks(source, expected, source_ids, target_ids)
    copy_blocks(source, target, source_ids, target_ids)
    assert same_bytes(target, expected)
    assert same_bytes(source, before)


def test_within_one_pool(device: torch.device) -> None:
    cache = pool(6, (2, 2, 8, 16), torch.bfloat16, layers=3).to(device)
    expected = cache.clone()
    source_ids, target_ids = ids([5, 5, 1], device), ids([0, 2, 4], device)
    reference.copy_blocks(expected, expected, source_ids, target_ids)
    copy_blocks(cache, cache, source_ids, target_ids)
    assert same_bytes(cache, expected)


def test_negative_ids_are_skipped(device: torch.device) -> None:
    # Blocks before the pool: a copy that took the id for real would change or read the first.
    memory = pool(8, (32,), torch.int8, layers=1).to(device)
    target, source = memory[:, 2:4], memory[:, 6:]
    expected = memory.clone()
    expected[:, 3] = memory[:, 7]
    copy_blocks(source, target, ids([-1, 1, 0], device), ids([0, 1, -1], device))
    assert same_bytes(memory, expected)


def test_to_pinned_memory_and_back(device: torch.device) -> None:
    cache = pool(9, (2, 2, 8, 16), torch.bfloat16).to(device)
    staging = pinned(pool(4, (2, 2, 8, 16), torch.bfloat16))
    blocks, places = ids([7, 2, 5], device), torch.arange(3, dtype=torch.int32, device=device)
    last = staging[:, 3].clone()
    copy_blocks(cache, staging, blocks, places)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert same_bytes(staging[:, :3], cache[:, [7, 2, 5]])
    assert same_bytes(staging[:, 3], last)
    fresh = torch.zeros_like(cache)
    copy_blocks(staging, fresh, places, blocks)
    assert same_bytes(fresh[:, [7, 2, 5]], cache[:, [7, 2, 5]])
    assert same_bytes(fresh[:, [0, 1, 3, 4, 6, 8]], torch.zeros_like(cache[:, :6]))


def test_more_tiles_than_programs(device: torch.device) -> None:
    layers, pairs = 10, 9  # 90 tiles; the interpreter's device takes 64 programs
    source = pool(pairs, (16,), torch.uint8, layers).to(device)
    target = torch.zeros_like(source)
    order = torch.arange(pairs, dtype=torch.int32, device=device)
    copy_blocks(source, target, order, order.flip(0))
    assert same_bytes(target, source.flip(1))


def test_no_pairs(device: torch.device) -> None:
    cache = pool(2, (16,), torch.uint8).to(device)
    before = cache.clone()
    copy_blocks(cache, cache, ids([], device), ids([], device))
    assert same_bytes(cache, before)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    cache, two = torch.zeros(2, 4, 2, 16, device=device), ids([0, 1], device)
    odd = torch.zeros(2, 4, 3, device=device)
    calls = {
        "source": [
            lambda: copy_blocks(cache[0, 0], cache, two, two),
            lambda: copy_blocks(cache[:, :2], cache, two, two),
            lambda: copy_blocks(odd, odd, two, two),
            lambda: copy_blocks(cache.to("meta"), cache, two, two),
        ],
        "target": [
            lambda: copy_blocks(cache, cache.half(), two, two),
            lambda: copy_blocks(cache, cache[:1], two, two),
            lambda: copy_blocks(cache, cache.view(2, 4, 32), two, two),
            lambda: copy_blocks(cache, cache[:, :2], two, two),
            lambda: copy_blocks(cache, cache.to("meta"), two, two),
        ],
        "source_ids": [
            lambda: copy_blocks(cache, cache, two.long(), two),
            lambda: copy_blocks(cache, cache, two.view(1, 2), two),
            lambda: copy_blocks(cache, cache, two.to("meta"), two),
        ],
        "target_ids": [
            lambda: copy_blocks(cache, cache, two, two[:1]),
            lambda: copy_blocks(cache, cache, two, two.long()),
            lambda: copy_blocks(cache, cache, two, two.to("meta")),
        ],
    }
    for name, bad in calls.items():
        for call in bad:
            with pytest.raises(ArgumentError, match=f"^{name} "):
                call()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter reaches all host memory")
def test_host_memory_must_be_pinned(device: torch.device) -> None:
    cache, one = torch.zeros(2, 4, 16, device=device), ids([0], device)
    with pytest.raises(ArgumentError, match="^target .*pinned"):
        copy_blocks(cache, cache.cpu(), one, one)
