"""Which platform serves which options."""

from __future__ import annotations

import pytest
import torch

from paged_backend.errors import ConfigError
from paged_backend.platforms.base import Platform
from paged_backend.platforms.cpu.platform import CpuPlatform
from paged_backend.platforms.select import resolve_dtype, select_platform
from paged_backend.platforms.torch.platform import TorchPlatform


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


def test_dtype_follows_the_device_unless_set() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_dtype("auto", torch.bfloat16, cpu) == torch.float32
    assert resolve_dtype("auto", torch.bfloat16, cuda) == torch.bfloat16
    assert resolve_dtype("float16", torch.bfloat16, cuda) == torch.float16
