"""KV cache formats in the whole engine: answers, scales of checkpoints, and quality."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Work, make_engine, mixed_work, run, tokens_of
from safetensors.torch import load_file, save_file

from paged_backend.engine.llm import LLM
from paged_backend.tools.demo import load_questions
from paged_backend.values.errors import ConfigError
from paged_backend.values.sampling_params import SamplingParams

KV_DTYPES = ["bfloat16", "fp8", "int8_per_token_head"]
SCALES = {f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(3) for kind in "kv"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama3")
    make_checkpoint("llama3", made)
    return made


@cache
def alone(folder: Path, block_size: int, options: tuple[tuple[str, str], ...]) -> list[list[int]]:
    """The answers to the mixed work, one request after another and without a prefix cache."""
    engine = make_engine(
        folder, block_size=block_size, enable_prefix_caching=False, max_num_seqs=1, **dict(options)
    )
    return tokens_of(run(engine, mixed_work(7)))


@settings(max_examples=examples(25))
@given(
    weights=st.sampled_from([None, "int8", "int4", "fp8"]),
    kv=st.sampled_from(["auto", *KV_DTYPES]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    block_size=st.sampled_from([8, 16]),
    budget=st.integers(5, 300),
    at_once=st.integers(1, 8),
    blocks=st.integers(10, 200),
    seed=st.integers(0, 2**16),
)
def test_tokens_do_not_depend_on_batch_chunks_hits_or_preemption(
    folder: Path,
    weights: str | None,
    kv: str,
    dtype: str,
    block_size: int,
    budget: int,
    at_once: int,
    blocks: int,
    seed: int,
) -> None:
    options = {"kv_cache_dtype": kv, "dtype": dtype} | (
        {"quantization": weights} if weights else {}
    )
    wanted = alone(folder, block_size, tuple(options.items()))
    order = list(range(7))
    random.Random(seed).shuffle(order)
    work: Work = [mixed_work(7)[index] for index in order]
    engine = make_engine(
        folder,
        block_size=block_size,
        max_model_len=128,
        max_num_batched_tokens=max(budget, at_once),
        max_num_seqs=at_once,
        kv_cache_memory_bytes=_pool(folder, block_size, blocks, options),
        **options,
    )
    assert tokens_of(run(engine, work)) == [wanted[index] for index in order]


@cache
def _bytes_per_block(folder: Path, block_size: int, options: tuple[tuple[str, str], ...]) -> int:
    budget = 2**24
    info = make_engine(
        folder, block_size=block_size, kv_cache_memory_bytes=budget, **dict(options)
    ).executor.info
    return budget // info.num_blocks


def _pool(folder: Path, block_size: int, blocks: int, options: dict[str, str]) -> int:
    """A pool of some blocks, at least as many as the longest request needs."""
    size = _bytes_per_block(folder, block_size, tuple(options.items())) + 1
    return max(blocks, 128 // block_size + 2) * size


def with_scales(
    folder: Path, tmp_path: Path, names: set[str], value: Any = 0.05, **config: Any
) -> Path:
    """Write the checkpoint with scales of keys and values, and an entry in its config.json."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: torch.as_tensor(value, dtype=torch.float32).clone() for name in names}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | config))
    return tmp_path


def quantized(**values: Any) -> dict[str, Any]:
    """A quantization_config that leaves all layers as they are, with some more entries."""
    method = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}}
    return {"quantization_config": method | values}


FP8_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "rename",
    [
        "self_attn.{}_scale",
        "self_attn.attn.{}_scale",
        "self_attn.{}_proj.{}_scale",
        "self_attn.{}_proj.output_scale",
        "self_attn.kv_scale",
        "self_attn.attn.kv_scale",
        "self_attn.qkv_proj.{}_scale",
        "self_attn.qkqkv_proj.{}_scale",
        "self_attn.{}_cache.scale",
    ],
)
@pytest.mark.parametrize("value", [0.05, [0.05], [0.05, 0.05]])
def test_scales_of_the_checkpoint(rename: str, value: Any, folder: Path, tmp_path: Path) -> None:
    names = {name[: name.index("self_attn")] + rename.format(name[-7], name[-7]) for name in SCALES}
    config = quantized(kv_cache_scheme=FP8_SCHEME)
    engine = make_engine(with_scales(folder, tmp_path, names, value, **config))
    assert engine.executor.info.kv_cache == "fp8_e4m3 with the checkpoint's scales"
    work = mixed_work(4)
    assert tokens_of(run(engine, work)) == with_static_scale(folder)


