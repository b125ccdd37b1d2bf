"""Every format of the KV cache on the GPU path, compared with the torch platform's attention.

Both store the same numbers, so the engine gives the same tokens with either of them.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from kv_specs import alike
from oracle import Oracle, make_engine, run, tokens_of

from paged_backend.engine.engine import Engine
from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.kv_cache import KVCacheSpec, KVScales
from paged_backend.platforms.gpu.attention import TritonAttention
from paged_backend.platforms.gpu.platform import GpuPlatform
from paged_backend.platforms.gpu.step_rows import StepRows
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.platforms.portable.attention import TorchAttention
from paged_backend.platforms.select import gpu_of
from paged_backend.values.kv_cache_groups import KVCacheGroup
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

FP8 = torch.float8_e4m3fn
GROUPS = (KVCacheGroup(None, (0, 1)),)
FORMATS = [
    (torch.float32, KVScales.NONE),
    (FP8, KVScales.STATIC),
    (torch.int8, KVScales.STATIC),
    (FP8, KVScales.TOKEN_HEAD),
    (torch.int8, KVScales.TOKEN_HEAD),
]
HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 32, 8
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    sizes = {"num_hidden_layers": 1, "intermediate_size": 40}
    return Oracle("smollm", tmp_path_factory.mktemp("smollm"), **sizes)


def engine_for(oracle: Oracle, kv_cache_dtype: str) -> Engine:
    return make_engine(
        oracle.folder,
        device="cuda" if torch.cuda.is_available() else "cpu",
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory_bytes=2**20,
        block_size=8,
        enforce_eager=True,  # no graph can hold the attention of torch
        max_num_seqs=2,
        max_num_batched_tokens=16,
    )


def all_answers(engine: Engine) -> list[object]:
    """Tokens with prompts in chunks, a prefix hit, and forks that write to copies of a block."""
    first = [(7 * i + 3) % 190 + 3 for i in range(21)]
    answers: list[object] = [tokens_of(run(engine, [(first, 2)]))]
    hit = run(engine, [(first[:18] + [5, 6], 3)])
    assert hit["0"][0].num_cached_tokens == 16
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=3, n=2, ignore_eos=True)
    engine.add_request(Request("forked", [5, 9, 33], params))
    forked: dict[int, list[int]] = {0: [], 1: []}
    while engine.has_unfinished:
        for output in engine.step():
            forked[output.index] += output.new_token_ids
    return [*answers, tokens_of(hit), forked]


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8_per_token_head"])
def test_tokens_equal_those_with_torchs_attention(oracle, kv_cache_dtype, monkeypatch):
    kernels = all_answers(engine_for(oracle, kv_cache_dtype))
    monkeypatch.setattr(
        GpuPlatform, "attention", lambda self, *sizes: TorchAttention(*sizes, self.device)
    )
    assert kernels == all_answers(engine_for(oracle, kv_cache_dtype))


def make_layer(scales: KVScales, device: torch.device) -> AttentionLayer:
    angles = torch.arange(64)[:, None] * 10 ** torch.linspace(0, -4, DIM // 2)
    static = torch.tensor([0.02, 0.03], device=device) if scales is KVScales.STATIC else None
    return AttentionLayer(
        index=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        scale=DIM**-0.5,
        cos_sin_cache=torch.cat((angles.cos(), angles.sin()), dim=1).to(device),
        k_scale=static,
        v_scale=None if static is None else static * 1.5,
    )


def make_meta(
    device: torch.device, seqs: list[tuple[int, int]], table: list[list[int]]
) -> AttentionMetadata:
    """The metadata of sequences of (queries, keys), with blocks of `BLOCK` tokens."""

    def ints(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    positions = [list(range(keys - queries, keys)) for queries, keys in seqs]
    slots = [
        blocks[position // BLOCK] * BLOCK + position % BLOCK
        for blocks, places in zip(table, positions, strict=True)
        for position in places
    ]
    return AttentionMetadata(
        query_start_loc=ints([0, *accumulate(queries for queries, _ in seqs)]),
        seq_lens=ints([keys for _, keys in seqs]),
        block_tables=(ints(table),),
        slot_mappings=(ints(slots, torch.int64),),
        positions=ints([position for places in positions for position in places]),
        num_decodes=sum(queries == 1 for queries, _ in seqs),
    )


def attended(
    attention: AttentionBackend, layer: AttentionLayer, device: torch.device
) -> list[torch.Tensor]:
    """Outputs of a prompt, and of a decode that goes on in copies of its blocks with a chunk."""
    prompt, step = (
        torch.sin(torch.arange(rows * WIDTH, device=device).view(rows, WIDTH) ** 1.5)
        for rows in (11, 6)
    )
    first = attention.attend(layer, prompt, make_meta(device, [(11, 11)], [[3, 6]]))
    attention.copy_blocks([(3, 2), (6, 4)])
    meta = make_meta(device, [(1, 12), (5, 5)], [[2, 4], [5, 0]])
    return [first, attention.attend(layer, step, meta)]


@pytest.mark.parametrize(("dtype", "scales"), FORMATS)
def test_a_layer_equals_torchs_attention(device, dtype, scales):
    spec = KVCacheSpec(GROUPS, alike(GROUPS, KV_HEADS, DIM), BLOCK, dtype, scales)
    sinks = torch.tensor([0.5, 1.0, -1.0, 2.0], device=device)
    layer = replace(make_layer(scales, device), softcap=2.0, window=9, sinks=sinks)
    kernels = attended(TritonAttention(spec, 7, transfer_to(device), StepRows()), layer, device)
    wanted = attended(TorchAttention(spec, 7, device), layer, device)
    torch.testing.assert_close(kernels, wanted, atol=2e-5, rtol=2e-5)


def test_scales_of_a_checkpoint_do_not_change_an_unquantized_cache(device):
    """A checkpoint may have scales and its cache be stored in the dtype of the model."""
    spec = KVCacheSpec(GROUPS, alike(GROUPS, KV_HEADS, DIM), BLOCK, torch.float32)
    with_scales, without = (
        attended(
            TritonAttention(spec, 7, transfer_to(device), StepRows()),
            make_layer(scales, device),
            device,
        )
        for scales in (KVScales.STATIC, KVScales.NONE)
    )
    assert all(map(torch.equal, with_scales, without))


def transfer_to(device: torch.device) -> Transfer:
    return Transfer(device, gpu_of(device))
