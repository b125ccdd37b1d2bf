"""Which platform serves which options."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from oracle import make_engine, mixed_work, run, tokens_of

from paged_backend.platforms.base import Platform
from paged_backend.platforms.cores import refuse_cores
from paged_backend.platforms.cpu import threads as cpu_threads
from paged_backend.platforms.cpu.platform import CpuPlatform
from paged_backend.platforms.cpu.torch_platform import TorchPlatform
from paged_backend.platforms.select import resolve_dtype, select_platform
from paged_backend.values.errors import ConfigError
from paged_backend.values.options.cpu import CpuOptions


def select(dtype: str) -> Platform:
    return select_platform("cpu", dtype, torch.bfloat16)


def test_a_cpu_computes_in_float32_by_default() -> None:
    assert type(select("auto")) is CpuPlatform
    assert type(select("float32")) is CpuPlatform


def test_other_dtypes_run_in_plain_torch() -> None:
    platform = select("float16")
    assert type(platform) is TorchPlatform
    assert platform.dtype == platform.linear_dtype == torch.float16


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="device is cuda, but torch finds no NVIDIA device"):
        select_platform("cuda", "auto", torch.bfloat16)


def test_threads_and_cores(tmp_path: Path) -> None:
    """The options count for the thread that makes the engine, and for those that it starts."""
    make_checkpoint("llama3", tmp_path)
    work = mixed_work(3)
    wanted = tokens_of(run(make_engine(tmp_path), work))
    core = max(os.sched_getaffinity(0))
    threads = torch.get_num_threads()

    def serve() -> tuple[list[list[int]], set[int], int, int]:
        tokens = tokens_of(run(make_engine(tmp_path, cpu_cores=str(core), cpu_threads=3), work))
        found = tokens, os.sched_getaffinity(0), torch.get_num_threads()
        return *found, cpu_threads._crew.num_helpers

    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(serve).result() == (wanted, {core}, 3, 2)
    finally:
        torch.set_num_threads(threads)
        cpu_threads.use_threads_of_torch()


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"cpu_cores": "0-"}, "cpu_cores must be a list such as 0-7,16-23, got '0-'"),
        ({"cpu_cores": "3-1"}, "cpu_cores must be a list such as 0-7,16-23, got '3-1'"),
        ({"cpu_cores": "0,9999"}, "cpu_cores must be some of .* got 9999"),
        ({"cpu_threads": 0}, "cpu_threads must be an integer from 1 up to 1024 or null, got 0"),
    ],
)
def test_cores_that_do_not_exist(option: dict[str, object], problem: str, tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    with pytest.raises(ConfigError, match=problem):
        make_engine(tmp_path, **option)


def test_a_gpu_has_no_cores() -> None:
    with pytest.raises(ConfigError, match="option cpu_threads must be left out on a GPU"):
        refuse_cores(CpuOptions(cpu_threads=2))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"float32_matmul_precision": "high", "dtype": "bfloat16"},
            "float32_matmul_precision can be high only on a CPU with AMX and with dtype float32",
        ),
        (
            {"float32_matmul_precision": "medium"},
            "float32_matmul_precision must be one of highest, high, got 'medium'",
        ),
    ],
)
def test_precision_that_cannot_be_had(
    options: dict[str, object], problem: str, tmp_path: Path
) -> None:
    make_checkpoint("llama3", tmp_path)
    with pytest.raises(ConfigError, match=problem):
        make_engine(tmp_path, **options)


def test_dtype_follows_the_device_unless_set() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype("auto", torch.bfloat16, cpu) == torch.float32
    assert resolve_dtype("auto", torch.bfloat16, cuda) == torch.bfloat16
    assert resolve_dtype("float16", torch.bfloat16, cuda) == torch.float16
