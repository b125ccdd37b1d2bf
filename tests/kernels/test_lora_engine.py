"""LoRA adapters on the Triton kernels: the tokens of models with merged weights, in float32.

`tests/models/test_lora_oracle.py` compares these models with peft.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from lora_oracle import LoraOracle, answer_of, lora_options, run_requests
from oracle import make_engine

from paged_backend import ConfigError
from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.engine.engine import Engine
from paged_backend.platforms.gpu.cuda_graphs import StepGraphs, StepShape
from paged_backend.platforms.gpu.low_rank import TritonLowRank
from paged_backend.platforms.gpu.model_runner import GpuModelRunner

# Rows of padding hold whatever was in memory, and NumPy warns of what is computed with it.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> LoraOracle:
    folder = tmp_path_factory.mktemp("lora")
    return LoraOracle("qwen2", folder, num_hidden_layers=2, intermediate_size=40)


def engine_for(oracle: LoraOracle, **options: object) -> Engine:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**20}
    engine = make_engine(oracle.folder, **lora_options(oracle, device=device, **sizes) | options)
    assert isinstance(engine.executor.model_runner, GpuModelRunner)
    return engine


def add_graphs(engine: Engine, *shapes: StepShape) -> list[StepShape]:
    """Let the runner replay shapes as graphs do, but make their launches anew.

    Returns:
        The shapes that were replayed, which grows.
    """
    runner, replayed = engine.executor.model_runner, []

    def capture(shape: StepShape):
        def replay() -> torch.Tensor:
            replayed.append(shape)
            return runner._run(shape)

        return replay

    with_adapters = [replace(shape, has_adapters=True) for shape in shapes]
    runner._graphs = StepGraphs([*shapes, *with_adapters], capture)
    return replayed


def test_graphs_with_padded_shapes_and_prefix_hits(oracle):
    """A step without adapters replays graphs without the kernels of adapters."""
    engine = engine_for(oracle, async_scheduling=True, max_num_batched_tokens=32)
    shapes = [StepShape.decodes(4), StepShape(32, 4, 4, 0), StepShape(24, 4, 4, 2)]
    replayed = add_graphs(engine, *shapes)
    work = oracle.requests(4, 20, 3)
    outputs = run_requests(engine, work)
    oracle.confirm(work, outputs)
    assert set(replayed) >= {replace(shape, has_adapters=True) for shape in shapes[:2]}
    with pytest.raises(AssertionError):
        oracle.confirm([oracle.with_adapter(work[1], "")], outputs)
    replayed.clear()
    again = [replace(work[number], request_id=f"again {number}") for number in (0, 3)]
    for one in again:
        outputs = run_requests(engine, [one])
        oracle.confirm([one], outputs)
        num_prompt_tokens = len(one.prompt_token_ids)
        cached = outputs[one.request_id][0].num_cached_tokens
        assert cached == (num_prompt_tokens - 1) // 16 * 16
    assert {shape.has_adapters for shape in replayed} == {False, True}


def test_chunks_with_drafts_and_a_new_adapter_in_each_slot(oracle):
    options = {"max_loras": 1, "max_cpu_loras": 1, "max_num_batched_tokens": 9}
    engine = engine_for(oracle, **options, speculative_config={"method": "suffix"})
    work = oracle.requests(4, 14, 3, seed=1)
    oracle.confirm(work, run_requests(engine, work))


def test_a_prompt_shares_no_block_with_another_adapter(oracle):
    engine = engine_for(oracle)
    (request,) = oracle.requests(1, 20, 1)
    prompt = [(7 * i + 3) % 190 + 3 for i in range(17)]
    for number, (name, expected) in enumerate(
        [("", 0), ("adapter-0", 0), ("adapter-1", 0), ("adapter-0", 16)]
    ):
        one = replace(request, request_id=str(number), prompt_token_ids=prompt)
        one = oracle.with_adapter(one, name)
        outputs = run_requests(engine, [one])
        oracle.confirm([one], outputs)
        assert outputs[one.request_id][-1].num_cached_tokens == expected


def test_a_padded_step_of_nothing_changes_nothing(oracle):
    """Graphs are captured on such a step."""
    runner = engine_for(oracle, max_num_seqs=3).executor.model_runner
    shape = replace(StepShape.decodes(3), has_adapters=True)
    pool = runner._attention._pool.memory.clone()
    runner._inputs.send(runner._inputs.update(ScheduledBatch.of([])), shape)
    with torch.inference_mode():
        runner._run(shape)
    assert torch.equal(runner._attention._pool.memory, pool)


def test_the_warm_up_runs_the_kernels_of_adapters(oracle, monkeypatch):
    shapes: list[StepShape] = []
    engine = engine_for(oracle, max_num_seqs=1, max_num_batched_tokens=2)
    runner = engine.executor.model_runner
    run = runner._run
    monkeypatch.setattr(
        runner, "_run", lambda shape, *others: shapes.append(shape) or run(shape, *others)
    )
    runner.run_largest()
    assert [shape.has_adapters for shape in shapes] == [False, True]


def test_adapters_over_int8_weights(oracle):
    """Rounded weights move a token only where two are almost as likely."""
    work = oracle.requests(4, 10, 1)
    engine = engine_for(oracle, quantization="int8")
    together = run_requests(engine, work)
    alone = replace(work[1], request_id="alone")
    assert answer_of(run_requests(engine, [alone])["alone"]) == answer_of(together["1"])
    equal = [
        answer_of(together[one.request_id])[0]
        == oracle.model_of(one).generate(one.prompt_token_ids, 1)[0]
        for one in work
    ]
    assert sum(equal) >= 3


def test_most_tokens_in_bfloat16_equal_float32(oracle):
    """Tokens may differ where two are almost as likely."""
    work = oracle.requests(4, 10, 1)
    outputs = run_requests(engine_for(oracle, dtype="bfloat16"), work)
    firsts = [answer_of(outputs[one.request_id])[0] for one in work]
    wanted = [oracle.model_of(one).generate(one.prompt_token_ids, 1)[0] for one in work]
    assert sum(a == b for a, b in zip(firsts, wanted, strict=True)) >= 3


def test_ranks(oracle):
    """Layers have room for the smallest rank of the kernels that suffices."""
    with pytest.raises(ConfigError, match="option max_lora_rank can be at most 64 on a GPU"):
        engine_for(oracle, max_lora_rank=65)
    engine = engine_for(oracle, max_lora_rank=17)
    products = [product for _, product in engine.executor.adapters._layers]
    assert all(isinstance(product, TritonLowRank) for product in products)
    assert {product._b.shape[2] for product in products} == {32}
