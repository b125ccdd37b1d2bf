"""Speculation changes no token: real models with and without it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from oracle import make_engine

from paged_backend import LLM, SamplingParams
from paged_backend.engine.engine import Engine
from paged_backend.speculation.step_costs import StepCosts
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, InvalidRequest
from paged_backend.values.request import Request
from paged_backend.values.structured_outputs import StructuredOutputsParams

SUFFIX = {"method": "suffix"}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.3, "n": 2},
    {"temperature": 0.4, "logprobs": 2, "top_p": 0.9, "repetition_penalty": 1.02},
    {"temperature": 0.0, "presence_penalty": 0.1, "min_tokens": 9},
    {"temperature": 0.2, "top_k": 8, "stop_token_ids": [7, 8]},
    {"temperature": 0.0, "prompt_logprobs": 1},
]


@pytest.fixture(autouse=True)
def drafts_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps verify each guess, however busy the machine is."""
    monkeypatch.setattr(StepCosts, "token_s", 0.0)


def requests(number: int) -> list[Request]:
    """Prompts that repeat a phrase, with parameters of every sort."""
    rng = random.Random(number)
    made = []
    for index in range(number):
        phrase = [rng.randrange(3, 199) for _ in range(rng.randint(2, 9))]
        params = SamplingParams(max_tokens=40, seed=index, **PARAMS[index % len(PARAMS)])
        made.append(Request(f"r{index}", phrase * rng.randint(2, 8), params))
    return made


