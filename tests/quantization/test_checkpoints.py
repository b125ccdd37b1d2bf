"""Quantized checkpoints load, bit for bit, and answer as transformers does on their weights."""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from oracle import Oracle, make_engine, mixed_work, run, tokens_of
from quantized_checkpoints import Writer, awq, compressed, fp8, gptq, quantize_checkpoint
from safetensors.torch import load_file, save_file

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.engine.llm import LLM
from paged_backend.quantization import patterns
from paged_backend.quantization.patterns import PatternMatcher, Patterns
from paged_backend.quantization.read import QUANTIZATION_METHODS, read_quantization
from paged_backend.sandbox.client import Sandbox
from paged_backend.sandbox.process import SandboxProcess
from paged_backend.sandbox.server import problem
from paged_backend.tools.demo import load_questions
from paged_backend.values.errors import ConfigError
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.validation import shorten

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def ct(stored_format: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights} | group}
    return {
        "quant_method": "compressed-tensors",
        "format": stored_format,
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def packed(bits: int, dtype: torch.dtype = BF16, **args: Any) -> tuple[dict[str, Any], Writer]:
    weights = {"num_bits": bits, "type": "int", "symmetric": True} | args
    return ct("pack-quantized", weights), compressed("pack-quantized", dtype, **weights)


def plain(kind: str, dtype: torch.dtype = F32, **args: Any) -> tuple[dict[str, Any], Writer]:
    weights = {"num_bits": 8, "type": kind, "symmetric": True} | args
    name = f"{kind}-quantized"
    return ct(name, weights), compressed(name, dtype, **weights)


def gptq_config(bits: int, group_size: int, **values: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size} | values


def awq_config(group_size: int) -> dict[str, Any]:
    base = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
    return base | {"group_size": group_size}


FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "w4a16": packed(4, strategy="group", group_size=16),
    "w4a16-asymmetric": packed(4, strategy="group", group_size=16, symmetric=False),
    "w4a16-channel": packed(4, strategy="channel"),
    "w3a16": packed(3, F16, strategy="group", group_size=16),
    "w8a16": packed(8, strategy="channel"),
    "w5a16-asymmetric": packed(5, F32, strategy="channel", symmetric=False),
    "int8-group": plain("int", strategy="group", group_size=16),
    "int8-tensor": plain("int", BF16, strategy="tensor"),
    "int8-asymmetric": plain("int", strategy="channel", symmetric=False),
    "fp8-tensor": plain("float", strategy="tensor"),
    "fp8-channel": plain("float", BF16, strategy="channel"),
    "fp8-blocks": plain("float", strategy="block", block_structure=[48, 40]),
    "gptq-4": (gptq_config(4, 16), gptq(4, 16)),
    "gptq-3": (gptq_config(3, 16), gptq(3, 16)),
    "gptq-2": (gptq_config(2, -1), gptq(2, -1)),
    "gptq-8": (gptq_config(8, -1), gptq(8, -1)),
    "gptq-act-order": (gptq_config(4, 16, desc_act=True), gptq(4, 16, act_order=True)),
    "gptq-v2": (gptq_config(4, 16, checkpoint_format="gptq_v2"), gptq(4, 16, version=2)),
    "awq": (awq_config(16), awq(16)),
    "deepseek-fp8": (
        {"quant_method": "fp8", "weight_block_size": [48, 40]},
        fp8(48, 40, "weight_scale_inv"),
    ),
    "modelopt-fp8": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
        fp8(1024, 1024, "weight_scale"),
    ),
}


def whole(writer: Writer) -> Callable[[str], Writer | None]:
    return lambda layer: writer


@pytest.mark.parametrize("name", FORMATS)
def test_weights_and_tokens(name: str, tmp_path: Path) -> None:
    config, writer = FORMATS[name]
    oracle = Oracle("llama3", tmp_path)
    dense = quantize_checkpoint(oracle.model, tmp_path, config, whole(writer))
    tensors = load_file(tmp_path / "model.safetensors")
    quantization = read_quantization(tmp_path, ConfigFile.read(tmp_path / "config.json"))
    assert quantization is not None
    for layer, wanted in dense.items():
        weight_format = quantization.format_of(layer)
        assert weight_format is not None
        stored = {
            suffix: tensors[f"{layer}.{suffix}"].view(kind.shape)
            for suffix, kind in weight_format.tensors(*wanted.shape).items()
            if f"{layer}.{suffix}" in tensors
        }
        weight = weight_format.read(stored, *wanted.shape).dequantize()
        assert weight.dtype == wanted.dtype
        assert torch.equal(weight, wanted), layer
    work = mixed_work(4)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work)))


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
TOKEN_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}


