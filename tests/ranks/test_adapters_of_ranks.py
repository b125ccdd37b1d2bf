"""Several ranks with LoRA adapters answer as one, and as transformers' merged models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lora_oracle import ATTENTION, LoraOracle, answer_of, lora_options, run_requests
from oracle import make_engine
from ranks_in_threads import make_ranks_engine, torch_threads_restored

from paged_backend.engine.rank_adapters import follow
from paged_backend.executor.messages import DropAdapter, PutAdapter

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
        pytest.param("qwen2", {}, 2, id="biases"),
        pytest.param("qwen3", {}, 2, id="norms of heads"),
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


def test_other_weights_on_another_rank_end_it(tmp_path: Path) -> None:
    oracle = LoraOracle("llama3", tmp_path, num_hidden_layers=1)
    store = make_engine(oracle.folder, enable_lora=True, **STEPS).executor.adapters
    first, second, *_ = oracle.modules.values()
    digests = [store.read(Path(folder)).digest for folder in (first, second)]
    with pytest.raises(RuntimeError, match="has other weights here than on rank 0"):
        follow(store, PutAdapter(first, digests[1]))
    with pytest.raises(RuntimeError, match="an adapter cannot be read: .*adapter_config.json"):
        follow(store, PutAdapter(str(tmp_path / "nowhere"), digests[0]))
    follow(store, PutAdapter(first, digests[0]))
    follow(store, DropAdapter(digests[0]))


def test_processes_load_adapters(tmp_path: Path) -> None:
    oracle = LoraOracle("llama3", tmp_path, num_hidden_layers=1)
    requests = oracle.requests(6, 30, 8)
    options = lora_options(oracle, **STEPS)
    engine = make_engine(oracle.folder, **options, tensor_parallel_size=2)
    oracle.confirm(requests, run_requests(engine, requests))
