"""The engine on the Triton kernels with weights that stay quantized: logits, tokens and memory."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Oracle, Work, make_engine, mixed_work, run, tokens_of
from quantized_checkpoints import Writer, awq, fp8, gptq, quantize_checkpoint
from torch import Tensor

from paged_backend.engine.engine import Engine
from paged_backend.platforms.gpu.model_runner import GpuModelRunner
from paged_backend.quantization.online import ONLINE_FORMATS
from paged_backend.quantization.round import Rounding
from paged_backend.tools.plan.options import PlanOptions
from paged_backend.tools.plan.planner import Planner
from paged_backend.values.config import EngineConfig
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

CHANNEL_CONFIG = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
BLOCK_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ_CONFIG = {"quant_method": "gptq", "desc_act": True}
ROUNDED = 0.12  # inputs are rounded to FP8, which has 4 significant bits
EXACT = 0.01  # only sums and outputs are rounded, to 16 bits
SIZES = {"num_hidden_layers": 1, "intermediate_size": 96}
ALIGNED = {"hidden_size": 192, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2}


@dataclass
class Case:
    """A checkpoint, and what is made of it on the device.

    `bound` limits the difference from the logits that float32 arithmetic on the dequantized weights
    gives: its root mean square, divided by the standard deviation of these logits.
    """

    config: dict[str, Any]
    writer: Writer
    dtype: str
    forms: dict[str, int]
    bits: float  # bits of a weight of the decoder's linear layers, scales included
    bound: float
    family: str = "qwen2"  # with biases
    sizes: dict[str, int] | None = None


# Scales of FP8 are float32: one for each output of (48 to 96) inputs, or for 128 x 128 numbers.
# Rows of the forms with 16-bit inputs have blocks of 64 bytes, which are 64 or 128 numbers.
CASES = {
    "fp8 channels": Case(
        CHANNEL_CONFIG, fp8(1, 1024, "weight_scale"), "bfloat16", {"W8A8 fp8": 4}, 8.6, ROUNDED
    ),
    "fp8 blocks across parts": Case(
        BLOCK_CONFIG,
        fp8(128, 128, "weight_scale_inv"),
        "float16",
        {"W8A16 fp8": 2, "W8A8 fp8": 1, "W8A8 fp8 blocks": 1},
        8.5,
        ROUNDED,
        "llama3",
        ALIGNED | {"num_key_value_heads": 1, "intermediate_size": 160},
    ),
    "awq": Case(AWQ_CONFIG | {"group_size": 32}, awq(32), "float16", {"W4A16": 4}, 8.6, EXACT),
    "gptq of 8 bits": Case(
        GPTQ_CONFIG | {"bits": 8, "group_size": -1}, gptq(8, -1), "float16", {"W8A16 int8": 4},
        9.4, EXACT,
    ),
    "act-order": Case(
        GPTQ_CONFIG | {"bits": 4, "group_size": 32},
        gptq(4, 32, act_order=True),
        "float16",
        # The writer orders the inputs of each part differently, so q, k and v cannot be fused.
        {"W4A16": 2, "dequantized": 2},
        13.6,
        EXACT,
    ),
}  # fmt: skip


def engine_for(folder: Path, **options: object) -> Engine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    engine = make_engine(folder, device=device, kv_cache_memory_bytes=2**20, **sizes | options)
    assert isinstance(engine.executor.model_runner, GpuModelRunner)
    return engine


def short(count: int) -> Work:
    return [(prompt[:8], min(limit, 3)) for prompt, limit in mixed_work(count)]


def logits_of(engine: Engine, prompt: list[int]) -> Tensor:
    """The logits [tokens, vocabulary] after each token of a prompt."""
    params = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, return_context_logits=True
    )
    engine.add_request(Request("logits", prompt, params))
    outputs = [output for output in run(engine, [])["logits"]]
    entries = [*outputs[0].prompt_logprobs, *outputs[0].logprobs]
    return torch.tensor(np.stack([np.frombuffer(entry.logits, "<f4") for entry in entries]))


def confirm(oracle: Oracle, engine: Engine, bound: float, **options: object) -> None:
    """Check logits; and tokens, which depend neither on the batch nor on the chunks of prompts."""
    prompt = [(11 * i + 5) % 190 + 3 for i in range(16)]
    with torch.inference_mode():
        wanted = oracle.model(torch.tensor([prompt])).logits[0]
    difference = (logits_of(engine, prompt) - wanted).square().mean().sqrt() / wanted.std()
    assert difference <= bound
    work = short(2)
    together = tokens_of(run(engine, work))
    small = engine_for(oracle.folder, max_num_batched_tokens=5, max_num_seqs=2, **options)
    assert tokens_of(run(small, work)) == together
    if bound == EXACT:
        oracle.confirm(work, together)


@pytest.mark.parametrize("name", CASES)
def test_a_quantized_checkpoint(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    oracle = Oracle(case.family, tmp_path, **SIZES | (case.sizes or {}))
    dense = quantize_checkpoint(oracle.model, tmp_path, case.config, lambda layer: case.writer)
    engine = engine_for(tmp_path, dtype=case.dtype)
    info = engine.executor.info
    assert info.weight_forms == case.forms
    assert f"layers {next(iter(case.forms))}" in info.describe()
    numbers = sum(weight.numel() for weight in dense.values())
    held = linear_bytes(oracle, engine, dense)
    assert held <= numbers * case.bits / 8
    if "dequantized" not in case.forms:
        tables = rotary_bytes(engine)
        planned = planned_bytes(tmp_path, case.dtype)
        assert planned == pytest.approx(info.weight_bytes - tables, rel=0.02)
    confirm(oracle, engine, case.bound, dtype=case.dtype)


def linear_bytes(oracle: Oracle, engine: Engine, names: Iterable[str]) -> int:
    """The bytes that an engine holds for the weights and biases of the named layers."""
    worker = engine.executor
    layers = tuple(f"{name}." for name in names)
    others = (p for name, p in oracle.model.named_parameters() if not name.startswith(layers))
    others_bytes = sum(p.numel() for p in others) * worker.platform.dtype.itemsize
    return worker.info.weight_bytes - others_bytes - rotary_bytes(engine)


def rotary_bytes(engine: Engine) -> int:
    """The bytes of the table that all layers share."""
    layers = engine.executor.model_runner._model.attention_layers
    return layers[0].cos_sin_cache.nbytes


def planned_bytes(folder: Path, dtype: str) -> int:
    """The bytes that `paged-backend plan` counts for a checkpoint in a dtype."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": dtype}))
    return Planner(str(folder), PlanOptions(), EngineConfig()).facts.weight_bytes


