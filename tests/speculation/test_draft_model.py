"""A draft model changes no token: models with one and without it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from effort import ALL
from free_drafts import make_drafts_free
from oracle import make_engine

from paged_backend import LLM, SamplingParams
from paged_backend.core.grammar_budget import StepTime
from paged_backend.engine.engine import Engine
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values.outputs import EngineStats
from paged_backend.values.request import Request
from paged_backend.values.structured_outputs import StructuredOutputsParams

Answers = dict[tuple[str, int], list[Any]]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "n": 3},
    {"temperature": 0.9, "logprobs": 2, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 0.0, "presence_penalty": 0.4, "frequency_penalty": 0.3, "min_tokens": 9},
    {"temperature": 1.2, "top_k": 8, "bad_words_token_ids": ((5,), (9, 4))},
    {"temperature": 0.0, "prompt_logprobs": 1, "logit_bias": ((17, 3.0),)},
]
LIMITS = {"max_num_seqs": 6, "max_num_batched_tokens": 48}
BIAS = ((5, 40.0), (9, 40.0))
"""Leaves two tokens that are likely."""


@pytest.fixture
def drafts_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps verify as many drafts as they may, however busy the machine is."""
    make_drafts_free(monkeypatch)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Small models with one vocabulary but for one of them, and with windows in some layers."""
    sizes: dict[str, dict[str, Any]] = {
        "llama3": {"num_hidden_layers": 2},
        "qwen2": {"num_hidden_layers": 1},
        "gemma3": {},
        "mistral": {"num_hidden_layers": 1},
        "qwen3": {"num_hidden_layers": 1, "vocab_size": 180},
        "llama2": {"num_hidden_layers": 1, "max_position_embeddings": 64},
        "gpt2": {"num_hidden_layers": 1},
        "qwen3-next": {},
        "granite-hybrid": {},
        "mamba2": {},
    }
    paths = {}
    for family, changes in sizes.items():
        paths[family] = tmp_path_factory.mktemp(family)
        make_checkpoint(family, paths[family], **changes)
    yield paths


def with_drafts(folder: Path, number: int = 4) -> dict[str, Any]:
    """A value of speculative_config."""
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": number}


def requests(number: int, seed: int = 0, **changes: Any) -> list[Request]:
    """Prompts of which several begin alike, with parameters of every sort."""
    rng = random.Random(seed)
    texts = [[rng.randrange(3, 179) for _ in range(60)] for _ in range(3)]
    made = []
    for index in range(number):
        prompt = rng.choice(texts)[: rng.randint(1, 60)] + [rng.randrange(3, 179)]
        values = {"max_tokens": rng.randint(1, 40), "seed": index, "ignore_eos": True}
        params = SamplingParams(**values, **PARAMS[index % len(PARAMS)])
        made.append(Request(f"r{index}", prompt, params, **changes))
    return made


def answers_of(engine: Engine, wanted: list[Request], aborted: int | None = None) -> Answers:
    """Tokens, the likeliest tokens at their positions, and the reason of the end.

    Half of the requests arrive while the others run, and one may be aborted.
    """
    found: Answers = {}
    waiting = list(wanted)
    while waiting or engine.has_unfinished:
        number = -(-len(wanted) // 2) if len(waiting) == len(wanted) else 1
        for request in waiting[:number]:
            engine.add_request(request)
        del waiting[:number]
        if aborted is not None and len(waiting) == 2:
            engine.abort_request(wanted[aborted].request_id)
        for output in engine.step():
            answer = found.setdefault((output.request_id, output.index), [[], [], None])
            answer[0] += output.new_token_ids
            answer[1] += [row.top_token_ids for row in output.logprobs or ()]
            answer[2] = output.finish_reason
        engine.scheduler.check_invariants()
    if aborted is not None:
        name = wanted[aborted].request_id
        found = {key: answer for key, answer in found.items() if key[0] != name}
    return found


def stats_of(engine: Engine) -> EngineStats:
    stats = engine.stats()
    assert stats.num_used_blocks == 0
    assert stats.num_drafts <= stats.num_draft_tokens >= stats.num_accepted_tokens
    return stats


@pytest.mark.usefixtures("drafts_are_free")
@pytest.mark.parametrize(
    ("family", "draft", "options"),
    [
        ("llama3", "llama3", {}),
        ("llama3", "qwen2", {}),
        pytest.param("llama3", "llama3", {"dtype": "bfloat16"}, marks=pytest.mark.thorough),
        ("llama3", "mistral", {"kv_cache_dtype": "int8_per_token_head", "quantization": "int8"}),
        ("gemma3", "gemma3", {"max_num_batched_tokens": 16}),
        pytest.param("llama3", "llama3", {"enforce_eager": True}, marks=pytest.mark.thorough),
        ("llama3", "mistral", {"model_impl": "transformers"}),
        ("qwen3-next", "qwen2", {}),
        ("granite-hybrid", "qwen2", {"max_num_batched_tokens": 16}),
        pytest.param("mamba2", "mistral", {}, marks=pytest.mark.thorough),
    ],
)
def test_tokens_are_the_same(
    folders: dict[str, Path], family: str, draft: str, options: dict[str, Any]
) -> None:
    """A model that drafts for itself is always right, so prefix hits and forks have its blocks."""
    settings = {**LIMITS, **options}
    wanted = requests(18 if ALL else 12)
    answers = answers_of(make_engine(folders[family], **settings), wanted)
    drafted = make_engine(
        folders[family], speculative_config=with_drafts(folders[draft]), **settings
    )
    assert answers_of(drafted, wanted) == answers
    stats = stats_of(drafted)
    assert stats.num_draft_tokens > 100
    if family == draft:
        assert stats.num_accepted_tokens == stats.num_draft_tokens
    else:
        assert stats.num_accepted_tokens < stats.num_draft_tokens / 4


@pytest.mark.usefixtures("drafts_are_free")
@pytest.mark.parametrize("family", ["qwen3-next", "granite-hybrid"])
def test_states_after_right_and_wrong_drafts(folders: dict[str, Path], family: str) -> None:
    """There are two tokens to choose from, so about half of the drafts are right."""
    params = {"temperature": 1.0, "max_tokens": 30, "ignore_eos": True, "logprobs": 1}
    wanted = [
        Request(
            f"r{seed}", [4, 8, 15 + seed], SamplingParams(**params, seed=seed, n=2, logit_bias=BIAS)
        )
        for seed in range(4)
    ]
    answers = answers_of(make_engine(folders[family], **LIMITS), wanted)
    config = with_drafts(folders["qwen2"], 3)
    drafted = make_engine(folders[family], speculative_config=config, **LIMITS)
    assert answers_of(drafted, wanted) == answers
    stats = stats_of(drafted)
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.8


@pytest.mark.usefixtures("drafts_are_free")
def test_tokens_that_the_draft_model_lacks_are_computed_later(folders: dict[str, Path]) -> None:
    """Requests without drafts leave blocks that only the main model has computed."""
    folder = folders["llama3"]
    wanted = requests(12, seed=1)
    answers = answers_of(make_engine(folder, **LIMITS), wanted)
    engine = make_engine(folder, speculative_config=with_drafts(folder), **LIMITS)
    turns = [True, False, False, True, True, False]
    mixed = [replace(req, speculate=turn) for req, turn in zip(wanted, turns * 2, strict=True)]
    for jobs in (requests(12, seed=1, speculate=False), mixed, wanted):
        before = stats_of(engine)
        assert answers_of(engine, jobs) == answers
        drafted = stats_of(engine).num_draft_tokens - before.num_draft_tokens
        assert (drafted > 0) == any(job.speculate for job in jobs)
    stats = stats_of(engine)
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert stats.num_cache_hits > 500


@pytest.mark.usefixtures("drafts_are_free")
@pytest.mark.parametrize("seed", range(4 if ALL else 2))
def test_tokens_are_the_same_after_any_history(folders: dict[str, Path], seed: int) -> None:
    """Preemption, aborted requests, resumed requests, chunks of prompts, and few tokens at once."""
    rng = random.Random(seed)
    folder = folders["llama3"]
    wanted = requests(14, seed=seed)
    options = {
        "max_num_seqs": rng.choice([3, 5]),
        "max_num_batched_tokens": rng.choice([5, 12, 40]),
        "enable_prefix_caching": rng.random() < 0.7,
        "max_model_len": 112,
    }
    plain = answers_of(make_engine(folder, **options), wanted)
    draft = folders[rng.choice(["llama3", "qwen2"])]
    pool = {"kv_cache_memory_bytes": 160 * 1024}  # 10 to 13 blocks
    engine = make_engine(
        folder, speculative_config=with_drafts(draft, rng.choice([1, 3, 9])), **options, **pool
    )
    aborted = rng.randrange(14)
    name = wanted[aborted].request_id
    kept = {key: answer for key, answer in plain.items() if key[0] != name}
    assert answers_of(engine, wanted, aborted) == kept
    resumed = next(req for req in wanted if (req.request_id, 2) in plain)
    progress = [plain[resumed.request_id, index][0][:-1] for index in range(3)]
    engine.add_request(resumed, progress)
    last = []
    while engine.has_unfinished:
        last += [(out.index, out.new_token_ids) for out in engine.step()]
    tokens = [(index, plain[resumed.request_id, index][0][-1:]) for index in range(3)]
    assert sorted(last) == tokens
    assert stats_of(engine).num_preemptions > 0 or options["max_num_seqs"] == 3


@pytest.mark.usefixtures("drafts_are_free")
def test_long_prompts_are_caught_up_with_in_several_steps(folders: dict[str, Path]) -> None:
    """A sequence has no drafts meanwhile, and they are not counted."""
    folder = folders["llama3"]
    request = replace(requests(1)[0], prompt_token_ids=list(range(3, 103)))
    request = replace(request, params=SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    options = {"max_num_batched_tokens": 10, "max_num_seqs": 4}
    answers = answers_of(make_engine(folder, **options), [request])
    engine = make_engine(folder, speculative_config=with_drafts(folder), **options)
    assert answers_of(engine, [request]) == answers
    stats = stats_of(engine)
    # The prompt takes 10 steps. Then the draft model computes its 100 tokens, and one more for each
    # step, 10 at a time: it has all of them in the 12th step.
    assert stats.num_steps == 10 + 11 + stats.num_drafts
    assert stats.num_accepted_tokens == stats.num_draft_tokens >= 12


@pytest.mark.usefixtures("drafts_are_free")
def test_texts_with_stop_strings_and_structured_outputs_are_the_same() -> None:
    prompts = ["Repeat: a b c d, a b", "Answer in JSON:", "List: 1, 2, 3", "Say:"]
    schema = {"type": "array", "items": {"enum": ["left", "right"]}, "minItems": 3, "maxItems": 5}
    params = [
        SamplingParams(max_tokens=40, temperature=0, stop=["zz", "e.\n"]),
        SamplingParams(
            max_tokens=40, temperature=0.7, structured_outputs=StructuredOutputsParams(json=schema)
        ),
        SamplingParams(max_tokens=40, temperature=0.8, seed=5),
        SamplingParams(
            max_tokens=40,
            temperature=0,
            frequency_penalty=0.2,
            structured_outputs=StructuredOutputsParams(regex="([a-c]{2}, ){12}"),
        ),
    ]
    texts = []
    for config in (None, with_drafts(Path("demo"))):
        llm = LLM("demo", speculative_config=config, seed=3)
        outputs = llm.generate(prompts, params)
        texts.append([(out.outputs[0].text, out.outputs[0].finish_reason) for out in outputs])
        accepted = llm.engine.stats().num_accepted_tokens
    assert texts[0] == texts[1]
    assert accepted > 40


@pytest.mark.usefixtures("drafts_are_free")
def test_drafts_are_drawn_with_the_masks_of_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that drafts for itself is right under a grammar, too, if it is told the masks."""
    monkeypatch.setattr(StepTime, "is_left", True)  # however busy the machine is
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "size": {"type": "integer"}},
        "required": ["name", "size"],
    }
    params = [
        SamplingParams(max_tokens=60, temperature=temperature, structured_outputs=outputs)
        for temperature in (0.0, 0.9)
        for outputs in (
            StructuredOutputsParams(json=schema),
            StructuredOutputsParams(regex="([a-c]{2}, ){12}"),
            StructuredOutputsParams(choice=["to the north", "to the south"]),
        )
    ]
    prompts = ["Say:"] * len(params)
    texts = []
    for config in (None, with_drafts(Path("demo"))):
        llm = LLM("demo", speculative_config=config, seed=3)
        outputs = llm.generate(prompts, params)
        texts.append([(out.outputs[0].text, out.outputs[0].finish_reason) for out in outputs])
        stats = llm.engine.stats()
    assert texts[0] == texts[1]
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 40


