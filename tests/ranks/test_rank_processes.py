"""Ranks in processes of their own: they answer as one, and end with their engine."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from comparison import PP2, STEPS, TP2, TP2_PP2, assert_equal
from effort import ALL
from oracle import Oracle, make_engine, mixed_work, run, tokens_of
from requests_of_every_sort import NUM_EACH, all_sorts, answers_of

from paged_backend.engine.llm import LLM
from paged_backend.values.errors import EngineDead
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.structured_outputs import StructuredOutputsParams


def test_structured_outputs_and_text_of_the_demo() -> None:
    regex = StructuredOutputsParams(regex="([a-z]{2,9}, ){5}")
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=1.0, seed=5, max_tokens=40),
        SamplingParams(temperature=1.0, seed=6, max_tokens=60, structured_outputs=regex),
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=regex),
    ]
    texts = []
    for options in ({}, TP2_PP2 if ALL else TP2):
        llm = LLM("demo", kv_cache_memory_bytes=2**24, **options)
        outputs = llm.generate(["How do I sort a list?"] * len(params), params)
        texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("family", "layout"),
    [("cohere2", PP2), pytest.param("gpt_neox", TP2, marks=pytest.mark.thorough)],
)
def test_models_that_transformers_computes(
    family: str, layout: dict[str, object], tmp_path: Path
) -> None:
    """One has sliding windows and a tied embedding, the other fused projections and biases."""
    make_checkpoint(family, tmp_path)
    one, several = (make_engine(tmp_path, **STEPS, **options) for options in ({}, layout))
    *_, last = every = all_sorts()
    some = every if ALL else [*every[NUM_EACH - 2 : NUM_EACH + 1], last]
    assert_equal(answers_of(one, some), answers_of(several, some), preempted=False)
    for name in ("weight_bytes", "kv_bytes_per_token"):
        assert getattr(several.executor.info, name) < 0.75 * getattr(one.executor.info, name)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3-next",
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in ("granite-hybrid", "lfm2", "jamba")
        ),
    ],
)
def test_greedy_tokens_of_states(family: str, tmp_path: Path) -> None:
    """They are those of transformers; the other rank ends with the engine."""
    oracle, work = Oracle(family, tmp_path), mixed_work(6)
    engine = make_engine(tmp_path, **{**STEPS, "max_model_len": 128}, **TP2)
    oracle.confirm(work, tokens_of(run(engine, work)))
    assert len(ranks_of(os.getpid())) == 1
    del engine
    assert ranks_of(os.getpid()) == []


# --- ends of ranks -------------------------------------------------------------------------------


def ranks_of(pid: int) -> list[int]:
    """The processes that a process has started as ranks."""
    import psutil

    children = psutil.Process(pid).children()
    return [p.pid for p in children if "rank_process" in " ".join(p.cmdline())]


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_the_end_of_a_rank_ends_the_others_and_the_next_step(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    make_checkpoint("llama3", tmp_path, **heads, hidden_size=48, intermediate_size=96)
    engine = make_engine(tmp_path, tensor_parallel_size=3)
    first, second = ranks_of(os.getpid())
    engine.executor.check()
    os.kill(second, signal.SIGKILL)
    with pytest.raises(EngineDead, match="engine_dead: rank 2 ended: killed by SIGKILL"):
        answers_of(engine, all_sorts())
    with pytest.raises(EngineDead, match="engine_dead: rank 2 ended: killed by SIGKILL"):
        engine.executor.check()
    deadline = time.monotonic() + 10
    while not all(map(has_ended, (first, second))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(map(has_ended, (first, second)))


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


def test_a_rank_that_computes_something_else_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama3", tmp_path)
    engine = make_engine(tmp_path, tensor_parallel_size=2)
    sampler = engine.executor.model_runner.sampler
    monkeypatch.setattr(sampler, "sample", lambda logits, samples: [5] * len(samples))
    with pytest.raises(EngineDead, match="rank 1 has computed another result than rank 0"):
        answers_of(engine)