@pytest.mark.parametrize(
    ("quantization", "form", "dtype", "bits", "bound"),
    [
        ("fp8", "W8A8 fp8", "bfloat16", 8.7, ROUNDED),
        ("int4", "W4A16", "float16", 11.2, EXACT),
    ],
)
def test_a_float_checkpoint_stays_quantized_as_it_is_loaded(
    quantization: str, form: str, dtype: str, bits: float, bound: float, tmp_path: Path
) -> None:
    """The output layer is the embedding, whose rows are looked up."""
    oracle = Oracle("smollm", tmp_path, **SIZES)
    rounding: Rounding = ONLINE_FORMATS[quantization].rounding
    names = [name for name, p in oracle.model.named_parameters() if p.dim() == 2]
    numbers = 0
    for name in names:
        weight = oracle.model.get_parameter(name)
        weight.data = rounding.quantize(weight.data).dequantize()
        numbers += weight.numel()
    engine = engine_for(tmp_path, dtype=dtype, quantization=quantization)
    assert engine.executor.info.weight_forms == {form: 5}
    held = linear_bytes(oracle, engine, [name.removesuffix(".weight") for name in names])
    assert held <= numbers * bits / 8
    confirm(oracle, engine, bound, dtype=dtype, quantization=quantization)


def test_weights_that_no_kernel_multiplies_are_dequantized(tmp_path: Path) -> None:
    """The products of 16-bit inputs have no float32; the start line says so."""
    oracle = Oracle("qwen2", tmp_path, **SIZES)
    config, writer = AWQ_CONFIG | {"group_size": 32}, awq(32)
    quantize_checkpoint(oracle.model, tmp_path, config, lambda layer: writer)
    engine = engine_for(tmp_path)
    assert "awq weights (4 layers dequantized)" in engine.executor.info.describe()
    work = short(3)
    oracle.confirm(work, tokens_of(run(engine, work)))
