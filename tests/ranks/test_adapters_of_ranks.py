"""Several ranks with LoRA adapters answer as one, and as transformers' merged models."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch
from lora_oracle import ATTENTION, MLP, LoraOracle, answer_of, lora_options, run_requests
from oracle import make_engine
from ranks_in_threads import make_ranks_engine, torch_threads_restored
from safetensors.torch import load_file, save_file

from paged_backend.engine.engine import Engine
from paged_backend.values.errors import ConfigError
from paged_backend.values.lora import numbered
from paged_backend.values.outputs import SequenceOutput

_MAMBA = [(4, ("in_proj", "out_proj")), (2, ("in_proj",))]
STEPS = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "max_model_len": 128}


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """Leave torch's number of threads to other tests as it was."""
    with torch_threads_restored():
        yield


@pytest.mark.parametrize(
    ("family", "sizes", "num_ranks"),
    [
        pytest.param("llama3", {}, 2, id="dense"),
        pytest.param("qwen2", {}, 2, id="biases", marks=pytest.mark.thorough),
        pytest.param("qwen3", {}, 2, id="norms of heads", marks=pytest.mark.thorough),
        pytest.param(
            "llama3", {"num_attention_heads": 4, "num_key_value_heads": 1}, 2, id="one head for two"
        ),
        pytest.param("llama3", {"num_key_value_heads": 4}, 4, id="four ranks"),
    ],
)
def test_tokens_are_those_of_merged_models(
    family: str, sizes: dict[str, object], num_ranks: int, tmp_path: Path
) -> None:
    oracle = LoraOracle(family, tmp_path, num_hidden_layers=2, **sizes)
    requests = oracle.requests(12, 60, 16)
    engine = make_ranks_engine(
        oracle.folder, **lora_options(oracle, **STEPS), tensor_parallel_size=num_ranks
    )
    oracle.confirm(requests, run_requests(engine, requests))


