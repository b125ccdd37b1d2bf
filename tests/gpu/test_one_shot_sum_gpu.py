"""Sums of two processes in one kernel: equal bits, also in a CUDA graph.

On one device, both processes share it. NCCL refuses that, so that only the kernel is tested there.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from oracle import Oracle, make_engine, mixed_work, run, tokens_of

from paged_backend.launch.ports import bind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device"),
]

RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from paged_backend.platforms.gpu.device import GpuDevice
from paged_backend.platforms.gpu.one_shot_sum import MAX_BYTES, OneShotSum

rank, port = map(int, sys.argv[1:])
device = GpuDevice.numbered(rank % GpuDevice.count())
store = TCPStore(
    "127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(seconds=60)
)
processes = dist.ProcessGroupNCCL(store, rank, 2, dist.ProcessGroupNCCL.Options())
add = OneShotSum(processes, store, device)

def parts(seed, dtype, num):
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(num, generator=random).to(dtype) for _ in range(2)]

for dtype in (torch.float32, torch.bfloat16):
    for num in (8, 4096, 4096 * 3, MAX_BYTES // dtype.itemsize):
        assert add.takes(torch.empty(num, dtype=dtype, device="meta"))
        for seed in range(5):
            both = parts(seed, dtype, num)
            x = both[rank].to(device)
            total = add(x.view(2, -1))
            assert total.shape == (2, num // 2)
            assert torch.equal(total.flatten().cpu(), both[0] + both[1]), (dtype, num, seed)
            assert torch.equal(x.cpu(), both[rank])

odd = torch.ones(17, device=device)[1:]  # not aligned
assert add(odd).eq(2).all()

x = torch.zeros(4096, dtype=torch.bfloat16, device=device)
replay = GpuDevice(device).capture(lambda: add(add(x)), None)
for seed in range(20):
    both = parts(seed, torch.bfloat16, 4096)
    x.copy_(both[rank])
    total = both[0] + both[1]
    assert torch.equal(replay().cpu(), total + total), seed
print("equal")
store.add("done", 1)
if rank == 0:  # it has the store
    while store.add("done", 0) < 2:
        pass
"""


def test_sums_of_two_processes_are_equal() -> None:
    with bind("127.0.0.1", 0, "port") as free:
        port = str(free.getsockname()[1])
    environment = os.environ | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), port],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, error = rank.communicate(timeout=90)
            assert out == "equal\n", error
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA devices")
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_greedy_tokens_of_two_gpus_equal_transformers(enforce_eager, tmp_path):
    oracle, work = Oracle("llama3", tmp_path), mixed_work(32)
    options = {"device": "cuda", "tensor_parallel_size": 2, "enable_one_shot_all_reduce": True}
    engine = make_engine(tmp_path, max_num_seqs=32, enforce_eager=enforce_eager, **options)
    oracle.confirm(work, tokens_of(run(engine, work)))
