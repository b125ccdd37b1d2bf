"""Log-probabilities and edits of logits beside those of transformers."""

from __future__ import annotations

import pytest
from oracle import Oracle, make_engine, mixed_work, run

from paged_backend.engine.engine import Engine
from paged_backend.engine.llm import LLM
from paged_backend.values.outputs import SequenceOutput
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

ADJUSTED = {
    "temperature": 1.3,
    "seed": 4,
    "logit_bias": {7: 5.0, 9: -100},
    "presence_penalty": 1.0,
    "min_tokens": 3,
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle("llama3", tmp_path_factory.mktemp("llama3"))


def answers(
    engine: Engine, prompts: list[list[int]], **params: object
) -> list[list[SequenceOutput]]:
    for index, prompt in enumerate(prompts):
        request = Request(f"r{index}", prompt, SamplingParams(**params))
        engine.add_request(request)
    outputs = run(engine, [])
    return [outputs[f"r{index}"] for index in range(len(prompts))]


@pytest.mark.parametrize("fields", [{"temperature": 0}, ADJUSTED], ids=["greedy", "adjusted"])
@pytest.mark.parametrize("budget", [512, 7], ids=["whole", "chunked"])
def test_they_are_the_models_own(oracle: Oracle, fields: dict[str, object], budget: int) -> None:
    engine = make_engine(oracle.folder, max_num_batched_tokens=budget, max_num_seqs=7)
    prompts = [prompt for prompt, _ in mixed_work(9)]
    asked = {"logprobs": 5, "prompt_logprobs": 3, "max_tokens": 8, **fields}
    for prompt, outputs in zip(prompts, answers(engine, prompts, **asked), strict=True):
        oracle.confirm_logprobs(prompt, outputs)
        tops = {len(entry.top_token_ids) for output in outputs for entry in output.logprobs}
        assert tops == {5}


def test_prompts_are_computed_though_they_are_cached(oracle: Oracle) -> None:
    engine = make_engine(oracle.folder)
    prompt = [7 * i % 190 + 3 for i in range(64)]
    answers(engine, [prompt], max_tokens=1)
    (cached,) = answers(engine, [prompt], max_tokens=2, logprobs=0)
    assert cached[0].num_cached_tokens == 48
    assert cached[0].prompt_logprobs is None
    (outputs,) = answers(engine, [prompt], max_tokens=2, logprobs=0, prompt_logprobs=0)
    oracle.confirm_logprobs(prompt, outputs)
    assert outputs[0].num_cached_tokens == 0


def test_a_preempted_request_tells_each_once(oracle: Oracle) -> None:
    blocks = (
        2**20 // make_engine(oracle.folder, kv_cache_memory_bytes=2**20).executor.info.num_blocks
    )
    engine = make_engine(oracle.folder, max_model_len=96, kv_cache_memory_bytes=9 * blocks)
    prompts = [prompt[:40] for prompt, _ in mixed_work(6, seed=1)]
    fields = {"logprobs": 2, "prompt_logprobs": 1, "max_tokens": 24, "temperature": 0}
    for prompt, outputs in zip(
        prompts, answers(engine, prompts, ignore_eos=True, **fields), strict=True
    ):
        oracle.confirm_logprobs(prompt, outputs)
    assert engine.stats().num_preemptions > 0


def test_answers_to_one_prompt_have_their_own(oracle: Oracle) -> None:
    prompt = [9, 8, 7, 6, 5]
    (outputs,) = answers(
        make_engine(oracle.folder), [prompt], n=3, logprobs=1, prompt_logprobs=0, max_tokens=5
    )
    for index in range(3):
        oracle.confirm_logprobs(prompt, [output for output in outputs if output.index == index])
    told = [output.index for output in outputs if output.prompt_logprobs is not None]
    assert told == [0]


@pytest.mark.parametrize("budget", [512, 7], ids=["whole", "chunked"])
@pytest.mark.parametrize("context", [False, True])
@pytest.mark.parametrize("generation", [False, True])
def test_logits_are_the_models_own(
    oracle: Oracle, budget: int, context: bool, generation: bool
) -> None:
    """Those of the prompt include its last token's, which the first new token is sampled from."""
    engine = make_engine(oracle.folder, max_num_batched_tokens=budget, max_num_seqs=7)
    prompts = [prompt for prompt, _ in mixed_work(9)]
    asked = {"return_context_logits": context, "return_generation_logits": generation, **ADJUSTED}
    for prompt, outputs in zip(
        prompts, answers(engine, prompts, max_tokens=4, **asked), strict=True
    ):
        assert (outputs[0].prompt_logprobs is not None) == context
        if context or generation:
            oracle.confirm_logprobs(prompt, outputs)
        given = [entry.logits is not None for out in outputs for entry in out.logprobs or ()]
        assert given == (
            [generation or context] + [generation] * 3 if context or generation else []
        )
        assert all(entry.logits is not None for entry in outputs[0].prompt_logprobs or ())


def test_nobody_gets_what_he_did_not_ask_for(oracle: Oracle) -> None:
    (outputs,) = answers(make_engine(oracle.folder), [[5, 6, 7]], max_tokens=3)
    assert all(output.logprobs is output.prompt_logprobs is None for output in outputs)


def test_edited_answers_are_those_of_transformers(oracle: Oracle) -> None:
    """Its own processors of logits do the same to the same prompts."""
    prompts = [prompt for prompt, _ in mixed_work(6, seed=2)]
    usual = [oracle.generate(prompt, 12) for prompt in prompts]
    for prompt, answer in zip(prompts, usual, strict=True):
        first, second, third, *_ = answer
        bias = {first: -1.0, (first + 7) % 199: 0.4, 11: 0.3}
        words = [[second], [third, answer[3]], answer[4:7]]
        allowed = sorted({*answer[::2], *range(40, 60)})
        cases = [
            ({"logit_bias": bias}, {"sequence_bias": {(k,): v for k, v in bias.items()}}),
            ({"bad_words_token_ids": words}, {"bad_words_ids": words}),
            (
                {"allowed_token_ids": allowed},
                {"prefix_allowed_tokens_fn": lambda *_, allowed=allowed: allowed},
            ),
        ]
        for ours, theirs in cases:
            fields = {"temperature": 0, "max_tokens": 12, **ours}
            (outputs,) = answers(make_engine(oracle.folder), [prompt], **fields)
            tokens = [token for output in outputs for token in output.new_token_ids]
            assert tokens == oracle.generate(prompt, 12, **theirs), ours


def test_the_offline_api_has_them_and_reads_bad_words() -> None:
    llm = LLM("demo")
    question = "What does len do?"
    asked = {"temperature": 0, "max_tokens": 12, "logprobs": 2, "prompt_logprobs": 0}
    (usual,) = llm.generate([question], SamplingParams(**asked))
    answer = usual.outputs[0]
    assert len(answer.logprobs) == len(answer.token_ids)
    assert len(usual.prompt_logprobs) == len(usual.prompt_token_ids) - 1
    word = answer.text.split()[1]
    (other,) = llm.generate([question], SamplingParams(**asked, bad_words=(word,)))
    assert f" {word}" not in other.outputs[0].text
