"""The KV cache on a CPU: memory is taken when it is written, and refused if there is too little."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from paged_backend import LLM, ConfigError
from paged_backend.platforms.cpu.memory import WeightMemory, available_bytes, zeros


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_zeros_take_memory_when_they_are_written(dtype: torch.dtype) -> None:
    before = resident_bytes()
    made = zeros((2, 64, 2**20), dtype)
    size = made.numel() * made.element_size()
    assert size >= 2**27 and resident_bytes() - before < size // 8
    assert made.shape == (2, 64, 2**20) and made.dtype == dtype
    assert made.data_ptr() % 64 == 0
    assert not made[:, ::9].contiguous().view(torch.uint8).any()
    made.view(torch.uint8).fill_(1)
    assert resident_bytes() - before >= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_weights_share_memory_without_overlapping(dtype: torch.dtype) -> None:
    memory = WeightMemory()
    large = 10 * 2**20 // dtype.itemsize  # more than a block has
    originals = [torch.randn(size, 7).mul(9).to(dtype).t() for size in (3, large, 1, 500)]
    weights = [memory.keep(weight) for weight in originals]
    weights += [memory.stack(originals[2:3] * 3, dim=dim) for dim in (0, 1)]
    originals += [torch.stack(originals[2:3] * 3, dim=dim) for dim in (0, 1)]
    for weight, original in zip(weights, originals, strict=True):
        assert torch.equal(weight, original) and weight.dtype == dtype
        assert weight.is_contiguous() and weight.data_ptr() % 64 == 0
    storages = [weight.untyped_storage().data_ptr() for weight in weights]
    assert storages[0] != storages[1] and len(set(storages[2:])) == 1
    assert not memory.zeros((5,), dtype).any()


def flags_of(address: int) -> list[str]:
    """Return what the system knows of the pages at an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:
            first, end = (int(part, 16) for part in name.split("-"))
            inside = first <= address < end
        elif inside and name == "VmFlags:":
            return rest.split()
    raise ValueError(f"nothing is at {address:#x}")


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no large pages"
)
def test_weights_ask_for_large_pages() -> None:
    assert "hg" in flags_of(WeightMemory().keep(torch.ones(2**20)).data_ptr())
    assert "hg" not in flags_of(torch.ones(2**23).data_ptr())


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


def test_available_memory_is_the_machines_or_the_containers(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:   5000 kB\nHugePages_Total:   0\n")
    assert available_bytes(meminfo, tmp_path / "none") == 5000 * 1024
    free = write(tmp_path, memory_max="max\n", memory_current="70\n", memory_stat="anon 1\n")
    assert available_bytes(meminfo, free) == 5000 * 1024
    stat = "anon 900\ninactive_file 300\n"
    small = write(tmp_path, memory_max="2000\n", memory_current="1500\n", memory_stat=stat)
    assert available_bytes(meminfo, small) == 2000 - 1500 + 300
    assert available_bytes(tmp_path / "no meminfo", tmp_path / "none") is None
    present = available_bytes()
    assert present is not None and present > 2**28


def test_a_pool_that_the_memory_does_not_hold_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"option kv_cache_memory_bytes must be at most \d+, "):
        LLM("demo", kv_cache_memory_bytes=2**47)
