"""The KV cache on a CPU: memory is taken when it is written, and refused if there is too little."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from paged_backend import LLM, ConfigError
from paged_backend.platforms.cpu.memory import available_bytes, zeros


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
