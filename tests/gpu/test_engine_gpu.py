"""The engine on an NVIDIA device: tokens, graphs, compilations, and a pool from free memory."""

from __future__ import annotations

import pytest
import torch
import triton
from checkpoints import FAMILIES
from lora_oracle import LoraOracle, answer_of, lora_options, run_requests
from masking import MaskingExecutor
from oracle import Oracle, make_engine, mixed_work, run, tokens_of

from paged_backend.platforms.gpu import linear
from paged_backend.quantization.online import ONLINE_FORMATS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA device"),
]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family, enforce_eager, tmp_path):
    # Kernels have heads of powers of 2.
    oracle = Oracle(family, tmp_path, **({"head_dim": 32} if family == "minimax" else {}))
    engine = make_engine(tmp_path, device="cuda", max_num_seqs=32, enforce_eager=enforce_eager)
    work = mixed_work(32)
    oracle.confirm(work, tokens_of(run(engine, work)))
    assert engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_tokens_with_chunks_and_preemption_equal_transformers(async_scheduling, tmp_path):
    oracle = Oracle("llama3", tmp_path)
    block_bytes = 16 * 2**20 // make_engine(tmp_path, device="cuda").executor.info.num_blocks
    engine = make_engine(
        tmp_path,
        device="cuda",
        async_scheduling=async_scheduling,
        max_num_seqs=5,
        max_num_batched_tokens=16,
        max_model_len=128,
        kv_cache_memory_bytes=14 * block_bytes,
    )
    work = [(prompt, 24) for prompt, _ in mixed_work(24)]
    oracle.confirm(work, tokens_of(run(engine, work)))
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_tokens_with_adapters_equal_merged_models(enforce_eager, tmp_path):
    oracle = LoraOracle("llama3", tmp_path)
    options = lora_options(oracle, device="cuda", enforce_eager=enforce_eager)
    engine = make_engine(oracle.folder, max_num_seqs=32, **options)
    work = oracle.requests(32, 90, 24)
    oracle.confirm(work, run_requests(engine, work))
    few = lora_options(oracle, device="cuda", max_loras=1, max_cpu_loras=1)
    engine = make_engine(oracle.folder, max_num_seqs=3, max_num_batched_tokens=16, **few)
    oracle.confirm(work, run_requests(engine, work))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_most_answers_with_adapters_in_16_bits_do_not_depend_on_the_batch(dtype, tmp_path):
    oracle = LoraOracle("llama3", tmp_path)
    work = oracle.requests(32, 90, 24)
    answers = []
    for limits in ({"max_num_seqs": 32}, {"max_num_seqs": 3, "enforce_eager": True}):
        options = lora_options(oracle, device="cuda", dtype=dtype, **limits)
        outputs = run_requests(make_engine(oracle.folder, **options), work)
        answers.append([answer_of(outputs[one.request_id]) for one in work])
    # The base products are cuBLAS's, which may round otherwise for another number of rows.
    assert sum(a == b for a, b in zip(*answers, strict=True)) >= 28
    firsts = [oracle.model_of(one).generate(one.prompt_token_ids, 1)[0] for one in work]
    assert sum(a[0] == b for a, b in zip(answers[0], firsts, strict=True)) >= 24


def test_nothing_is_compiled_for_adapters_after_warm_up(tmp_path, monkeypatch):
    oracle = LoraOracle("llama3", tmp_path)
    options = lora_options(oracle, device="cuda", dtype="float16", enforce_eager=True)
    engine = make_engine(oracle.folder, max_num_seqs=32, **options)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda *, repr, **_: compiled.append(repr)
    )
    run_requests(engine, oracle.requests(40, 90, 24, seed=1))
    assert compiled == []


QUANTIZED = {"fp8": "W8A8 fp8", "int8": "W8A8 int8", "int4": "W4A16"}


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_quantized_weights(quantization, tmp_path):
    """Tokens depend neither on the batch nor on graphs; most equal those of dequantized weights."""
    form = QUANTIZED[quantization]
    if form == "W8A8 fp8" and torch.cuda.get_device_capability() < (8, 9):
        form = "W8A16 fp8"
    oracle = Oracle("smollm", tmp_path)
    rounding = ONLINE_FORMATS[quantization].rounding
    for parameter in oracle.model.parameters():
        if parameter.dim() == 2:
            parameter.data = rounding.quantize(parameter.data).dequantize()
    options = {"device": "cuda", "dtype": "float16", "quantization": quantization}
    engine = make_engine(tmp_path, max_num_seqs=32, **options)
    assert engine.executor.info.weight_forms == {form: 13}
    work = mixed_work(32)
    answers = tokens_of(run(engine, work))
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "enforce_eager": True}
    assert tokens_of(run(make_engine(tmp_path, **limits, **options), work)) == answers
    first = sum(a[0] == oracle.generate(p, 1)[0] for (p, _), a in zip(work, answers, strict=True))
    assert first > 16


@pytest.mark.parametrize("quantization", [None, *QUANTIZED])
def test_nothing_is_compiled_after_warm_up(quantization, tmp_path, monkeypatch):
    options = {"dtype": "float16", "quantization": quantization, "enforce_eager": True}
    options = options if quantization else {}
    assert compiled_late(tmp_path, monkeypatch, max_num_seqs=32, **options) == []


@pytest.mark.parametrize("max_num_seqs", [3, 40])
def test_no_dense_product_is_compiled_after_warm_up(max_num_seqs, tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "max_rows", lambda *_, **__: 32)
    options = {"dtype": "float16", "max_num_seqs": max_num_seqs, "enforce_eager": True}
    assert compiled_late(tmp_path, monkeypatch, **options) == []


def compiled_late(folder, monkeypatch, **options):
    """Return the names of what an engine compiles when it serves."""
    Oracle("llama3", folder)
    engine = make_engine(folder, device="cuda", **options)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_cache_hook", lambda *, repr, **_: compiled.append(repr)
    )
    run(engine, mixed_work(40, seed=1))
    engine.executor = MaskingExecutor(engine.executor, list(range(2, 90)))
    run(engine, mixed_work(40, seed=2))
    return compiled


def test_the_pool_takes_its_part_of_free_memory(tmp_path):
    Oracle("llama2", tmp_path)
    free, total = torch.cuda.mem_get_info()
    engine = make_engine(
        tmp_path, device="cuda", kv_cache_memory_bytes=None, gpu_memory_utilization=0.5
    )
    left, _ = torch.cuda.mem_get_info()
    assert engine.executor.info.num_blocks > 1000
    assert (total - left) / total == pytest.approx(0.5, abs=0.1)
    assert free > left
