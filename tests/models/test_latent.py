"""Families with latent attention: what they keep, share, quantize, adapt and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, values_of
from lora_oracle import numbered
from oracle import Oracle, Work, make_engine, mixed_work, run, tokens_of
from quantized_checkpoints import fp8, quantize_checkpoint
from safetensors.torch import load_file, save_file

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.shape_reader import read_shape
from paged_backend.engine.engine import Engine
from paged_backend.values.errors import ConfigError
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(  # peft uses a deprecated property of transformers
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"
)
FAMILIES = "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite", "minicpm3"
PROJECTIONS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle("deepseek-v3", tmp_path_factory.mktemp("deepseek"))


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_a_layer_keeps_one_row_for_each_token(oracle: Oracle, dtype: str, itemsize: int) -> None:
    info = make_engine(oracle.folder, kv_cache_dtype="auto", dtype=dtype).executor.info
    assert info.kv_bytes_per_token == 3 * (32 + 8) * itemsize  # layers, latent vector, rotary key
    assert info.num_blocks == 16 * 2**20 // (16 * info.kv_bytes_per_token)


def test_rows_may_be_stored_in_bfloat16(oracle: Oracle) -> None:
    engine = make_engine(oracle.folder, kv_cache_dtype="bfloat16")
    assert engine.executor.info.kv_bytes_per_token == 3 * 40 * 2
    work = mixed_work(6)
    answers = tokens_of(run(engine, work))
    firsts = [oracle.generate(prompt, 1)[0] for prompt, _ in work]
    agree = sum(answer[0] == first for answer, first in zip(answers, firsts, strict=True))
    assert agree >= 5  # rows are rounded to 8 bits of a mantissa


def test_completions_of_a_prompt_share_its_rows(oracle: Oracle) -> None:
    prompt = list(range(3, 40))  # its last block is copied before the first token is added to it
    params = SamplingParams(temperature=0, max_tokens=9, n=3)
    engine = make_engine(oracle.folder)
    engine.add_request(Request("0", prompt, params))
    answers: dict[int, list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            answers.setdefault(output.index, []).extend(output.new_token_ids)
    assert len(answers) == 3
    for answer in answers.values():
        oracle.confirm([(prompt, 9)], [answer])


@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v2-lite"])
def test_weights_in_blocks_of_fp8(family: str, tmp_path: Path) -> None:
    oracle = Oracle(family, tmp_path)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    quantize_attention(oracle, config)
    work = mixed_work(4)
    # Without a device that multiplies FP8, weights are dequantized, and nothing else is rounded.
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path, max_num_seqs=4), work)))


def quantize_attention(oracle: Oracle, config: dict[str, Any]) -> None:
    """Store attention and dense MLPs of an oracle's checkpoint in blocks of 16 x 16."""
    stored = load_file(oracle.folder / "model.safetensors")
    experts = sorted({name.rpartition(".")[0] for name in stored if ".mlp." in name})
    writer = fp8(16, 16, "weight_scale_inv")
    skipped = {"modules_to_not_convert": experts}
    quantize_checkpoint(
        oracle.model,
        oracle.folder,
        config | skipped,
        lambda layer: writer if ".self_attn." in layer else None,
    )
    # The oracle's state has experts in the layout of transformers' classes.
    quantized = load_file(oracle.folder / "model.safetensors")
    attention = {name: tensor for name, tensor in quantized.items() if ".self_attn." in name}
    others = {name: tensor for name, tensor in stored.items() if ".self_attn." not in name}
    save_file({**attention, **others}, oracle.folder / "model.safetensors")


def test_layers_that_predict_more_tokens_are_not_loaded(tmp_path: Path) -> None:
    oracle = Oracle("deepseek-v3", tmp_path)
    file, path = tmp_path / "model.safetensors", tmp_path / "config.json"
    more = {"model.layers.3.eh_proj.weight": torch.ones(4, 4)}
    save_file(load_file(file) | more, file)
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"num_nextn_predict_layers": 1}))
    work = mixed_work(2)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path), work)))
    path.write_text(json.dumps(values | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.eh_proj\.weight has no place"):
        make_engine(tmp_path)


def adapted(folder: Path, targets: list[str]) -> tuple[Any, Engine]:
    """A model with one random adapter, and an engine that knows it as ``one``."""
    base = make_checkpoint("deepseek-v3", folder / "model")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets)
    torch.manual_seed(5)
    model = peft.PeftModel(base, config, adapter_name="one")
    for key, parameter in model.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder / "adapters")
    modules = {"one": str(folder / "adapters" / "one")}
    return model.eval(), make_engine(folder / "model", enable_lora=True, lora_modules=modules)


def test_adapters_of_all_projections_but_the_absorbed_one(tmp_path: Path) -> None:
    model, engine = adapted(tmp_path, PROJECTIONS)
    lora = numbered({"one": str(tmp_path / "adapters" / "one")})["one"]
    work: Work = [(prompt, 6) for prompt, _ in mixed_work(4)]
    for index, (prompt, limit) in enumerate(work):
        params = SamplingParams(temperature=0, max_tokens=limit)
        engine.add_request(Request(str(index), prompt, params, lora=lora))
    answers: dict[str, list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            answers.setdefault(output.request_id, []).extend(output.new_token_ids)
    for index, (prompt, _) in enumerate(work):
        answer = answers[str(index)]
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_an_adapter_of_the_absorbed_projection_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_b_proj.* is no module that can have an adapter"):
        adapted(tmp_path, ["kv_b_proj"])


V2, V3, GLM, MINI = "DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3"
REFUSED = [
    (V2, {"mlp_bias": True}, "mlp_bias is true, which is not supported"),
    (V2, {"norm_topk_prob": True}, "norm_topk_prob is true, which is not supported"),
    (V2, {"topk_method": "noaux_tc"}, "topk_method must be one of greedy, group_limited_greedy"),
    (V2, {"moe_layer_freq": 2}, "moe_layer_freq is not supported unless it is 1, got 2"),
    (V2, {"q_lora_rank": None, "attention_bias": True}, "attention_bias is true, which is not"),
    (V3, {"scoring_func": "softmax"}, "scoring_func must be one of sigmoid, got"),
    (V3, {"n_group": 3}, r"n_group must divide n_routed_experts \(8\) into groups of 2 or more"),
    (V3, {"n_group": 8}, r"n_group must divide n_routed_experts \(8\) into groups of 2 or more"),
    (V3, {"topk_group": 5}, "topk_group must be an integer from 1 up to 4"),
    (V3, {"num_experts_per_tok": 5}, "num_experts_per_tok must be an integer from 1 up to 4"),
    (V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim must be even, got 7"),
    (V3, {"kv_lora_rank": 0}, "kv_lora_rank must be an integer from 1"),
    (GLM, {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of 3 strings"),
    (GLM, {"mlp_layer_types": ["dense", "x", "sparse"]}, "mlp_layer_types holds 'x'; known:"),
    (MINI, {"attention_bias": True, "q_lora_rank": None}, "attention_bias is true, which is not"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_values_that_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    base = values_of("minicpm3" if family == MINI else "deepseek-v3")
    values = {**base, "attention_bias": False, **changes}
    values["architectures"] = [f"{family}ForCausalLM"]
    with pytest.raises(ConfigError, match=message):
        read_shape(ConfigFile(values, "config.json"))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shape_says_what_is_kept(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    shape = read_shape(ConfigFile.read(tmp_path / "config.json"))
    assert shape.kept_of(0) == (1, 40, 0)