@pytest.mark.parametrize(
    ("family", "sizes", "adapters", "layout"),
    [
        pytest.param("mamba2", {}, _MAMBA, {"tensor_parallel_size": 2}, id="states of heads"),
        pytest.param(
            "granite-hybrid-rope",
            {
                "num_hidden_layers": 4,
                "layer_types": ["linear_attention", "full_attention"] * 2,
            },
            [(4, (*ATTENTION, *_MAMBA[0][1])), (2, ("out_proj",))],
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            id="states and attention, in stages of two",
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            "kimi-linear",
            {
                "linear_num_heads": 4,
                "num_hidden_layers": 4,
                "layer_types": ["linear_attention", "full_attention"] * 2,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            },
            [(4, (*ATTENTION, *MLP))],
            {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            id="states, latent attention and shared experts, in stages of two",
        ),
    ],
)
def test_tokens_of_states_are_those_of_merged_models(
    family: str,
    sizes: dict[str, object],
    adapters: list[tuple[int, tuple[str, ...]]],
    layout: dict[str, object],
    tmp_path: Path,
) -> None:
    """Prompts come in chunks, and are found again with the states after them."""
    oracle = LoraOracle(family, tmp_path, adapters, **sizes)
    requests = oracle.requests(12, 60, 12)
    options = lora_options(oracle, **STEPS) | {"mamba_block_size": 16}
    engine = make_ranks_engine(oracle.folder, **options, **layout)
    for _ in range(2):
        oracle.confirm(requests, run_requests(engine, requests))
    assert engine.stats().num_cache_hits > 0


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            "llama3", {"pipeline_parallel_size": 2}, id="stages", marks=pytest.mark.thorough
        ),
        pytest.param("qwen3", {"pipeline_parallel_size": 3}, id="three stages"),
        pytest.param(
            "llama3", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, id="stages of two"
        ),
    ],
)
def test_stages_have_the_adapters_of_their_layers(
    family: str, layout: dict[str, object], tmp_path: Path
) -> None:
    oracle = LoraOracle(family, tmp_path, num_hidden_layers=3)
    requests = oracle.requests(12, 60, 16)
    options = lora_options(oracle, **STEPS) | {"max_loras": 2, "max_cpu_loras": 2}
    engine = make_ranks_engine(oracle.folder, **options, **layout)
    for worker in engine.executor.workers:
        slots = getattr(worker.adapters, "_own", worker.adapters)
        layers, names = slots.stage.layers, slots.sizes
        assert names and all(int(name.split(".")[2]) in layers for name in names)
    oracle.confirm(requests, run_requests(engine, requests))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_each_stage_checks_its_layers(layer: int, tmp_path: Path) -> None:
    """What one stage refuses is refused; a layer that no stage has is refused, too."""
    oracle = LoraOracle("llama3", tmp_path, num_hidden_layers=2)
    options = {"enable_lora": True, "max_lora_rank": 16, "runtime_lora_folder": str(tmp_path)}
    engine = make_ranks_engine(oracle.folder, **options, **STEPS, pipeline_parallel_size=2)
    lora = numbered(oracle.modules)["adapter-0"]
    file = Path(lora.lora_path) / "adapter_model.safetensors"
    tensors = load_file(file)
    if layer < 2:
        module, problem = "self_attn.q_proj", r"has the shape \[4, 3\]; the model and the rank ask"
    else:
        module, problem = "self_attn.q_proj", "is no module that can have an adapter"
    name = f"base_model.model.model.layers.{layer}.{module}.lora_"
    save_file(
        tensors | {f"{name}A.weight": torch.zeros(4, 3), f"{name}B.weight": torch.zeros(64, 4)},
        file,
    )
    engine.adapters.start_loading("a load", lora)
    prefix = "^rank 1: " if layer == 1 else f"^{tmp_path}"
    assert re.search(f"{prefix}.*{problem}", loaded(engine))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("glm4", (*ATTENTION, "gate_up_proj", "down_proj")),
    ],
)
def test_fused_projections(
    family: str, targets: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has several pieces of them; the second family has interleaved rotary pairs, too."""
    monkeypatch.setattr("lora_oracle.ADAPTERS", ((4, targets), (9, targets[:2])))
    oracle = LoraOracle(family, tmp_path, num_hidden_layers=2)
    requests = oracle.requests(9, 60, 12)
    options = lora_options(oracle, **STEPS)
    engine = make_ranks_engine(oracle.folder, **options, tensor_parallel_size=2)
    oracle.confirm(requests, run_requests(engine, requests))


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_ranks_differ_from_one_rank_by_rounding_only(
    options: dict[str, object], tmp_path: Path
) -> None:
    """Layers of int8 add up the parts of all ranks before adapters add theirs."""
    oracle = LoraOracle("llama3", tmp_path, num_hidden_layers=2)
    requests = oracle.requests(12, 60, 1)
    first = []
    for layout in ({}, {"tensor_parallel_size": 2}):
        settings = {**lora_options(oracle, **STEPS), **options, **layout}
        outputs = run_requests(make_ranks_engine(oracle.folder, **settings), requests)
        first.append([answer_of(outputs[request.request_id]) for request in requests])
    pairs = list(zip(*first, strict=True))
    assert sum(one == two for one, two in pairs) >= len(pairs) - 1


def test_adapters_come_and_go_on_all_ranks(tmp_path: Path) -> None:
    """There is room for one adapter in memory, so that each request brings another."""
    oracle = LoraOracle("llama3", tmp_path, num_hidden_layers=1)
    requests = oracle.requests(8, 20, 6)
    options = lora_options(oracle, **STEPS) | {"max_loras": 1, "max_cpu_loras": 1}
    engine = make_ranks_engine(oracle.folder, **options, tensor_parallel_size=2)
    for _ in range(2):
        oracle.confirm(requests, run_requests(engine, requests))


@contextmanager
def held(engine: Engine, rank: int) -> Iterator[Event]:
    """Let a rank read adapters only after the event is set; it is set at the end."""
    store, go_on = engine.executor.workers[rank].adapters, Event()
    read = store.read

    def read_later(folder: Path) -> object:
        assert go_on.wait(60)
        return read(folder)

    store.read = read_later
    try:
        yield go_on
    finally:
        go_on.set()


@pytest.mark.parametrize("rank", [1, 2])
def test_no_step_waits_for_a_rank_that_still_reads(rank: int, tmp_path: Path) -> None:
    oracle = LoraOracle("llama3", tmp_path, num_hidden_layers=1, num_key_value_heads=4)
    options = lora_options(oracle, **STEPS) | {"max_loras": 1, "max_cpu_loras": 1}
    engine = make_ranks_engine(oracle.folder, **options, tensor_parallel_size=4)
    first, second = (request for request in oracle.requests(2, 20, 20))
    first = oracle.with_adapter(first, "")
    first = replace(first, params=replace(first.params, max_tokens=20, ignore_eos=True))
    second = oracle.with_adapter(second, "adapter-0")
    outputs: dict[str, list[SequenceOutput]] = {}
    with held(engine, rank) as go_on:
        engine.add_request(second)
        engine.add_request(first)
        while not any(output.finish_reason for output in outputs.get("0", ())):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
        assert "1" not in outputs, "the adapter is used before all ranks have read it"
        go_on.set()
        while engine.has_unfinished:
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
    oracle.confirm([first, second], outputs)


def loaded(engine: Engine) -> str:
    """The problem of the only load, which is waited for."""
    while not (ends := engine.adapters.take_loaded()):
        engine.step()
    (end,) = ends
    return end.problem


def test_what_one_rank_cannot_read_is_refused(tmp_path: Path) -> None:
    oracle = LoraOracle("llama3", tmp_path, num_hidden_layers=1)
    options = {"enable_lora": True, "max_lora_rank": 16, "runtime_lora_folder": str(tmp_path)}
    engine = make_ranks_engine(oracle.folder, **options, **STEPS, tensor_parallel_size=2)
    store = engine.executor.workers[1].adapters
    read, lora = store.read, numbered(oracle.modules)["adapter-0"]

    def refuse(folder: Path) -> object:
        raise ConfigError(f"{folder} is not here")

    def fail(folder: Path) -> object:
        raise OSError("a broken disk")

    def read_another(folder: Path) -> object:
        return read(folder.with_name("adapter-1"))

    for reads, problem in (
        (refuse, f"rank 1: {lora.lora_path} is not here"),
        (fail, "rank 1: the adapter cannot be read: OSError"),
        (read_another, f"{lora.lora_path} has other weights on rank 1 than on rank 0"),
        (read, ""),
    ):
        store.read = reads
        engine.adapters.start_loading("a load", lora)
        assert loaded(engine) == problem
    requests = oracle.requests(2, 20, 6)
    oracle.confirm(requests, run_requests(engine, requests))


def test_ranks_keep_nothing_that_is_not_used(tmp_path: Path) -> None:
    """Neither what was refused nor what was put into the layers is kept as it was read."""
    oracle = LoraOracle("llama3", tmp_path, num_hidden_layers=1)
    options = lora_options(oracle, **STEPS) | {"max_loras": 1, "max_cpu_loras": 1}
    engine = make_ranks_engine(oracle.folder, **options, tensor_parallel_size=2)
    requests = oracle.requests(8, 20, 2)
    oracle.confirm(requests, run_requests(engine, requests))
    gc.collect()
    engine.executor.check()
    (following,) = (rank.adapters for rank in engine.executor._others.ranks)
    deadline = time.monotonic() + 20
    while following._readings and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not following._readings and not engine.executor._others.readings._open


def test_processes_load_adapters(tmp_path: Path) -> None:
    oracle = LoraOracle("llama3", tmp_path, num_hidden_layers=1)
    requests = oracle.requests(6, 30, 8)
    options = lora_options(oracle, **STEPS) | {"max_loras": 1, "max_cpu_loras": 1}
    engine = make_engine(oracle.folder, **options, tensor_parallel_size=2)
    oracle.confirm(requests, run_requests(engine, requests))