def test_both_models_share_the_memory_of_the_pool(folders: dict[str, Path]) -> None:
    folder = folders["llama3"]
    alone = make_engine(folder, **LIMITS).executor.info
    both = make_engine(folder, speculative_config=with_drafts(folder), **LIMITS).executor.info
    assert both.num_blocks == alone.num_blocks // 2
    assert both.kv_bytes_per_token == 2 * alone.kv_bytes_per_token
    assert both.weight_bytes == 2 * alone.weight_bytes


@pytest.mark.parametrize(
    ("family", "draft", "options", "said"),
    [
        ("llama3", "qwen3", {}, "their vocabularies have 180 and 199 tokens"),
        ("llama3", "llama2", {}, "speculative_config.model .*max_model_len must be .*64"),
        ("mistral", "qwen2", {}, "draft_model: all layers of the model have a window"),
        ("llama3", "nowhere", {}, "draft model"),
        ("llama3", "gpt2", {}, "transformers computes it"),
        ("llama3", "qwen3-next", {}, "some of its layers keep a state for each sequence"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    folders: dict[str, Path], family: str, draft: str, options: dict[str, Any], said: str
) -> None:
    config = with_drafts(folders.get(draft, Path("/nowhere")))
    with pytest.raises(ConfigError, match=said) as caught:
        make_engine(folders[family], speculative_config=config, **options)
    assert "\n" not in str(caught.value)


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """The models have vocabularies of one size."""
    with pytest.raises(ConfigError, match="demo-tools.* must have the tokenizer of .*demo.*differ"):
        LLM("demo", speculative_config=with_drafts(Path("demo-tools")))


def test_methods_for_draft_models_only() -> None:
    with pytest.raises(ConfigError, match="draft_model"):
        EngineConfig.from_mapping(
            {"model": "demo", "speculative_config": {"method": "suffix", "model": "demo"}}
        )
