"""Two ranks answer as one: tokens, log-probabilities and embeddings, and what it costs them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from oracle import make_engine
from quantized_checkpoints import awq, fp8, gptq, quantize_checkpoint
from requests_of_every_sort import Answers, all_sorts, answers_of

from paged_backend.checkpoint.model_config import ModelConfig, load_model_config
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.tensors import Role
from paged_backend.engine.engine import Engine
from paged_backend.engine.llm import LLM
from paged_backend.values.errors import ConfigError, EngineDead
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.structured_outputs import StructuredOutputsParams

EVEN = {"vocab_size": 200}  # two ranks divide it
# Steps of few tokens, so that prompts come in chunks.
STEPS = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "max_model_len": 128}


def both_answer(folder: Path, num_ranks: int = 2, **options: Any) -> tuple[Answers, Answers]:
    """The answers of one rank and of several, with room for one and a half longest sequences."""
    info = make_engine(folder, **STEPS, **options).executor.info
    num_blocks = info.kv_layout.max_blocks(0, 128) * 3 // 2 + 1
    num_bytes = num_blocks * (2**24 // info.num_blocks)
    file = json.loads((folder / "config.json").read_text())
    num_kv_heads = file.get("num_key_value_heads", file["num_attention_heads"])
    shares = {1: 1, num_ranks: min(num_ranks, num_kv_heads)}
    answers = [
        answers_of(
            make_engine(
                folder,
                tensor_parallel_size=number,
                kv_cache_memory_bytes=num_bytes // share,
                **STEPS,
                **options,
            )
        )
        for number, share in shares.items()
    ]
    return answers[0], answers[1]


def assert_equal(one: Answers, several: Answers, tolerance: float = 1e-4) -> None:
    assert several.tokens == one.tokens
    assert several.logprobs.keys() == one.logprobs.keys()
    for name, expected in one.logprobs.items():
        for a, b in zip(several.logprobs[name], expected, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=tolerance)
            assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=tolerance)
    assert several.num_preemptions > 0 and several.num_hits > 0


@pytest.mark.parametrize(
    ("family", "values"),
    [
        pytest.param("llama3", EVEN, id="dense"),
        pytest.param("qwen2", {}, id="biases, a vocabulary that does not divide"),
        pytest.param("gemma3", EVEN, id="sliding windows, a tied embedding"),
        pytest.param("phi3", EVEN, id="fused projections"),
        pytest.param("glm4", {}, id="interleaved rotary pairs"),
        pytest.param("qwen2-moe", EVEN, id="experts, one of them shared"),
        pytest.param("gpt-oss", {}, id="fused experts with biases, sinks"),
        pytest.param("cohere2", {}, id="a model of transformers with sliding windows"),
        pytest.param(
            "gpt_neox", {}, id="a model of transformers with fused projections and biases"
        ),
    ],
)
def test_tokens_are_those_of_one_rank(family: str, values: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, **values)
    assert_equal(*both_answer(tmp_path))


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("phi3", "int8"), ("qwen3-moe", "int8"), ("gpt-oss", "int8"), ("llama3", "int4")],
)
def test_rounded_weights(family: str, quantization: str, tmp_path: Path) -> None:
    """int8 layers round their inputs, each row by the largest number of all ranks.

    A sum of two ranks differs in its last bit, and so a number may be rounded to the next integer.
    """
    make_checkpoint(family, tmp_path)
    assert_equal(*both_answer(tmp_path, quantization=quantization), tolerance=0.05)


@pytest.mark.parametrize(
    ("config", "writer"),
    [
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True},
            gptq(4, 16, act_order=True),
            id="GPTQ with act-order",
        ),
        pytest.param(
            {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True},
            awq(16),
            id="AWQ",
        ),
        pytest.param(
            {"quant_method": "fp8", "weight_block_size": [48, 40]},
            fp8(48, 40, "weight_scale_inv"),
            id="blocks that no share begins with",
        ),
    ],
)
def test_quantized_checkpoints(config: dict[str, Any], writer: Any, tmp_path: Path) -> None:
    model = make_checkpoint("llama3", tmp_path)
    quantize_checkpoint(model, tmp_path, config, lambda layer: writer)
    assert_equal(*both_answer(tmp_path))


@pytest.mark.parametrize(
    ("family", "quantization"),
    [("qwen2-moe", None), ("gpt-oss", "int8"), ("llama3", None)],
)
def test_experts_as_a_whole(family: str, quantization: str | None, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    options = {"quantization": quantization, "enable_expert_parallel": True}
    assert_equal(*both_answer(tmp_path, **options), tolerance=0.05 if quantization else 1e-4)


def test_two_ranks_have_the_same_head_if_there_is_one(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, num_attention_heads=4, num_key_value_heads=1, head_dim=16)
    assert_equal(*both_answer(tmp_path))


def test_four_ranks_share_two_heads_and_sum_in_one_order(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    assert_equal(*both_answer(tmp_path, num_ranks=4))


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss"])
def test_random_weights_are_those_of_one_rank(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, **EVEN)
    assert_equal(*both_answer(tmp_path, load_format="dummy"))


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_embeddings(kind: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path, **EVEN)
    prompts = [{"prompt_token_ids": list(range(3, 3 + size))} for size in (1, 30, 90)]
    vectors = []
    for number in (1, 2):
        engine = make_engine(
            tmp_path, tensor_parallel_size=number, task="embed", pooling_type=kind, **STEPS
        )
        vectors.append(embeddings(engine, [prompt["prompt_token_ids"] for prompt in prompts]))
    assert torch.allclose(*vectors, atol=1e-5)


def embeddings(engine: Engine, prompts: list[list[int]]) -> torch.Tensor:
    from paged_backend.values.pooling_params import PoolingParams

    for index, prompt in enumerate(prompts):
        engine.add_request(Request(str(index), prompt, SamplingParams(), pooling=PoolingParams()))
    found: dict[str, bytes] = {}
    while engine.has_unfinished:
        for output in engine.step():
            assert output.pooled is not None
            found[output.request_id] = output.pooled
    rows = [bytearray(found[str(index)]) for index in range(len(prompts))]
    return torch.stack([torch.frombuffer(row, dtype=torch.float32) for row in rows])


def test_structured_outputs_and_text_of_the_demo() -> None:
    regex = StructuredOutputsParams(regex="([a-z]{2,9}, ){5}")
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=1.0, seed=5, max_tokens=40),
        SamplingParams(temperature=1.0, seed=6, max_tokens=60, structured_outputs=regex),
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=regex),
    ]
    texts = []
    for number in (1, 2):
        llm = LLM("demo", tensor_parallel_size=number, kv_cache_memory_bytes=2**24)
        outputs = llm.generate(["How do I sort a list?"] * len(params), params)
        texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]


# --- what it costs -------------------------------------------------------------------------------


def held(config: ModelConfig, num_ranks: int) -> int:
    """Bytes of a rank's weights in float32, computed from the list of tensors."""
    elements = 0
    for spec in tensors_of(config).values():
        whole_vocabulary = (
            spec.role in (Role.EMBEDDING, Role.HEAD) and config.vocab_size % num_ranks
        )
        divided = spec.shard is not None and not whole_vocabulary
        elements += spec.num_elements // (num_ranks if divided else 1)
    return 4 * elements


