"""`paged-backend quantize`: its checkpoints are read by compressed-tensors and by this engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from oracle import Oracle, make_engine, mixed_work, run, tokens_of
from safetensors.torch import load_file

from paged_backend.checkpoint.bundled import BUNDLED_MODELS
from paged_backend.cli import main
from paged_backend.engine.llm import LLM
from paged_backend.tools.demo import load_questions
from paged_backend.values.sampling_params import SamplingParams

MAX_ERROR = {"w8a8": 0.01, "w4a16": 0.08, "fp8": 0.04}


def quantize(folder: Path, output: Path, scheme: str) -> int:
    return main(
        ["quantize", str(folder), "--scheme", scheme, "-o", str(output), "--group-size", "32"]
    )


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16", "fp8"])
def test_compressed_tensors_reads_what_is_written(scheme: str, tmp_path: Path) -> None:
    model = make_checkpoint("qwen2", tmp_path / "a", intermediate_size=96, max_shard_size="100KB")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "a", max_shard_size="100KB")
    assert quantize(tmp_path / "a", tmp_path / "b", scheme) == 0
    values = json.loads((tmp_path / "b" / "config.json").read_text())
    config = QuantizationConfig(**values["quantization_config"])
    (group,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = {
        name: tensor
        for file in (tmp_path / "b").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(tensors)
    for name, weight in model.state_dict().items():
        layer = name.removesuffix(".weight")
        if not name.endswith("_proj.weight"):
            assert torch.equal(tensors[name], weight), name
            continue
        stored = {n.removeprefix(f"{layer}."): t for n, t in tensors.items() if n.startswith(layer)}
        dense = compressor.decompress(stored, group)["weight"]
        assert dense.shape == weight.shape
        error = (dense.float() - weight.float()).abs().max() / weight.float().abs().max()
        assert 0 < error < MAX_ERROR[scheme]


@pytest.mark.parametrize("scheme", ["w4a16", "fp8"])
def test_tokens_are_those_of_the_dense_weights(scheme: str, tmp_path: Path) -> None:
    oracle = Oracle("llama3", tmp_path / "a", intermediate_size=96)
    assert quantize(tmp_path / "a", tmp_path / "b", scheme) == 0
    values = json.loads((tmp_path / "b" / "config.json").read_text())
    config = QuantizationConfig(**values["quantization_config"])
    (group,) = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = load_file(tmp_path / "b" / "model.safetensors")
    for name, parameter in oracle.model.named_parameters():
        if name.endswith("_proj.weight"):
            layer = name.removesuffix("weight")
            stored = {n.removeprefix(layer): t for n, t in tensors.items() if n.startswith(layer)}
            parameter.data = compressor.decompress(stored, group)["weight"].float()
    work = mixed_work(4)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path / "b", max_num_seqs=4), work)))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a16", "fp8"])
def test_the_demo_model_answers_as_before(scheme: str, tmp_path: Path) -> None:
    assert quantize(Path(BUNDLED_MODELS["demo"]), tmp_path / "demo", scheme) == 0
    questions = load_questions()
    params = SamplingParams(temperature=0, max_tokens=64)
    answers = LLM(str(tmp_path / "demo")).generate([q.question for q in questions], params)
    wanted = [f"\n{question.answer}" for question in questions]
    assert [answer.outputs[0].text for answer in answers] == wanted


def test_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint("llama3", tmp_path / "a")  # 112 inputs of down_proj
    assert quantize(tmp_path / "a", tmp_path / "b", "w4a16") == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "group-size must divide the 112 inputs" in message and "down_proj" in message
    assert not (tmp_path / "b").exists()
    assert quantize(tmp_path / "a", tmp_path / "b", "w8a8") == 0
    assert quantize(tmp_path / "a", tmp_path / "b", "w8a8") == 2
    assert "exists; give a new folder" in capsys.readouterr().err
    assert quantize(tmp_path / "b", tmp_path / "c", "w8a8") == 2
    assert "is quantized already" in capsys.readouterr().err
