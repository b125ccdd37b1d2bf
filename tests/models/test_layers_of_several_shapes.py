"""Gemma 3n and 4, with layers that share keys and values: options of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from lora_oracle import LoraOracle, lora_options, run_requests
from oracle import make_engine, mixed_work, run, tokens_of
from ranks_in_threads import load_first_rank
from safetensors.torch import load_file, save_file

from paged_backend.values.errors import ConfigError


def test_adapters_give_the_tokens_of_merged_weights(tmp_path: Path) -> None:
    oracle = LoraOracle("gemma4", tmp_path)
    engine = make_engine(oracle.folder, **lora_options(oracle))
    requests = oracle.requests(6, 40, 5)
    oracle.confirm(requests, run_requests(engine, requests))


@pytest.mark.sampled
@pytest.mark.parametrize("weights", [None, "int8"])
@pytest.mark.parametrize("stored", ["fp8", "int8_per_token_head", "static scales"])
def test_tokens_from_8_bits_do_not_depend_on_the_batch(
    stored: str, weights: str | None, tmp_path: Path
) -> None:
    make_checkpoint("gemma4", tmp_path)
    options: dict[str, object] = {} if weights is None else {"quantization": weights}
    options["kv_cache_dtype"] = stored
    if stored == "static scales":
        options["kv_cache_dtype"] = "fp8"
        add_scales(tmp_path)
    work = mixed_work(5)
    alone = [tokens_of(run(make_engine(tmp_path, **options), [one]))[0] for one in work]
    engine = make_engine(tmp_path, max_num_batched_tokens=9, max_num_seqs=4, **options)
    assert ("checkpoint" in engine.executor.info.kv_cache) is (stored == "static scales")
    assert tokens_of(run(engine, work)) == alone


def add_scales(folder: Path) -> None:
    """Add the scales of the layers that keep keys and values; others have none."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for layer in range(3):
        for kind in ("k_scale", "v_scale"):
            tensors[f"model.layers.{layer}.self_attn.{kind}"] = torch.tensor(0.02)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "1 for a model with inputs of layers"),
        ({"hidden_size_per_layer_input": 0}, "1 for a model with layers that share keys"),
    ],
)
def test_stages_are_refused(values: dict[str, int], message: str, tmp_path: Path) -> None:
    make_checkpoint("gemma4", tmp_path, **values)
    with pytest.raises(ConfigError, match=f"pipeline_parallel_size .*{message}"):
        load_first_rank(tmp_path, pipeline_parallel_size=2)


def test_stages_of_layers_that_transformers_computes_are_refused(tmp_path: Path) -> None:
    make_checkpoint("gemma3n_text", tmp_path)
    with pytest.raises(ConfigError, match="^option pipeline_parallel_size can only be 1 for "):
        load_first_rank(tmp_path, pipeline_parallel_size=2)


def test_layers_that_transformers_computes_keep_shared_keys_once(tmp_path: Path) -> None:
    """Two of four layers keep keys and values of 2 heads of 16."""
    make_checkpoint("gemma3n_text", tmp_path)
    assert make_engine(tmp_path).executor.info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4


def test_exchanged_sizes_of_heads_are_noticed(tmp_path: Path) -> None:
    """A negative control: layers with a window have heads of 16, the others of 32."""
    make_checkpoint("gemma4", tmp_path)
    file = tmp_path / "config.json"
    values = json.loads(file.read_text())
    others = values["per_layer_config"]
    small, large = values["head_dim"], others["2"]["head_dim"]
    exchanged = {layer: {"head_dim": small} for layer in others}
    file.write_text(json.dumps(values | {"head_dim": large, "per_layer_config": exchanged}))
    with pytest.raises(ConfigError, match="has shape .*, but config.json asks for"):
        make_engine(tmp_path)