def test_w8a8_rounds_activations_and_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    oracle = Oracle("llama3", tmp_path)
    config = ct("int-quantized", INT8, input_activations=TOKEN_INT8)
    writer = compressed("int-quantized", F32, **INT8)
    quantize_checkpoint(oracle.model, tmp_path, config, whole(writer))
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
        for name, module in oracle.model.named_modules()
        if name.endswith("_proj")
    ]
    assert hooks
    work = mixed_work(8)
    answers = tokens_of(run(make_engine(tmp_path, max_num_seqs=8), work))
    oracle.confirm(work, answers)
    small = make_engine(tmp_path, max_num_seqs=2, max_num_batched_tokens=16)
    assert tokens_of(run(small, work)) == answers


def rounded(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def test_layers_of_one_product_may_differ(tmp_path: Path) -> None:
    oracle = Oracle("qwen2", tmp_path)  # with biases
    config, writer = packed(4, strategy="group", group_size=16)
    config["ignore"] = ["lm_head", "re:.*k_proj", "model.layers.1.mlp.up_proj"]
    group = {"targets": ["re:.*v_proj"], "format": "int-quantized", "weights": INT8}
    config["config_groups"]["group_1"] = group

    def writer_of(layer: str) -> Writer | None:
        if layer.endswith("k_proj") or layer == "model.layers.1.mlp.up_proj":
            return None
        is_value = layer.endswith("v_proj")
        return compressed("int-quantized", F32, **INT8) if is_value else writer

    quantize_checkpoint(oracle.model, tmp_path, config, writer_of)
    work = mixed_work(4)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work)))


def test_gptq_overrides_some_layers(tmp_path: Path) -> None:
    oracle = Oracle("llama3", tmp_path)
    dynamic = {r"-:.*o_proj": {}, r".*down_proj": {"bits": 8, "group_size": -1}}
    config = gptq_config(4, 16, dynamic=dynamic)

    def writer_of(layer: str) -> Writer | None:
        if layer.endswith("o_proj"):
            return None
        return gptq(8, -1) if layer.endswith("down_proj") else gptq(4, 16)

    quantize_checkpoint(oracle.model, tmp_path, config, writer_of)
    work = mixed_work(4)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work)))