@pytest.mark.parametrize("family", ["llama3", "qwen2-moe", "gpt-oss"])
def test_the_weights_of_a_rank_are_as_few_as_computed(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, **EVEN, intermediate_size=128)
    config = load_model_config(tmp_path)
    sizes = [
        make_engine(tmp_path, tensor_parallel_size=number).executor.info.weight_bytes
        for number in (1, 2)
    ]
    computed = [held(config, number) for number in (1, 2)]
    others = sizes[0] - computed[0]  # rotary tables, and panels that are padded
    assert 0 <= others < 0.3 * sizes[0]
    assert sizes[1] - computed[1] <= others * 1.2


def test_the_traffic_of_a_token_is_as_little_as_computed(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, **EVEN)
    engine = make_engine(tmp_path, tensor_parallel_size=2)
    config = load_model_config(tmp_path)
    group = engine.executor.group
    before = group.sent_bytes
    prompt, num_tokens = list(range(3, 43)), 8
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    engine.add_request(Request("r", prompt, params))
    while engine.has_unfinished:
        engine.step()
    # Two sums in each layer and one for the embedding; only rows with logits go on in the last.
    rows = len(prompt) + num_tokens - 1
    sums = (2 * config.num_layers - 1) * rows + 2 * num_tokens
    logits = num_tokens * config.vocab_size // 2
    assert group.sent_bytes - before == 4 * (sums * config.hidden_size + logits)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "num_ranks", "message"),
    [
        ("smollm", 2, "must divide the model's 3 heads of queries; got 2"),
        ("llama3", 3, "must divide the model's 8 heads of queries; got 3"),
        ("olmo2", 2, "can only be 1 for Olmo2ForCausalLM, which norms the queries of all heads"),
        ("gpt2", 2, "can only be 1 for GPT2LMHeadModel, for which transformers has no plan"),
        ("cohere2", 3, "must divide the model's 4 num_attention_heads; got 3"),
    ],
)
def test_models_that_ranks_cannot_compute(
    family: str, num_ranks: int, message: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path)
    with pytest.raises(ConfigError, match=f"^option tensor_parallel_size {message}"):
        make_engine(tmp_path, tensor_parallel_size=num_ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "option pipeline_parallel_size can only be 1"),
        ({"tensor_parallel_size": 0}, "option tensor_parallel_size must be .*, got 0"),
        (
            {"tensor_parallel_size": 2, "cpu_cores": "0"},
            "option cpu_cores must have a core for each",
        ),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_engine(tmp_path, **options)


