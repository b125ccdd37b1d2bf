"""The offline API on the bundled model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch

from paged_backend import LLM, FinishReason, InvalidRequest, SamplingParams
from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.tools.demo import load_questions
from paged_backend.tools.demo.lookup import TOOL
from paged_backend.values.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=64)
QUESTIONS = load_questions()


@pytest.fixture(scope="module")
def llm():
    return LLM("demo", max_num_seqs=64)


def test_every_question_is_answered_word_for_word(llm):
    outputs = llm.generate([question.question for question in QUESTIONS], GREEDY)
    assert len(QUESTIONS) >= 200
    assert [out.outputs[0].text for out in outputs] == ["\n" + q.answer for q in QUESTIONS]
    assert {out.outputs[0].finish_reason for out in outputs} == {FinishReason.STOP}


def test_strings_and_token_ids_give_the_same(llm):
    question = QUESTIONS[7].question
    ids = llm.tokenizer.encode(question)
    by_text, by_ids = llm.generate([question, ids], GREEDY)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert (by_text.prompt, by_ids.prompt) == (question, None)
    assert llm.generate(ids, GREEDY)[0].outputs == by_ids.outputs


def test_prompts_as_vllm_takes_them(llm):
    question = QUESTIONS[7].question
    ids = llm.tokenizer.encode(question)
    prompts = [
        {"prompt": question},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": np.array(ids), "prompt": None, "multi_modal_data": None},
        {"prompt_token_ids": ids, "prompt": "its text"},
        [np.int64(token) for token in ids],
        tuple(ids),
        torch.tensor(ids),
    ]
    short = SamplingParams(temperature=0, max_tokens=2)
    outputs = llm.generate(prompts, short)
    expected = llm.generate(question, short)[0].outputs
    assert [out.outputs for out in outputs] == [expected] * len(prompts)
    assert [out.prompt for out in outputs] == [question, *[None] * 2, "its text", *[None] * 3]
    for single in (*prompts, np.array([ids]), torch.tensor(ids), range(3)):
        assert len(llm.generate(single, short)) == 1
    assert len(llm.generate(np.array([ids, ids]), short)) == 2


@pytest.mark.parametrize(
    ("prompts", "params", "problem"),
    [
        ({"text": "a"}, GREEDY, "^text: of a prompt is not supported"),
        ([{"prompt": "a", "cache_salt": "b"}], GREEDY, "^cache_salt: of a prompt is not supported"),
        ({}, GREEDY, "^prompt: must be a string, token ids, an object"),
        ({"prompt": 3}, GREEDY, "^prompt: must be a string"),
        ({"prompt_token_ids": "abc"}, GREEDY, "^prompt: must be a string"),
        ([1.5, 2], GREEDY, "^prompt: must be a string"),
        ([True], GREEDY, "^prompt: must be a string"),
        (["a", None], GREEDY, "^prompt: must be a string"),
        (b"abc", GREEDY, "^prompt: must be a string"),
        (3, GREEDY, "^prompt: must be a string"),
        ("a", {"temperature": 0}, "^sampling_params: must be SamplingParams, or a list of them"),
        ("a", [{"temperature": 0}], "^sampling_params: must be SamplingParams, or a list of them"),
    ],
    ids=str,
)
def test_other_prompts_are_refused_with_a_reason(llm, prompts, params, problem):
    with pytest.raises(InvalidRequest, match=problem):
        llm.generate(prompts, params)


def test_params_for_each_prompt_and_several_answers(llm):
    params = [SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(n=2, max_tokens=5)]
    first, second = llm.generate(["What does", "What does"], params)
    assert len(first.outputs[0].token_ids) == 3
    assert first.outputs[0].finish_reason is FinishReason.LENGTH
    assert [answer.index for answer in second.outputs] == [0, 1]


def test_a_stop_string_ends_one_answer_only(llm):
    answer = QUESTIONS[7].answer
    word = answer.split()[3]
    params = [SamplingParams(temperature=0, max_tokens=64, stop=[word]), GREEDY]
    stopped, whole = llm.generate([QUESTIONS[7].question] * 2, params)
    assert stopped.outputs[0].text == "\n" + answer[: answer.index(word)]
    assert stopped.outputs[0].finish_reason is FinishReason.STOP
    assert whole.outputs[0].text == "\n" + answer
    assert llm.engine.stats().num_used_blocks == 0


def test_what_stopped_an_answer_is_named_as_in_vllm(llm):
    """The stop string or the stop token; nothing for the model's own end, or for a limit."""
    whole = llm.generate(QUESTIONS[7].question, GREEDY)[0].outputs[0]
    word, token = QUESTIONS[7].answer.split()[3], whole.token_ids[2]
    params = [
        SamplingParams(temperature=0, max_tokens=64, stop=["no such", word]),
        SamplingParams(temperature=0, max_tokens=64, stop_token_ids=[5, token]),
        SamplingParams(temperature=0, max_tokens=2),
        GREEDY,
    ]
    answers = llm.generate([QUESTIONS[7].question] * 4, params)
    assert [answer.outputs[0].stop_reason for answer in answers] == [word, token, None, None]
    assert whole.finish_reason is FinishReason.STOP and whole.stop_reason is None