def settings_in(folder: Path) -> dict[str, Any]:
    """Take the quantization_config out of a checkpoint's config.json."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    settings: dict[str, Any] = values.pop("quantization_config")
    path.write_text(json.dumps(values))
    return settings


def write_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


GPTQ_FIELDS = {"bits": 4, "group_size": 16, "damp_percent": 0.01, "desc_act": False, "sym": True}
AWQ_FIELDS = {"zero_point": True, "q_group_size": 16, "w_bit": 4, "version": "GEMM"}
MODELOPT_FIELDS = {
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm*"]},
}
BESIDE = {
    "autogptq": ("quantize_config.json", GPTQ_FIELDS | {"model_file_base_name": "m"}, "gptq-4"),
    "gptqmodel": ("quantize_config.json", GPTQ_FIELDS | {"quant_method": "gptq"}, "gptq-4"),
    "autoawq": ("quant_config.json", AWQ_FIELDS, "awq"),
    "autoawq-older": ("quantize_config.json", AWQ_FIELDS, "awq"),
    "autoawq-newer": ("quantize_config.json", awq_config(16), "awq"),
    "modelopt": ("hf_quant_config.json", MODELOPT_FIELDS, "modelopt-fp8"),
}


@pytest.mark.parametrize("name", BESIDE)
def test_settings_beside_the_config(name: str, tmp_path: Path) -> None:
    file, fields, stored = BESIDE[name]
    config, writer = FORMATS[stored]
    oracle = Oracle("llama3", tmp_path)
    quantize_checkpoint(oracle.model, tmp_path, config, whole(writer))
    settings_in(tmp_path)
    (tmp_path / file).write_text(json.dumps(fields))
    work = mixed_work(4)
    for option in (None, config["quant_method"]):
        engine = make_engine(tmp_path, quantization=option, max_num_seqs=4)
        assert engine.executor.info.quantization == config["quant_method"]
        oracle.confirm(work, tokens_of(run(engine, work)))
    with pytest.raises(ConfigError, match="quantization must be null or"):
        make_engine(tmp_path, quantization="compressed-tensors")


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("section", [None, "text_config"])
def test_settings_within_the_config(key: str, section: str | None, tmp_path: Path) -> None:
    config, writer = FORMATS["w4a16"]
    oracle = Oracle("llama3", tmp_path)
    quantize_checkpoint(oracle.model, tmp_path, config, whole(writer))
    settings = {key: settings_in(tmp_path)}
    write_config(tmp_path, **(settings if section is None else {section: settings}))
    work = mixed_work(4)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work)))


def test_settings_that_contradict_each_other(tmp_path: Path) -> None:
    Oracle("llama3", tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ_FIELDS))
    (tmp_path / "quant_config.json").write_text(json.dumps(AWQ_FIELDS))
    with pytest.raises(ConfigError, match="quant_method is gptq, but another file .* says awq"):
        make_engine(tmp_path)


def test_settings_that_were_left_beside_weights_in_floating_point(tmp_path: Path) -> None:
    oracle = Oracle("llama3", tmp_path)
    (tmp_path / "quantize_config.json").write_text(json.dumps(GPTQ_FIELDS))
    work = mixed_work(4)
    engine = make_engine(tmp_path, max_num_seqs=4)
    assert engine.executor.info.quantization is None
    oracle.confirm(work, tokens_of(run(engine, work)))


ATTENTION = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["self_attn.o_proj"]]


@pytest.mark.sampled
@pytest.mark.parametrize(
    "lists",
    [
        {},
        {"modules_in_block_to_quantize": ATTENTION},
        {"modules_in_block_to_quantize": [name for group in ATTENTION for name in group]},
        {"modules_to_not_convert": ["mlp"]},
        {"modules_to_not_convert": ["mlp.gate", "up_proj", "model.layers.0.mlp", "down"]},
        {"modules_to_not_convert": [r"re:.*\.mlp\..*"]},
        {"modules_to_not_convert": ["model.layers.*.mlp.*"]},
        {"dynamic": {r"-:.*mlp": {}}},
    ],
)
@pytest.mark.parametrize("stored", ["gptq-4", "awq", "deepseek-fp8"])
def test_the_files_show_which_layers_are_quantized(
    stored: str, lists: dict[str, Any], tmp_path: Path
) -> None:
    config, writer = FORMATS[stored]
    oracle = Oracle("llama3", tmp_path)

    def writer_of(layer: str) -> Writer | None:
        return None if ".mlp." in layer else writer

    quantize_checkpoint(oracle.model, tmp_path, config | lists, writer_of)
    work = mixed_work(4)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work)))


@pytest.mark.parametrize("stored", ["gptq-4", "awq", "deepseek-fp8", "modelopt-fp8"])
def test_lists_that_leave_out_layers_which_are_quantized(stored: str, tmp_path: Path) -> None:
    config, writer = FORMATS[stored]
    oracle = Oracle("llama3", tmp_path)
    lists = {"modules_to_not_convert": ["mlp"], "ignore": ["*mlp*"]}
    quantize_checkpoint(oracle.model, tmp_path, config | lists, whole(writer))
    work = mixed_work(4)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work)))


@pytest.mark.parametrize("says", [None, True, False])
@pytest.mark.parametrize("is_packed", [True, False])
def test_an_output_layer_that_is_quantized_or_not(
    is_packed: bool, says: bool | None, tmp_path: Path
) -> None:
    oracle = Oracle("llama3", tmp_path, vocab_size=200, tie_word_embeddings=False)
    writer = gptq(4, 16)
    config = gptq_config(4, 16, **({} if says is None else {"lm_head": says}))
    quantize_checkpoint(oracle.model, tmp_path, config, whole(writer))
    if is_packed:
        tensors = load_file(tmp_path / "model.safetensors")
        stored, dense = writer(tensors.pop("lm_head.weight"))
        oracle.model.lm_head.weight.data = dense.float()
        tensors |= {f"lm_head.{suffix}": tensor for suffix, tensor in stored.items()}
        save_file(tensors, tmp_path / "model.safetensors")
    work = mixed_work(4)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work)))


@pytest.mark.sampled
@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize(
    "inputs", [None, "input_scale", "activation_scale", "act_scale", "input_scale_inv"]
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (-1,), (-1, 1)])
def test_names_and_shapes_of_scales_of_fp8(
    scale: str, inputs: str | None, shape: tuple[int, ...], tmp_path: Path
) -> None:
    oracle = Oracle("llama3", tmp_path)
    rows = 1 if -1 in shape else 1024

    def write(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        stored, dense = fp8(rows, 1024, scale)(weight)
        stored[scale] = stored[scale].reshape(shape)
        if inputs is not None:
            stored[inputs] = torch.tensor(0.1)
        return stored, dense

    config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    quantize_checkpoint(oracle.model, tmp_path, config, whole(write))
    work = mixed_work(2)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work)))


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize("num_input_scales", [0, 1, 3])
@pytest.mark.parametrize("method", ["fp8", "modelopt", "compressed-tensors"])
def test_a_scale_for_each_part_of_a_fused_layer(
    method: str, num_input_scales: int, shape: tuple[int, ...], tmp_path: Path
) -> None:
    oracle = Oracle("phi3", tmp_path)
    sizes = oracle.model.config

    def writer_of(layer: str) -> Writer:
        def write(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            head = len(weight) // (sizes.num_attention_heads + 2 * sizes.num_key_value_heads)
            keys = head * sizes.num_key_value_heads
            rows = {
                "qkv_proj": [len(weight) - 2 * keys, keys, keys],
                "gate_up_proj": [len(weight) // 2] * 2,
            }.get(layer.rpartition(".")[2], [len(weight)])
            parts = [fp8(1024, 1024, "weight_scale")(part) for part in weight.split(rows)]
            stored = {
                "weight": torch.cat([part["weight"] for part, _ in parts]),
                "weight_scale": torch.stack([p["weight_scale"] for p, _ in parts]).view(shape),
            }
            if num_input_scales:
                stored["input_scale"] = torch.ones(min(num_input_scales, len(rows)))
            return stored, torch.cat([dense for _, dense in parts])

        return write

    config = {
        "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
        "modelopt": FORMATS["modelopt-fp8"][0],
        "compressed-tensors": FORMATS["fp8-tensor"][0],
    }[method]
    quantize_checkpoint(oracle.model, tmp_path, config, writer_of)
    work = mixed_work(2)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work)))


def test_blocks_with_scales_of_the_other_name(tmp_path: Path) -> None:
    oracle = Oracle("llama3", tmp_path)
    config = FORMATS["deepseek-fp8"][0] | {"modules_to_not_convert": ["lm_head"]}
    quantize_checkpoint(oracle.model, tmp_path, config, whole(fp8(48, 40, "weight_scale")))
    work = mixed_work(4)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work)))


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_a_float_checkpoint_is_quantized_as_it_is_loaded(name: str, tmp_path: Path) -> None:
    Oracle("smollm", tmp_path)  # its output layer is the embedding
    work = mixed_work(4)
    answers = tokens_of(run(make_engine(tmp_path, quantization=name, max_num_seqs=4), work))
    assert answers != tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work))
    small = make_engine(tmp_path, quantization=name, max_num_seqs=2, max_num_batched_tokens=16)
    assert tokens_of(run(small, work)) == answers


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
TOKEN_FLOAT8 = TOKEN_INT8 | {"type": "float"}


@pytest.mark.parametrize(
    ("config", "rounds_inputs"),
    [
        (ct("float-quantized", FLOAT8, input_activations=TOKEN_FLOAT8), True),
        (ct("float-quantized", FLOAT8), False),
        (ct("int-quantized", INT8, input_activations=TOKEN_INT8), True),
        (ct("int-quantized", INT8, input_activations=TOKEN_FLOAT8), False),
        (ct("int-quantized", INT8 | {"symmetric": False}, input_activations=TOKEN_INT8), False),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
        (awq_config(32), False),
    ],
)
def test_which_formats_round_the_inputs_of_layers(
    config: dict[str, Any], rounds_inputs: bool, tmp_path: Path
) -> None:
    values = ConfigFile({"quantization_config": config}, "config.json")
    quantization = read_quantization(tmp_path, values)
    assert quantization is not None
    weight_format = quantization.format_of("model.layers.0.mlp.up_proj")
    assert weight_format is not None
    assert weight_format.encoding.rounds_inputs == rounds_inputs


# --- checkpoints that are wrong -----------------------------------------------------------------

WEIGHT = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def w4a16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("w4a16")
    config, writer = FORMATS["w4a16"]
    quantize_checkpoint(Oracle("llama3", folder).model, folder, config, whole(writer))
    return folder


def refuse(
    folder: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], None], *words: str
) -> None:
    tensors = dict(load_file(folder / "model.safetensors"))
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ConfigError) as caught:
        make_engine(tmp_path)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number(value: float, w4a16: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[f"{WEIGHT}.weight_scale"][3, 1] = value

    refuse(w4a16, tmp_path, edit, "model.safetensors", f"{WEIGHT}.weight_scale", "above zero")


def test_scales_of_another_group_size(w4a16: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[f"{WEIGHT}.weight_scale"] = tensors[f"{WEIGHT}.weight_scale"][:, :2].clone()

    refuse(w4a16, tmp_path, edit, f"{WEIGHT}.weight_scale has shape [128, 2]", "[128, 4]")


def test_a_scale_without_values(tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    folder.mkdir()
    config, writer = FORMATS["fp8-tensor"]
    quantize_checkpoint(Oracle("llama3", folder).model, folder, config, whole(writer))

    def edit(tensors: dict[str, Any]) -> None:
        tensors[f"{WEIGHT}.weight_scale"] = torch.ones(0)

    refuse(folder, tmp_path, edit, f"{WEIGHT}.weight_scale has shape [0]")


def test_a_wrong_dtype(w4a16: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        name = f"{WEIGHT}.weight_packed"
        tensors[name] = tensors[name].float()

    refuse(w4a16, tmp_path, edit, f"{WEIGHT}.weight_packed must be int32, got torch.float32")


def test_a_shape_that_contradicts_the_sizes(w4a16: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors[f"{WEIGHT}.weight_shape"] = torch.tensor([128, 63])

    refuse(w4a16, tmp_path, edit, f"{WEIGHT}.weight_shape must hold [128, 64]")


def test_a_missing_scale(w4a16: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        del tensors[f"{WEIGHT}.weight_scale"]

    refuse(w4a16, tmp_path, edit, f"1 tensor is missing, such as {WEIGHT}.weight_scale")


def test_groups_that_do_not_exist(tmp_path: Path) -> None:
    folder = tmp_path / "gptq"
    folder.mkdir()
    config, writer = FORMATS["gptq-act-order"]
    quantize_checkpoint(Oracle("llama3", folder).model, folder, config, whole(writer))

    def edit(tensors: dict[str, Any]) -> None:
        tensors[f"{WEIGHT}.g_idx"][5] = 4

    refuse(folder, tmp_path, edit, f"{WEIGHT}.g_idx must hold groups from 0 to 3")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, ["quant_method is 'bitsandbytes'", "awq"]),
        ({}, ["quant_method", "supported"]),
        (ct("nvfp4-pack-quantized", INT8), ["format is 'nvfp4-pack-quantized'"]),
        (ct("int-quantized", INT8 | {"num_bits": 4}), ["num_bits must be 8"]),
        (ct("pack-quantized", INT8 | {"num_bits": 9}), ["num_bits must be 2 to 8"]),
        (ct("pack-quantized", INT8 | {"strategy": "group"}), ["group_size is missing"]),
        (ct("float-quantized", {"type": "float", "strategy": "block"}), ["block_structure"]),
        (ct("int-quantized", INT8) | {"ignore": ["re:("]}, ["ignore holds a wrong expression"]),
        (ct("int-quantized", INT8) | {"ignore": [3]}, ["ignore must be a list of strings"]),
        (ct("int-quantized", INT8) | {"transform_config": {"a": 1}}, ["transform_config is set"]),
        ({"quant_method": "compressed-tensors"}, ["config_groups is missing"]),
        (gptq_config(5, 16), ["bits must be 2, 3, 4 or 8, got 5"]),
        (gptq_config(4, 0), ["group_size must be"]),
        (awq_config(16) | {"bits": 8}, ["bits must be 4"]),
        (awq_config(16) | {"version": "gemv"}, ["version must be gemm"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size must hold two"]),
        ({"quant_method": "fp8", "fmt": "e5m2"}, ["fmt must be"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["quant_algo is 'NVFP4'"]),
        (gptq_config(4, 16, modules_in_block_to_quantize=[[3]]), ["modules_in_block_to_quantize"]),
        (gptq_config(4, 2**31), ["group_size must be an integer from 1 up to 2147483647"]),
        (gptq_config(4, 16, dynamic={str(n): {} for n in range(5000)}), ["at most 4096 entries"]),
        (ct("int-quantized", INT8) | {"ignore": ["re:a"] * 5000}, ["at most 4096 expressions"]),
        (ct("int-quantized", INT8) | {"ignore": ["re:" + "a" * 2000]}, ["2000 characters"]),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    Oracle("llama3", tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"quantization_config": {"x": 0} | config}
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        make_engine(tmp_path)
    assert "\n" not in str(caught.value)
    for word in ["config.json", *words]:
        assert word in str(caught.value)


# It takes minutes for the name of a layer.
SLOW = r"(?:[\w.]+)*!"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (ct("int-quantized", INT8) | {"ignore": ["lm_head", "re:.*xx", f"re:{SLOW}"]}, "ignore"),
        (ct("int-quantized", INT8, targets=[f"re:{SLOW}"]), "targets"),
        (gptq_config(4, 16, dynamic={"+:x": {}, f"-:{SLOW}": {}, ".*y": {}}), "dynamic"),
    ],
    ids=["ignore", "targets", "dynamic"],
)
def test_an_expression_that_takes_long(
    config: dict[str, Any], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT_S", 0.3)
    monkeypatch.setattr(patterns, "_SEARCH_S", 0.1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = ConfigFile.read(tmp_path / "config.json")
    quantization = QUANTIZATION_METHODS[config["quant_method"]](file)
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        quantization.format_of("model.layers.0.self_attn.q_proj")
    assert time.monotonic() - started < 60
    for word in ("config.json", f"{key} holds an expression that takes too long", repr(SLOW)):
        assert word in str(caught.value)


def test_the_process_of_expressions_ends_with_the_load(tmp_path: Path) -> None:
    oracle = Oracle("llama3", tmp_path)
    config, writer = FORMATS["int8-tensor"]
    ignore = {"ignore": ["lm_head", r"re:.*layers\.1\..*"]}
    quantize_checkpoint(
        oracle.model,
        tmp_path,
        config | ignore,
        lambda layer: None if ".layers.1." in layer else writer,
    )
    gc.collect()  # errors of earlier tests hold processes
    before = psutil.Process().children()
    engine = make_engine(tmp_path, max_num_seqs=4)
    gc.collect()
    assert psutil.Process().children() == before
    work = mixed_work(2)
    oracle.confirm(work, tokens_of(run(engine, work)))


def test_many_names_for_expressions_that_take_long_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patterns, "TIME_LIMIT_S", 0.5)
    quick_alone = Patterns(ConfigFile({}, "x"), "y", [r"(?:\w+)*!"], PatternMatcher())
    with pytest.raises(ConfigError, match="y holds an expression that takes too long"):
        for number in range(1000):
            quick_alone.first(f"{number:018}")


def test_expressions_that_take_long_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are compiled in the process only, which has a limit and leaves this one's lock alone."""
    monkeypatch.setattr(patterns, "TIME_LIMIT_S", 1.0)
    monkeypatch.setattr(patterns, "_SEARCH_S", 0.1)
    slow = ["(?i)" + "[\x00-\uffff]" * 200 + str(number) for number in range(20)]
    before_s = time.process_time()
    with pytest.raises(ConfigError, match="y holds an expression that takes too long"):
        Patterns(ConfigFile({}, "x"), "y", ["a", *slow], PatternMatcher())
    assert time.process_time() - before_s < 1.0


