"""Sums of small tensors in one kernel: which tensors they are, and where the option is refused.

`tests/gpu/test_one_shot_sum_gpu.py` runs the kernel.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_in_threads import groups_in_threads
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroup, _resolve_process_group

from paged_backend.models.division import Place
from paged_backend.platforms.gpu.device import GpuDevice
from paged_backend.platforms.gpu.one_shot_sum import MAX_BYTES, OneShotSum, register
from paged_backend.platforms.portable.group import TorchGroup
from paged_backend.platforms.select import open_ranks
from paged_backend.values.config import EngineConfig
from paged_backend.values.engine_args import from_mapping
from paged_backend.values.errors import ConfigError

ON = {"model": "demo", "enable_one_shot_all_reduce": True}


class Doubled:
    """A way to add up that takes what the kernel takes; its results can be told from others."""

    def __init__(self, group: TorchGroup) -> None:
        self._group = group

    def takes(self, x: Tensor) -> bool:
        return OneShotSum.takes(x)

    def __call__(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return 2 * x.sum() * torch.ones(self._group.size)


@pytest.mark.parametrize(
    ("dtype", "num", "taken"),
    [
        (torch.float32, 4, True),
        (torch.bfloat16, 8, True),
        (torch.float32, MAX_BYTES // 4, True),
        (torch.float32, MAX_BYTES // 4 + 4, False),
        (torch.bfloat16, MAX_BYTES // 2 + 8, False),
        (torch.float32, 3, False),  # loads and stores have 16 bytes
        (torch.float32, 0, False),
        (torch.float16, 8, False),
        (torch.int32, 4, False),  # sums of int8 products
    ],
)
def test_tensors_that_the_kernel_takes(dtype: torch.dtype, num: int, taken: bool) -> None:
    assert OneShotSum.takes(torch.empty(num, dtype=dtype, device="meta")) is taken


def test_a_group_adds_up_other_tensors_as_before() -> None:
    groups = groups_in_threads(2)

    def add(group: TorchGroup) -> tuple[Tensor, Tensor, int, int]:
        group.small_sum = Doubled(group)
        small = group.sum(torch.full((2, 4), float(group.rank)).T)
        sent = group.sent_bytes
        large = group.sum(torch.full((MAX_BYTES // 4 + 1,), float(group.rank)))
        return small, large, sent, group.sent_bytes

    with ThreadPoolExecutor(2) as pool:
        for rank, (small, large, sent, sent_of_both) in enumerate(pool.map(add, groups)):
            assert small.tolist() == [16.0 * rank] * 2
            assert large.eq(1).all()
            assert sent == 32, "the other rank has read the tensor"
            assert sent_of_both == 32 + MAX_BYTES + 4


def test_torch_finds_a_group_by_its_name() -> None:
    """Its operations ask for the store, and for the backend of the device."""
    store, options = HashStore(), dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    processes = dist.ProcessGroupGloo(store, 0, 1, options)
    name: Any = "a group of this test"
    device = torch.device("cpu")
    group = register(name, processes, store, ProcessGroup.BackendType.GLOO, device)
    found = _resolve_process_group(name)
    assert (found.rank(), found.size(), found.group_name) == (0, 1, name)
    found.get_group_store().set("key", b"value")
    assert store.get("key") == b"value"
    assert found._get_backend(device) is processes
    del group, found
    with pytest.raises(RuntimeError, match="group"):
        _resolve_process_group(name)


def test_the_operation_of_torch_has_these_arguments() -> None:
    schema = torch.ops.symm_mem.one_shot_all_reduce_copy.default._schema
    arguments = [(each.name, str(each.type)) for each in schema.arguments]
    assert arguments == [
        ("symm_buffer", "Tensor"),
        ("local_input", "Tensor"),
        ("reduce_op", "str"),
        ("group_name", "str"),
    ]


def open_rank(place: Place, **options: Any) -> None:
    """Open a rank that must be refused before it asks for the others."""
    open_ranks(EngineConfig.from_mapping({**ON, **options}), None, place)  # type: ignore[arg-type]


def test_it_needs_several_ranks() -> None:
    with pytest.raises(ConfigError, match="one_shot_all_reduce can be true only with a tensor_par"):
        EngineConfig.from_mapping({**ON, "pipeline_parallel_size": 2})


def test_it_needs_gpus() -> None:
    place = Place(rank=0, ranks_per_node=2, host="127.0.0.1")
    with pytest.raises(ConfigError, match="enable_one_shot_all_reduce can be true only on GPUs"):
        open_rank(place, device="cpu", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("rank", "ranks_per_node", "options", "message"),
    [
        (0, 1, {"tensor_parallel_size": 2}, "only if all ranks of a stage are on one host"),
        (
            4,
            6,
            {"tensor_parallel_size": 4, "pipeline_parallel_size": 3},
            "only if all ranks of a stage are on one host",
        ),
        (
            7,
            4,
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 4},
            "only if GPUs can read each other's memory; GPU 3 cannot read that of GPU 2",
        ),
    ],
)
def test_it_needs_gpus_that_reach_each_other(
    rank: int,
    ranks_per_node: int,
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GpuDevice, "is_present", staticmethod(lambda: True))
    monkeypatch.setattr(GpuDevice, "count", staticmethod(lambda: 8))
    reach = staticmethod(lambda number, other: (number, other) != (3, 2))
    monkeypatch.setattr(GpuDevice, "can_reach", reach)
    place = Place(rank=rank, ranks_per_node=ranks_per_node, host="127.0.0.1")
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_rank(place, device="cuda", **options)


def test_the_name_of_vllm_has_no_effect() -> None:
    """It turns off what is on in vLLM, and off here."""
    read = from_mapping({"model": "demo", "disable_custom_all_reduce": True})
    assert read.without_effect == ("disable_custom_all_reduce",)
    assert not read.config.enable_one_shot_all_reduce