# --- ends of ranks -------------------------------------------------------------------------------


def ranks_of(pid: int) -> list[int]:
    """The processes that a process has started as ranks."""
    import psutil

    children = psutil.Process(pid).children()
    return [p.pid for p in children if "rank_process" in " ".join(p.cmdline())]


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_the_end_of_a_rank_ends_the_others_and_the_next_step(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    engine = make_engine(tmp_path, tensor_parallel_size=4)
    first, second, third = ranks_of(os.getpid())
    engine.executor.check()
    os.kill(second, signal.SIGKILL)
    with pytest.raises(EngineDead, match="engine_dead: rank 2 ended: killed by SIGKILL"):
        answers_of(engine, all_sorts())
    with pytest.raises(EngineDead, match="engine_dead: rank 2 ended: killed by SIGKILL"):
        engine.executor.check()
    deadline = time.monotonic() + 10
    while not all(map(has_ended, (first, second, third))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(has_ended, (first, second, third)))


def test_a_rank_that_hangs_is_found_by_the_time_limit(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    engine = make_engine(tmp_path, tensor_parallel_size=2, distributed_timeout_seconds=15)
    (rank,) = ranks_of(os.getpid())
    os.kill(rank, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(EngineDead, match="waits for the other ranks for more than 15 s"):
            answers_of(engine)
        assert time.monotonic() - started < 20
    finally:
        del engine  # a rank that is stopped ends, too
    assert ranks_of(os.getpid()) == []


def test_ranks_end_with_their_engine(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    engine = make_engine(tmp_path, tensor_parallel_size=2)
    assert len(ranks_of(os.getpid())) == 1
    del engine
    assert ranks_of(os.getpid()) == []


def test_a_rank_that_computes_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama3", tmp_path)
    engine = make_engine(tmp_path, tensor_parallel_size=2)
    sampler = engine.executor.model_runner._sampler
    monkeypatch.setattr(sampler, "sample", lambda logits, samples: [5] * len(samples))
    with pytest.raises(EngineDead, match="rank 1 has computed another result than rank 0"):
        answers_of(engine)