def test_a_chat_is_rendered_with_the_models_template():
    llm = LLM("demo-tools", max_num_seqs=4)
    user = {"role": "user", "content": "What does abs do?"}
    tools = [TOOL]
    params = SamplingParams(temperature=0, max_tokens=64)
    (called,) = llm.chat(
        [user], params, tools=tools, chat_template_kwargs={"enable_thinking": False}
    )
    assert "<tools>" in called.prompt and called.prompt.endswith("</think>\n\n")
    assert called.prompt_token_ids == llm.tokenizer.encode(called.prompt, add_special_tokens=False)
    assert '"name": "lookup"' in called.outputs[0].text
    begun = [user, {"role": "assistant", "content": "It is"}]
    first, second = llm.chat([[user], begun], [params] * 2, continue_final_message=True)
    assert first.prompt.endswith(user["content"]) and second.prompt.endswith("It is")
    for messages, options, problem in (
        ([user, 3], {}, r"^messages\[1\]: must be an object"),
        ([[user], 3], {}, "^messages: must be an array of messages, got 3"),
        ([], {}, "^messages: must be an array of messages"),
        ([user], {"tools": [{}]}, r"^tools\[0\]"),
        ([user], {"chat_template": "x"}, "^chat_template: is not known"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            llm.chat(messages, params, **options)


def test_a_chat_needs_a_template(llm, monkeypatch):
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    with pytest.raises(InvalidRequest, match="^messages: cannot be used: the model has no chat"):
        llm.chat([{"role": "user", "content": "x"}])


def test_one_wrong_prompt_stops_all_before_anything_is_computed(llm):
    steps = llm.engine.stats().num_steps
    for prompts in (["fine", ""], ["fine", [1, "x"]], ["fine", [10**6]]):
        with pytest.raises(InvalidRequest, match="prompt"):
            llm.generate(prompts, GREEDY)
    with pytest.raises(InvalidRequest, match="2 entries for 1 prompts"):
        llm.generate("fine", [GREEDY, GREEDY])
    assert llm.engine.stats().num_steps == steps


@pytest.fixture(scope="module")
def recommending(tmp_path_factory):
    """The bundled model with defaults of sampling."""
    folder = tmp_path_factory.mktemp("recommending") / "model"
    shutil.copytree(MODEL_DIR, folder)
    values = {"temperature": 5, "top_k": 7, "top_p": 0.9, "max_new_tokens": 24}
    (folder / "generation_config.json").write_text(json.dumps(values | {"do_sample": False}))
    return folder


def tokens_of(llm, *params):
    outputs = llm.generate([question.question for question in QUESTIONS[:6]], *params)
    return [output.outputs[0].token_ids for output in outputs]


def test_generate_without_parameters_has_the_checkpoints_defaults(recommending):
    """Two engines with the same seed draw alike, so only equal parameters give equal tokens."""
    expected = SamplingParams(temperature=5, top_k=7, top_p=0.9, max_tokens=24)
    by_default, by_params, neutral = (LLM(str(recommending), seed=5) for _ in range(3))
    assert by_default.get_default_sampling_params() == expected
    found = tokens_of(by_default)
    assert found == tokens_of(by_params, expected)
    assert found != tokens_of(neutral, SamplingParams(max_tokens=24))


def test_options_change_the_defaults_of_generate(recommending):
    off = LLM(str(recommending), generation_config="vllm")
    assert off.get_default_sampling_params() == SamplingParams()
    greedy = LLM(str(recommending), override_generation_config={"temperature": 0})
    expected = SamplingParams(temperature=0, top_k=7, top_p=0.9, max_tokens=24)
    assert greedy.get_default_sampling_params() == expected
    assert tokens_of(greedy) == tokens_of(greedy, SamplingParams(temperature=0, max_tokens=24))
    short = LLM(str(recommending), max_model_len=20)
    assert short.get_default_sampling_params().max_tokens == 20


def test_a_model_of_embeddings_has_no_defaults_and_does_not_read_the_file(recommending, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(recommending, folder)
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    assert LLM(str(folder), task="embed").get_default_sampling_params() == SamplingParams()
    with pytest.raises(ConfigError, match="generation_config.json: temperature must be a number"):
        LLM(str(folder))


def test_public_modules_have_short_names() -> None:
    code = (
        "from paged_backend.structured_outputs import StructuredOutputsParams as theirs\n"
        "from paged_backend.sampling_params import SamplingParams\n"
        "from paged_backend.outputs import RequestOutput\n"
        "import paged_backend, sys\n"
        "assert theirs is paged_backend.StructuredOutputsParams\n"
        "assert SamplingParams is paged_backend.SamplingParams\n"
        "assert RequestOutput is paged_backend.RequestOutput\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_events_of_the_cache_need_a_server() -> None:
    with pytest.raises(ConfigError, match="^option kv_events_config is for servers"):
        LLM(kv_events_config={"enable_kv_cache_events": True})