def test_values_have_a_scale_that_keys_do_not_have(folder: Path, tmp_path: Path) -> None:
    """Smaller values, with a smaller scale and larger weights after them, change no bit.

    With the scale of the keys, they would be stored as zeros.
    """
    factor = 2.0**-14
    made = with_scales(folder, tmp_path, SCALES)
    file = made / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith((".v_proj.weight", ".v_scale")):
            tensors[name] *= factor
        elif name.endswith(".o_proj.weight"):
            tensors[name] /= factor
    save_file(tensors, file, {"format": "pt"})
    engine = make_engine(made, kv_cache_dtype="fp8")
    assert tokens_of(run(engine, mixed_work(4))) == with_static_scale(folder)


@cache
def with_static_scale(folder: Path) -> list[list[int]]:
    """The answers of the torch platform's attention with the scale 0.05."""
    made = folder.parent / "static"
    made.mkdir()
    return tokens_of(
        run(make_engine(with_scales(folder, made, SCALES), kv_cache_dtype="fp8"), mixed_work(4))
    )


def test_the_option_counts_more_than_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    config = quantized(kv_cache_scheme=FP8_SCHEME)
    made = with_scales(folder, tmp_path, SCALES, **config)
    info = make_engine(made, kv_cache_dtype="int8_per_token_head").executor.info
    assert info.kv_cache == "int8 with scales per token and head"
    assert "KV blocks in int8 with scales per token and head" in info.describe()


@pytest.mark.parametrize(
    ("config", "kv_cache"),
    [
        ({}, "float32"),
        (quantized(), "float32"),
        (quantized(kv_cache_scheme=None), "float32"),
        (quantized(kv_cache_scheme="static"), "fp8_e4m3 with scales per token and head"),
    ],
)
def test_without_scales(
    config: dict[str, Any], kv_cache: str, folder: Path, tmp_path: Path
) -> None:
    made = with_scales(folder, tmp_path, set(), **config)
    assert make_engine(made).executor.info.kv_cache == kv_cache


@pytest.mark.parametrize(
    ("names", "value", "config", "words"),
    [
        (SCALES, 0.0, {}, ["_scale must hold finite numbers above zero", "model.safetensors"]),
        (SCALES, float("nan"), {}, ["_scale must hold finite numbers above zero"]),
        (SCALES, [0.1] * 3, {}, ["_scale has shape [3]", "[2]"]),
        ({min(SCALES)}, 0.1, {}, ["no k_scale and v_scale for layer 0"]),
        (SCALES, 0.1, quantized(kv_cache_scheme={"num_bits": 4}), ["num_bits must be 8, got 4"]),
        (
            SCALES,
            0.1,
            quantized(kv_cache_scheme={"type": "int"}),
            ["type must be one of float, got 'int'"],
        ),
        (SCALES, 0.1, quantized(kv_cache_scheme=8), ["kv_cache_scheme must be an object, got 8"]),
    ],
)
def test_bad_scales(
    names: set[str],
    value: Any,
    config: dict[str, Any],
    words: list[str],
    folder: Path,
    tmp_path: Path,
) -> None:
    made = with_scales(folder, tmp_path, names, value, **config)
    if len(names) == 1:  # the other layers have both scales
        others = {name for name in SCALES if "layers.0" not in name}
        made = with_scales(made, tmp_path, others, value)
    with pytest.raises(ConfigError) as caught:
        make_engine(made, kv_cache_dtype="fp8")
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("kv_cache_dtype", KV_DTYPES)
def test_the_demo_model_answers_every_question(kv_cache_dtype: str) -> None:
    questions = load_questions()
    params = SamplingParams(temperature=0, max_tokens=64)
    prompts = [question.question for question in questions]
    answers = LLM("demo", kv_cache_dtype=kv_cache_dtype).generate(prompts, params)
    wanted = [f"\n{question.answer}" for question in questions]
    assert [answer.outputs[0].text for answer in answers] == wanted


def test_int8_holds_more_than_three_times_the_tokens(folder: Path) -> None:
    floats, int8 = (
        make_engine(folder, kv_cache_dtype=kind).executor.info.num_blocks
        for kind in ("auto", "int8_per_token_head")
    )
    assert int8 / floats == pytest.approx(4 * 16 / (16 + 4), rel=0.01)
