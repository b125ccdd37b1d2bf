"""What several ranks cost: the memory of each, and the traffic of a token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from comparison import EVEN, PP2, TP2, TP2_PP2
from ranks_in_threads import ThreadedRanks, make_ranks_engine

from paged_backend.checkpoint.model_config import ModelConfig, load_model_config
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.stages import stage_of
from paged_backend.checkpoint.tensors import Role
from paged_backend.engine.engine import Engine
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams


def test_stages_have_as_many_layers_as_those_of_vllm() -> None:
    def sizes(num_layers: int, num_stages: int) -> list[int]:
        stages = [stage_of(num_layers, number, num_stages) for number in range(num_stages)]
        assert [index for stage in stages for index in stage.layers] == list(range(num_layers))
        return [len(stage.layers) for stage in stages]

    assert sizes(80, 4) == [20, 20, 20, 20]
    assert sizes(32, 3) == [11, 11, 10]
    assert sizes(30, 4) == [7, 8, 8, 7]
    assert sizes(5, 4) == [1, 1, 2, 1]
    assert sizes(4, 4) == [1, 1, 1, 1]


def held(config: ModelConfig, width: int = 1) -> int:
    """Bytes of a rank's weights in float32, computed from the list of tensors."""
    elements = 0
    for spec in tensors_of(config).values():
        is_vocabulary = spec.role in (Role.EMBEDDING, Role.HEAD)
        divided = spec.shard is not None and not (is_vocabulary and config.vocab_size % width)
        elements += spec.num_elements // (width if divided else 1)
    return 4 * elements


@pytest.mark.parametrize("family", ["llama3", "qwen2-moe", "gpt-oss", "gemma3"])
def test_the_weights_of_a_rank_are_as_few_as_computed(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, **EVEN, intermediate_size=128)
    config = load_model_config(tmp_path)
    stages = [replace(config, stage=stage_of(config.num_layers, number, 2)) for number in (0, 1)]
    one = make_ranks_engine(tmp_path).executor.info.weight_bytes
    others = one - held(config)  # rotary tables, and panels that are padded
    assert 0 <= others < 0.3 * one
    for layout, parts, width in ((TP2, [config], 2), (PP2, stages, 1), (TP2_PP2, stages, 2)):
        workers = ranks_of(tmp_path, **layout).workers
        for number, worker in enumerate(workers):
            computed = held(parts[number // width], width)
            assert 0 <= worker.info.weight_bytes - computed <= others * 1.2, (layout, number)


def ranks_of(folder: Path, **options: Any) -> ThreadedRanks:
    executor = make_ranks_engine(folder, **options).executor
    assert isinstance(executor, ThreadedRanks)
    return executor


def test_the_pool_of_a_stage_has_its_layers_only(tmp_path: Path) -> None:
    """All ranks have the same number of blocks, that of the rank with the largest blocks."""
    make_checkpoint("llama3", tmp_path, num_hidden_layers=5)
    one = make_ranks_engine(tmp_path).executor.info
    workers = ranks_of(tmp_path, pipeline_parallel_size=3).workers
    per_layer = one.kv_bytes_per_token // 5
    assert [worker.info.kv_bytes_per_token // per_layer for worker in workers] == [2, 2, 1]
    assert {worker.info.num_blocks for worker in workers} == {2**24 // (2 * 16 * per_layer)}
    assert len({worker.info.kv_layout for worker in workers}) == 1


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama3", TP2),
        ("llama3", PP2),
        ("llama3", TP2_PP2),
        ("llama3", TP2_PP2 | {"quantization": "int8"}),
        ("olmo2", TP2_PP2),
    ],
)
def test_the_traffic_of_a_token_is_as_little_as_computed(
    family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path, **EVEN, num_hidden_layers=4)
    config = load_model_config(tmp_path)
    width, depth = layout.get("tensor_parallel_size", 1), layout.get("pipeline_parallel_size", 1)
    engine = make_ranks_engine(tmp_path, **layout)
    assert isinstance(engine.executor, ThreadedRanks)
    before = engine.executor.sent_bytes
    prompt, num_tokens = list(range(3, 43)), 8
    generate(engine, prompt, num_tokens)
    sent = [now - then for now, then in zip(engine.executor.sent_bytes, before, strict=True)]
    rows = len(prompt) + num_tokens - 1
    for rank in range(width * depth):
        stage = stage_of(config.num_layers, rank // width, depth)
        # Two sums in each layer and one for the embedding; only rows with logits go on in the last.
        sums = 2 * len(stage.layers) * rows + stage.is_first * rows
        if stage.is_last:
            sums -= 2 * (rows - num_tokens)
        numbers = (width - 1) * sums * config.hidden_size
        if "quantization" in layout:  # the largest number of each row that is rounded
            numbers += (width - 1) * (sums - stage.is_first * rows)
        if family == "olmo2":  # the norms of queries and of keys
            numbers += (width - 1) * 2 * len(stage.layers) * rows
        if stage.is_last:
            numbers += (width - 1) * num_tokens * config.vocab_size // width
            numbers += (depth - 1) * num_tokens * config.vocab_size
        else:
            numbers += rows * config.hidden_size
        assert sent[rank] == 4 * numbers, rank


def generate(engine: Engine, prompt: list[int], num_tokens: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    engine.add_request(Request("r", prompt, params))
    while engine.has_unfinished:
        engine.step()
