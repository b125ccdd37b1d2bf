"""The engine on an NVIDIA device: the same tokens as transformers, a pool from free memory."""

from __future__ import annotations

import pytest
import torch
from checkpoints import FAMILIES
from oracle import Oracle, make_engine, mixed_work, run, tokens_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device"),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family, tmp_path):
    oracle = Oracle(family, tmp_path)
    engine = make_engine(tmp_path, device="cuda", max_num_seqs=32)
    work = mixed_work(32)
    oracle.confirm(work, tokens_of(run(engine, work)))
    assert engine.stats().num_used_blocks == 0


def test_the_pool_takes_its_part_of_free_memory(tmp_path):
    Oracle("llama2", tmp_path)
    free, total = torch.cuda.mem_get_info()
    engine = make_engine(
        tmp_path, device="cuda", kv_cache_memory_bytes=None, gpu_memory_utilization=0.5
    )
    left, _ = torch.cuda.mem_get_info()
    assert engine.runner.num_blocks > 1000
    assert (total - left) / total == pytest.approx(0.5, abs=0.1)
    assert free > left
