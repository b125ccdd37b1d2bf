"""Adapters of models with states: the logits are those of merged models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lora_oracle import ATTENTION, MLP, LoraOracle, lora_options, run_requests
from oracle import make_engine

from paged_backend.values.errors import ConfigError


@pytest.mark.parametrize(
    ("family", "mixer", "others"),
    [
        ("qwen3-next", ("in_proj_qkvz", "out_proj"), (*ATTENTION, *MLP)),
        ("falcon-h1", ("in_proj", "out_proj"), (*ATTENTION, *MLP)),
        ("lfm2", ("in_proj", "out_proj"), ("q_proj", "k_proj", "v_proj", "w1", "w2", "w3")),
        ("jamba", ("in_proj", "out_proj"), (*ATTENTION, *MLP)),
        ("nemotron-h", ("in_proj", "out_proj"), (*ATTENTION, "up_proj", "down_proj")),
        ("kimi-linear", ("q_proj", "k_proj", "v_proj", "o_proj"), MLP),
        ("mamba", ("in_proj", "out_proj"), ()),
        ("mamba2", ("in_proj", "out_proj"), ()),
        ("minimax", ("qkv_proj", "output_gate", "out_proj"), ATTENTION),
        ("recurrent-gemma", ("linear_x", "linear_y", "linear_out"), (*ATTENTION, *MLP)),
    ],
)
def test_logits_equal_those_of_merged_models(
    family: str, mixer: tuple[str, ...], others: tuple[str, ...], tmp_path: Path
) -> None:
    """The last layer has a state, so that its mixer reads all rows and its MLP only some."""
    adapters = (4, (*mixer, *others)), (2, mixer)
    oracle = LoraOracle(family, tmp_path, adapters)
    engine = make_engine(oracle.folder, **lora_options(oracle, max_num_batched_tokens=32))
    requests = [
        replace(each, params=replace(each.params, logprobs=1, return_generation_logits=True))
        for each in oracle.requests(6, 60, 6)
    ]
    outputs = run_requests(engine, requests)
    oracle.confirm(requests, outputs)
    for request in requests:
        model = oracle.model_of(request)
        model.confirm_logprobs(request.prompt_token_ids, list(outputs[request.request_id]))


@pytest.mark.parametrize(
    ("family", "module"), [("qwen3-next", "in_proj_ba"), ("jamba", "x_proj"), ("jamba", "dt_proj")]
)
def test_small_layers_have_none(family: str, module: str, tmp_path: Path) -> None:
    oracle = LoraOracle(family, tmp_path, [(2, (module,))])
    with pytest.raises(ConfigError, match=rf"{module}' is no module that can have an adapter"):
        make_engine(oracle.folder, **lora_options(oracle))