@pytest.mark.parametrize("wrong", ["(", "a{99999999999999999999}", r"\ud8"])
def test_a_wrong_expression_among_others(wrong: str) -> None:
    wanted = re.escape(f"y holds a wrong expression, {shorten(wrong)}: ")
    with pytest.raises(ConfigError, match=wanted):
        Patterns(ConfigFile({}, "x"), "y", ["a", wrong, "b"], PatternMatcher())


def test_a_list_is_sent_once_to_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = PatternMatcher()
    sent = []
    exchange = SandboxProcess.exchange

    def noting(process: SandboxProcess, line: bytes, *limits: float) -> bytes:
        sent.append(line)
        return exchange(process, line, *limits)

    monkeypatch.setattr(SandboxProcess, "exchange", noting)
    lists = [["x1", "a"], ["b", "x2"]]
    first, second = (Patterns(ConfigFile({}, "x"), "y", each, matcher) for each in lists)
    for number in range(50):
        names = [f"a{number}", f"b{number}"]
        assert [first.first(name) for name in names] == [1, None]
        assert [second.first(name) for name in names] == [None, 0]
        if number == 25:
            (process,) = matcher._sandbox._idle
            psutil.Process(process.pid).kill()
    assert [sum(name in line for line in sent) for name in (b"x1", b"x2")] == [2, 2]


