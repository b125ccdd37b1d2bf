"""GGUF files load, bit for bit, and answer as transformers does on their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from checkpoints import make_checkpoint
from gguf import GGMLQuantizationType as Kind
from gguf_files import SCALES, GgufModel, write_gguf
from oracle import Oracle, make_engine, mixed_work, run, tokens_of
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.checkpoint.shape_reader import read_shape
from paged_backend.checkpoint.weights import load_weights
from paged_backend.models.loader import build_model
from paged_backend.platforms.cpu.torch_platform import TorchPlatform
from paged_backend.tools.bench.decode import run_decode_bench
from paged_backend.tools.bench.peer_options import PeerOptions
from paged_backend.tools.plan.model_file import find_config, read_config
from paged_backend.values.errors import ConfigError

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
SMALL = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)


def sizes(kind: Kind) -> dict[str, int]:
    """Sizes of a model whose rows are whole blocks."""
    if kind in SCALES:
        wide = {"num_attention_heads": 8, "head_dim": 32}
        return {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1} | wide
    return {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2}


def parameters(path: Path) -> dict[str, torch.Tensor]:
    """A model's weights before they are packed."""
    model = build_model(load_model_config(path), 64, TorchPlatform(torch.float32))
    load_weights(path, model.parameters())
    return {
        name: place for name, place in model.parameters().items() if isinstance(place, torch.Tensor)
    }


@pytest.mark.parametrize("kind", [*SMALL, *SCALES], ids=lambda kind: kind.name)
def test_weights_are_those_of_the_library(kind: Kind, tmp_path: Path) -> None:
    model = make_checkpoint("llama3", tmp_path / "float", **sizes(kind))
    file = write_gguf(tmp_path / "m.gguf", model, kind)
    weights = parameters(file.path)
    assert set(weights) == set(file.stored)
    for name, (stored, stored_kind) in file.stored.items():
        wanted = torch.from_numpy(gguf.quants.dequantize(stored, stored_kind).copy())
        assert torch.equal(weights[name], wanted), name


@pytest.mark.parametrize(
    ("family", "kind", "options"),
    [
        ("llama2", Kind.Q8_0, {}),
        ("llama3", Kind.Q4_K, {}),
        ("llama-linear-bias", Kind.Q5_1, {}),
        ("mistral", Kind.F16, {}),
        ("qwen2", Kind.Q4_0, {"rope_parameters": YARN}),
        ("qwen3", Kind.Q6_K, {}),
        ("smollm", Kind.BF16, {}),
    ],
)
def test_tokens_are_those_of_transformers(
    family: str, kind: Kind, options: dict[str, Any], tmp_path: Path
) -> None:
    oracle = Oracle(family, tmp_path / "float", **sizes(kind), **options)
    file = GgufModel(tmp_path / "m.gguf", oracle.model).metadata()
    if family == "mistral":
        file.writer.add_sliding_window(oracle.model.config.sliding_window)
    path = file.tensors(kind).close()
    state = oracle.model.state_dict()
    for name, weight in parameters(path).items():
        assert torch.equal(weight, state[name]), name
    work = mixed_work(4)
    oracle.confirm(work, tokens_of(run(make_engine(path, max_num_seqs=4), work)))


@pytest.mark.parametrize("family", ["llama2", "qwen2", "qwen3"])
def test_weights_are_those_that_transformers_reads(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path / "float", **sizes(Kind.Q8_0))
    path = write_gguf(tmp_path / "m.gguf", model).path
    read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)
    for name, weight in parameters(path).items():
        assert torch.equal(weight, read["tensors"][name]), name


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F32, "float32"), (Kind.F16, "float16"), (Kind.Q4_0, "bfloat16")]
)
def test_dtype(kind: Kind, dtype: str, tmp_path: Path) -> None:
    model = make_checkpoint("qwen2", tmp_path / "float", **sizes(kind))
    path = write_gguf(tmp_path / "m.gguf", model, kind).path
    assert load_model_config(path).dtype == getattr(torch, dtype)


def test_options(tmp_path: Path) -> None:
    model = make_checkpoint("qwen2", tmp_path / "float", **sizes(Kind.Q8_0))
    path = write_gguf(tmp_path / "m.gguf", model).path
    make_engine(path, quantization="gguf")
    with pytest.raises(ConfigError, match="without a peer: add --no-peer"):
        run_decode_bench(
            {"model": str(path)},
            contexts=[8],
            batch_sizes=[1],
            num_steps=1,
            peer=PeerOptions("transformers"),
        )
    with pytest.raises(ConfigError, match="quantization must be null or gguf"):
        make_engine(path, quantization="int8")
    with pytest.raises(ConfigError, match="load_format can only be auto"):
        make_engine(path, load_format="dummy")


def test_plan_reads_the_metadata(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "float", **sizes(Kind.Q8_0))
    path = write_gguf(tmp_path / "m.gguf", model).path
    ours, wanted = (
        read_shape(read_config(find_config(str(model_path))))
        for model_path in (path, tmp_path / "float")
    )
    assert ours == wanted


@pytest.mark.parametrize("family", ["llama3", "qwen2-window", "llama-linear-bias", "llama2"])
def test_rope_is_that_of_the_float_checkpoint(family: str, tmp_path: Path) -> None:
    model = make_checkpoint(family, tmp_path / "float")
    path = write_gguf(tmp_path / "m.gguf", model, Kind.F32).path
    ours, wanted = (load_model_config(at).ropes[0] for at in (path, tmp_path / "float"))
    assert ours.frequencies == pytest.approx(wanted.frequencies, rel=1e-6)
    assert ours.scale == pytest.approx(wanted.scale, rel=1e-6)
