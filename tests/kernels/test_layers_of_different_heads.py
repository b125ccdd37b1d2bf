"""The Triton kernels on a pool of layers with different heads, beside torch's attention."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from mixed_layers import Steps
from oracle import Oracle, make_engine, mixed_work, run, tokens_of

from paged_backend.models.kv_cache import KVCacheFormat, KVCacheSpec, KVScales
from paged_backend.platforms.gpu.attention import TritonAttention
from paged_backend.platforms.gpu.model_runner import GpuModelRunner
from paged_backend.platforms.gpu.step_rows import StepRows
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.platforms.portable.attention import TorchAttention
from paged_backend.platforms.select import gpu_of
from paged_backend.values.errors import ConfigError
from paged_backend.values.kv_cache_groups import KVCacheGroup, KVSizes


@pytest.mark.parametrize(
    "stored",
    [KVCacheFormat(torch.float32), KVCacheFormat(torch.int8, KVScales.TOKEN_HEAD)],
    ids=str,
)
def test_layers_compute_in_one_pool_what_torch_computes(device, stored):
    torchs = partial(TorchAttention, device=device)
    transfer = Transfer(device, gpu_of(device))
    kernels = partial(TritonAttention, transfer=transfer, rows=StepRows())
    together, wanted = Steps(device).together(kernels, stored), Steps(device).alone(torchs, stored)
    torch.testing.assert_close(together, wanted, atol=2e-5, rtol=2e-5)


def test_heads_that_the_kernels_cannot_read_are_refused(device):
    group, sizes = KVCacheGroup(None, (0,)), {0: KVSizes(1, 520, 520)}
    spec = KVCacheSpec((group,), sizes, 16, torch.float32)
    with pytest.raises(ConfigError, match="head_dim must be at most 512 for .* a GPU, got 520"):
        TritonAttention(spec, 2, Transfer(device, gpu_of(device)), StepRows())


PUBLISHED = {"head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 1}


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "heads"),
    [
        pytest.param("gemma4", {}, marks=pytest.mark.thorough),
        ("gemma4", PUBLISHED),
        ("gemma4-moe", {}),
    ],
)
def test_gemma_4_gives_the_tokens_of_transformers(family, heads, tmp_path):
    oracle = Oracle(family, tmp_path, intermediate_size=40, **heads)
    engine = make_engine(
        oracle.folder,
        device="cuda" if torch.cuda.is_available() else "cpu",
        kv_cache_memory_bytes=2**21,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=32,
    )
    assert isinstance(engine.executor.model_runner, GpuModelRunner)
    # Some are longer than the window of 20.
    work = [(prompt[:26], min(limit, 2)) for prompt, limit in mixed_work(2)]
    oracle.confirm(work, tokens_of(run(engine, work)))
