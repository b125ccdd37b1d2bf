"""The engine with a real model: sampling, parallel answers, aborts and limits."""

from __future__ import annotations

import pytest
from oracle import Oracle, make_engine

from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, InvalidRequest
from paged_backend.values.options.scheduling import CPU_LIMITS, GPU_LIMITS
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    Oracle("llama3", folder)
    return folder


PROMPT = [(5 * i + 3) % 190 + 3 for i in range(37)]


def collect(engine, requests):
    """Tokens by (request id, index)."""
    tokens = {}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished:
        for output in engine.step():
            key = (output.request_id, output.index)
            tokens.setdefault(key, []).extend(output.new_token_ids)
        engine.scheduler.check_invariants()
    assert engine.stats().num_used_blocks == 0
    return tokens


def sampled(name, seed, **params):
    values = {"temperature": 0.9, "max_tokens": 20, "ignore_eos": True, **params}
    return Request(name, PROMPT, SamplingParams(seed=seed, **values))


def test_a_seeded_request_does_not_depend_on_its_company(folder):
    requests = [sampled(str(seed), seed, top_p=0.9) for seed in range(12)]
    together = collect(make_engine(folder), requests)
    engine = make_engine(folder, max_num_seqs=3, max_num_batched_tokens=9)
    alone = {}
    for request in requests:
        alone |= collect(engine, [request])
    assert together == alone
    assert len({tuple(tokens) for tokens in together.values()}) == 12


def test_parallel_answers_are_those_of_single_requests(folder):
    from paged_backend.core.seeds import derive_seed

    engine = make_engine(folder)
    parallel = collect(engine, [sampled("n", 4, n=4)])
    singles = [sampled(str(i), derive_seed(4, i)) for i in range(4)]
    apart = collect(make_engine(folder), singles)
    assert list(parallel.values()) == list(apart.values())
    assert engine.stats().num_prompt_tokens == len(PROMPT)


def test_parallel_answers_survive_preemption(folder):
    block_bytes = 16 * 2**20 // make_engine(folder).executor.info.num_blocks
    small = make_engine(folder, max_model_len=64, kv_cache_memory_bytes=6 * block_bytes)
    requests = [sampled("a", 1, n=3), sampled("b", 2, n=2)]
    assert collect(small, requests) == collect(make_engine(folder), requests)
    assert small.stats().num_preemptions > 0


def test_requests_without_a_seed_differ_but_repeat_with_the_engine(folder):
    requests = [sampled(name, None) for name in "ab"]
    first = collect(make_engine(folder, seed=3), requests)
    assert first["a", 0] != first["b", 0]
    assert first == collect(make_engine(folder, seed=3), requests)
    assert first != collect(make_engine(folder, seed=4), requests)


def test_an_answer_ends_at_max_model_len(folder):
    engine = make_engine(folder, max_model_len=48)
    tokens = collect(engine, [sampled("a", 1, max_tokens=None)])
    assert len(tokens["a", 0]) == 48 - len(PROMPT)
    assert engine.stats().finished == {"length": 1}


def test_what_does_not_fit_the_model_is_refused(folder):
    engine = make_engine(folder, max_model_len=48, max_num_seqs=2)
    for prompt, params, message in (
        ([], {}, "empty"),
        ([1] * 48, {}, "at most 47"),
        ([199], {}, "from 0 to 198"),
        ([1], {"n": 3}, "max_num_seqs"),
        ([1], {"max_tokens": 49}, "max_model_len"),
        ([1], {"stop_token_ids": [199]}, "below 199"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.add_request(Request("x", prompt, SamplingParams(**params)))
    assert not engine.has_unfinished


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_memory_bytes": 1000}, "kv_cache_memory_bytes: 1000 bytes hold 0 blocks"),
        ({"max_model_len": 10**6}, "max_model_len must be at most 512"),
        ({"block_size": 24}, "block_size must be a power of two"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 9}, "at least max_num_seqs"),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}, "max_model_len"),
        (
            {"async_scheduling": True, "device": "cpu"},
            "async_scheduling must be false or left out on a CPU",
        ),
        (
            {"disable_cascade_attn": False, "device": "cpu"},
            "disable_cascade_attn must be true on a CPU",
        ),
        ({"block_sise": 16}, "did you mean block_size"),
        ({"dtype": "float8"}, "dtype must be one of"),
    ],
)
def test_options_that_cannot_work(folder, options, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(folder, **options)


@pytest.mark.parametrize(
    ("options", "on_gpu", "seqs", "tokens"),
    [
        ({}, False, 64, 512),
        ({}, True, 256, 8192),
        ({"max_num_seqs": 1000}, False, 1000, 1000),
        ({"max_num_batched_tokens": 8}, True, 8, 8),
        ({"max_num_seqs": 3, "max_num_batched_tokens": 7}, True, 3, 7),
    ],
)
def test_limits_of_a_step_follow_the_device_unless_given(options, on_gpu, seqs, tokens):
    defaults = GPU_LIMITS if on_gpu else CPU_LIMITS
    limits = EngineConfig(**options).step_limits(defaults)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (seqs, tokens)
    assert limits.async_scheduling == on_gpu
    chosen = EngineConfig(async_scheduling=not on_gpu).step_limits(defaults)
    assert chosen.async_scheduling != on_gpu