def test_many_names_have_a_limit_of_wall_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange takes longer than to match a quick expression."""
    monkeypatch.setattr(patterns, "WALL_LIMIT_S", 1.0)
    quick = Patterns(ConfigFile({}, "x"), "y", ["a"], PatternMatcher())
    with pytest.raises(
        ConfigError, match="could not be matched: too_slow: all names took over 1 s"
    ):
        for number in range(100_000):
            quick.first(f"{number}")


def test_expressions_that_need_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sandbox, "ask", lambda *args, **limits: problem("it needs over 256 MiB"))
    with pytest.raises(ConfigError, match="y holds expressions .* it needs over 256 MiB"):
        Patterns(ConfigFile({}, "x"), "y", ["a"], PatternMatcher())


def test_options_that_contradict_the_checkpoint(w4a16: Path) -> None:
    with pytest.raises(ConfigError, match="quantization must be null or compressed-tensors"):
        make_engine(w4a16, quantization="awq")
    with pytest.raises(ConfigError, match="load_format can only be auto"):
        make_engine(w4a16, load_format="dummy")
    make_engine(w4a16, quantization="compressed-tensors")


@pytest.mark.parametrize(
    "name", ["int4", *(pytest.param(n, marks=pytest.mark.thorough) for n in ("int8", "fp8"))]
)
def test_the_demo_model_answers_every_question(name: str) -> None:
    questions = load_questions()
    params = SamplingParams(temperature=0, max_tokens=64)
    prompts = [question.question for question in questions]
    answers = LLM("demo", quantization=name).generate(prompts, params)
    wanted = [f"\n{question.answer}" for question in questions]
    assert [answer.outputs[0].text for answer in answers] == wanted


def test_a_kv_cache_format_of_a_model_without_attention_means_nothing(tmp_path: Path) -> None:
    """Weights in FP8; the small layers of the mixer are not quantized."""
    oracle = Oracle("mamba", tmp_path)
    config = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "kv_cache_scheme": "static",
        "modules_to_not_convert": ["x_proj", "dt_proj"],
    }
    writer = fp8(128, 128, "weight_scale_inv")
    small = re.compile(r"\.(x|dt)_proj$")
    quantize_checkpoint(
        oracle.model, tmp_path, config, lambda layer: None if small.search(layer) else writer
    )
    engine = make_engine(tmp_path)
    assert engine.executor.info.kv_cache == ""
    work = mixed_work(6)
    oracle.confirm(work, tokens_of(run(engine, work)))