def answers_of(engine: Engine, wanted: list[Request]) -> dict[tuple[str, int], list[Any]]:
    """Tokens, the likeliest tokens at their positions, and the reason of the end."""
    found: dict[tuple[str, int], list[Any]] = {}
    for request in wanted:
        engine.add_request(request)
    while engine.has_unfinished:
        for output in engine.step():
            answer = found.setdefault((output.request_id, output.index), [])
            answer += output.new_token_ids
            answer += [row.top_token_ids for row in output.logprobs or ()]
            answer += [output.finish_reason] if output.finish_reason else []
        engine.scheduler.check_invariants()
    return {
        key: [x for x in answer if isinstance(x, int)]
        + [x for x in answer if not isinstance(x, int)]
        for key, answer in found.items()
    }


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [
        ("mistral", SUFFIX, {}),
        ("llama4", NGRAM, {"block_size": 8}),  # guesses cross the borders of chunks
        ("qwen2", NGRAM, {"kv_cache_memory_bytes": 2**18, "max_model_len": 128}),  # preemption
        ("gemma3", SUFFIX, {"quantization": "int8"}),
        pytest.param(
            *("qwen3-moe", SUFFIX, {"kv_cache_dtype": "int8_per_token_head"}),
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_tokens_are_the_same(
    tmp_path: Path, family: str, config: dict[str, Any], options: dict[str, Any]
) -> None:
    make_checkpoint(family, tmp_path)
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 48, **options}
    wanted = requests(18)
    plain = make_engine(tmp_path, **settings)
    answers = answers_of(plain, wanted)
    drafted = make_engine(tmp_path, speculative_config=config, **settings)
    assert answers_of(drafted, wanted) == answers
    stats, before = drafted.stats(), plain.stats()
    assert stats.num_accepted_tokens > 20
    assert stats.num_drafts <= stats.num_draft_tokens >= stats.num_accepted_tokens
    assert list(stats.num_accepted_at) == sorted(stats.num_accepted_at, reverse=True)
    for name in ("num_prompt_tokens", "num_generation_tokens", "num_used_blocks", "finished"):
        assert getattr(stats, name) == getattr(before, name), name
    assert before.num_drafts == before.num_draft_tokens == 0
    assert (stats.num_preemptions > 0) == ("kv_cache_memory_bytes" in options)


def test_a_lone_answer_takes_fewer_steps_by_the_accepted_tokens(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    request = replace(requests(1)[0], params=SamplingParams(max_tokens=60, temperature=0))
    engine = make_engine(tmp_path, speculative_config=SUFFIX)
    answer = answers_of(engine, [request])
    assert answers_of(engine, [request]) == answer  # the first answer says what to guess
    stats = engine.stats()
    assert stats.num_accepted_tokens > 30
    assert stats.num_steps + stats.num_accepted_tokens == 2 * 60
    off = make_engine(tmp_path, speculative_config=SUFFIX)
    assert answers_of(off, [replace(request, speculate=False)]) == answer
    assert off.stats().num_draft_tokens == 0


@pytest.mark.parametrize(
    ("family", "config", "options"),
    [
        ("qwen3-next", SUFFIX, {"mamba_block_size": 16}),
        ("falcon-h1", NGRAM, {"dtype": "bfloat16", "enforce_eager": True}),
        ("lfm2", SUFFIX, {"kv_cache_memory_bytes": 2**17, "max_model_len": 128}),  # preemption
    ],
)
def test_tokens_after_states_are_the_same(
    tmp_path: Path, family: str, config: dict[str, Any], options: dict[str, Any]
) -> None:
    """Each seventh token of the predictions is wrong, as random models repeat few tokens."""
    make_checkpoint(family, tmp_path)
    settings = {"max_num_seqs": 6, "max_num_batched_tokens": 48, **options}
    wanted = requests(12)
    plain = make_engine(tmp_path, **settings)
    answers = answers_of(plain, wanted)
    predicted = []
    for request in wanted:
        tokens = [token for token in answers[request.request_id, 0] if isinstance(token, int)]
        tokens[6::7] = [3 + token % 190 for token in tokens[6::7]]
        predicted.append(replace(request, predicted_token_ids=tokens))
    drafted = make_engine(tmp_path, speculative_config=config, **settings)
    assert answers_of(drafted, predicted) == answers
    stats = drafted.stats()
    assert stats.num_draft_tokens > stats.num_accepted_tokens > 100
    assert stats.num_used_blocks == 0
    assert (stats.num_preemptions > 0) == ("kv_cache_memory_bytes" in options)


@pytest.mark.parametrize("num_wrong", [0, 3])
def test_a_prediction_of_a_model_with_states(num_wrong: int, tmp_path: Path) -> None:
    """Wrong tokens cost a step each, in which the right ones before them are computed again."""
    make_checkpoint("jamba", tmp_path)
    params = SamplingParams(max_tokens=48, temperature=0.7, seed=3)
    request = Request("one", [5, 6, 7, 8], params)
    (answer,) = answers_of(make_engine(tmp_path), [request]).values()
    predicted = [token for token in answer if isinstance(token, int)]
    assert len(predicted) == 48
    for place in range(10, 10 + 12 * num_wrong, 12):
        predicted[place] = (predicted[place] + 1) % 199
    engine = make_engine(tmp_path, speculative_config=SUFFIX)
    with_prediction = replace(request, predicted_token_ids=predicted)
    assert answers_of(engine, [with_prediction]) == {("one", 0): answer}
    stats = engine.stats()
    assert stats.num_accepted_tokens > 20
    assert (stats.num_draft_tokens > stats.num_accepted_tokens) == (num_wrong > 0)
    assert stats.num_steps < 30


def test_a_prediction_of_tokens_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    engine = make_engine(tmp_path, speculative_config=SUFFIX)
    known, unknown = (
        replace(requests(1)[0], predicted_token_ids=[5, token_id]) for token_id in (6, 10_000)
    )
    with pytest.raises(InvalidRequest, match="prediction: must be from 0 to"):
        engine.add_request(unknown)
    assert answers_of(engine, [known])


def test_texts_with_stop_strings_and_structured_outputs_are_the_same() -> None:
    prompts = [
        "Repeat: a b c d, a b c d, a b c d, a b",
        "Answer in JSON:",
        "List: 1, 2, 3, 1, 2, 3",
        "Say:",
    ]
    schema = {"type": "array", "items": {"enum": ["left", "right"]}, "minItems": 6, "maxItems": 9}
    params = [
        SamplingParams(max_tokens=60, temperature=0, stop=["zz", "e.\n"]),
        SamplingParams(
            max_tokens=60, temperature=0, structured_outputs=StructuredOutputsParams(json=schema)
        ),
        SamplingParams(max_tokens=60, temperature=0.3, seed=5),
        # Tokens that the grammar forces follow a wrong guess, and penalties count them.
        SamplingParams(
            max_tokens=60,
            temperature=0,
            frequency_penalty=0.2,
            repetition_penalty=1.1,
            structured_outputs=StructuredOutputsParams(regex="([a-c]{2}, ){20}"),
        ),
    ]
    texts = []
    for config in (None, SUFFIX):
        llm = LLM("demo", speculative_config=config)
        outputs = llm.generate(prompts, params)
        texts.append([(out.outputs[0].text, out.outputs[0].finish_reason) for out in outputs])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"method": "eagle3"}, "speculative_config.method eagle3 is not supported"),
        (
            {"method": "magic"},
            "speculative_config.method must be ngram, suffix, draft_model or mtp",
        ),
        ({"num_speculative_tokens": 65}, "speculative_config.num_speculative_tokens must be"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 2}, "must not exceed prompt_lookup_max"),
        ({"depth": 4}, "depth"),
        ({"method": "draft_model"}, "speculative_config.model is the draft model of the method"),
        ({"model": "demo"}, "speculative_config.model is the draft model of the method"),
        ({"suffix_decoding_min_token_prob": "x"}, "suffix_decoding_min_token_prob must be"),
    ],
)
def test_a_config_that_means_nothing_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig.from_mapping({"model": "demo", "speculative_config": config})


def test_a_model_that_generates_nothing_cannot_speculate(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    with pytest.raises(
        ConfigError, match="speculative_config cannot be used: this model generates"
    ):
        make_engine(tmp_path, speculative_config=SUFFIX, task="embed", pooling_type="last")
