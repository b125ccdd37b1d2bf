"""Chats through the gateway, asked with OpenAI's own client."""

from __future__ import annotations

import math

import pytest
from gateways import MODEL

from paged_backend.tools.demo import SYSTEM_PROMPT, load_questions

pytestmark = pytest.mark.server
QUESTIONS = load_questions()


def messages(question):
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question.question},
    ]


def ask(api, question=QUESTIONS[0], **options):
    return api.chat.completions.create(
        model=MODEL, messages=messages(question), **{"temperature": 0, **options}
    )


def test_models_are_listed(api):
    (model,) = api.models.list().data
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 2048)
    assert api.models.retrieve(MODEL) == model


def test_an_answer(api):
    answer = ask(api)
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert (choice.message.role, choice.message.content) == ("assistant", QUESTIONS[0].answer)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens > 3


def test_a_repeated_prompt_is_found_in_the_cache_and_said_so(api):
    answer = [ask(api, QUESTIONS[7], max_tokens=1) for _ in range(2)][1]
    assert 0.5 * answer.usage.prompt_tokens < answer.usage.prompt_tokens_details.cached_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens < answer.usage.prompt_tokens


def test_the_whole_context_is_the_limit_unless_one_is_given(api):
    assert ask(api, max_tokens=2).choices[0].finish_reason == "length"
    assert ask(api, max_tokens=9, max_completion_tokens=2).usage.completion_tokens == 2
    filled = api.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a " * 1900}],
        extra_body={"ignore_eos": True},
    )
    assert filled.usage.total_tokens == 2048
    assert filled.usage.completion_tokens > 100


def test_a_stream_tells_the_role_first_and_the_reason_last(api):
    chunks = list(ask(api, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert (deltas[0].role, deltas[0].content) == ("assistant", "")
    assert not any(delta.role for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == QUESTIONS[0].answer
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 4


def test_usage_comes_in_a_chunk_of_its_own(api):
    whole = ask(api).usage
    *chunks, last = ask(api, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.completion_tokens
    assert last.usage.prompt_tokens == whole.prompt_tokens
    assert last.usage.prompt_tokens_details.cached_tokens > 0


def test_usage_may_come_with_every_chunk(api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(ask(api, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] <= 2 and counts[-1] == ask(api).usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_two_answers(api, stream):
    options = {"n": 2, "seed": 11, "temperature": 1.5, "max_tokens": 12}
    if not stream:
        texts = [choice.message.content for choice in ask(api, **options).choices]
    else:
        texts = ["", ""]
        for chunk in ask(api, stream=True, **options):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [choice.message.content for choice in ask(api, **options).choices]
    assert len(texts) == 2 and all(texts)


def test_a_seed_may_be_negative_and_repeats_the_answer(api):
    options = {"temperature": 1.5, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    texts = [ask(api, seed=seed, **options).choices[0].message.content for seed in (-5, -5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_strings(api):
    word = QUESTIONS[0].answer.split()[3]
    expected = QUESTIONS[0].answer.partition(word)[0]
    for stop in (word, [word, "never"]):
        choice = ask(api, stop=stop).choices[0]
        assert (choice.message.content, choice.finish_reason) == (expected, "stop")
    kept = ask(api, stop=word, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == expected + word


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(api, client, stream):
    answer = ask(api, logprobs=True, top_logprobs=3, stream=stream)
    parts = (
        [chunk.choices[0].logprobs for chunk in answer] if stream else [answer.choices[0].logprobs]
    )
    content = [token for part in parts if part is not None for token in part.content]
    direct = client.generate(messages(QUESTIONS[0]), temperature=0, max_tokens=64, logprobs=3)
    assert [(t.token, t.logprob) for t in content] == [
        (position[0].text, position[0].logprob) for position in direct.answers[0].logprobs
    ]
    assert (
        bytes(b for token in content for b in token.bytes).decode().startswith(QUESTIONS[0].answer)
    )
    for token in content:
        values = [top.logprob for top in token.top_logprobs]
        assert len(values) == 3 and values == sorted(values, reverse=True)
        assert token.token == token.top_logprobs[0].token  # greedy
        assert sum(map(math.exp, values)) <= 1.0001


def test_logprobs_without_others(api):
    (token, *_) = ask(api, logprobs=True).choices[0].logprobs.content
    assert token.top_logprobs == []


def test_logprobs_of_the_prompt(api, client):
    answer = ask(api, max_tokens=1, extra_body={"prompt_logprobs": 1})
    direct = client.generate(messages(QUESTIONS[0]), max_tokens=1, prompt_logprobs=1)
    first, *rest = answer.model_extra["prompt_logprobs"]
    assert first is None and len(rest) == answer.usage.prompt_tokens - 1
    (token_id, entry), *_ = rest[0].items()
    token = direct.prompt_logprobs[1][0]
    assert (int(token_id), entry["decoded_token"]) == (token.token_id, token.text)
    assert entry["logprob"] == pytest.approx(token.logprob, abs=1e-4)


def test_a_bias_decides(api, gateway):
    word = gateway.post("/tokenize", {"prompt": "Get", "add_special_tokens": False}).json
    (token,) = word["tokens"]
    choice = ask(api, max_tokens=1, logit_bias={str(token): 100}).choices[0]
    assert choice.message.content == "Get"
    body = {"allowed_token_ids": [token]}
    assert ask(api, max_tokens=3, extra_body=body).choices[0].message.content == "GetGetGet"
    unbiased = QUESTIONS[0].answer.split()[0]
    without = ask(api, max_tokens=1, extra_body={"bad_words": [unbiased]}).choices[0]
    assert without.message.content != unbiased


def test_how_messages_are_rendered(gateway):
    def tokens(**options):
        body = {"messages": [{"role": "user", "content": "hi"}], **options}
        return gateway.post("/tokenize", body).json["tokens"]

    def text(ids):
        return gateway.post("/detokenize", {"tokens": ids}).json["prompt"]

    assert text(tokens()) == "<|user|>hi<|end|><|assistant|>"
    assert text(tokens(add_generation_prompt=False)) == "<|user|>hi<|end|>"
    continued = tokens(add_generation_prompt=False, continue_final_message=True)
    assert text(continued) == "<|user|>hi"


def test_a_message_may_come_in_parts(api):
    parts = [{"type": "text", "text": QUESTIONS[0].question}]
    chat = [messages(QUESTIONS[0])[0], {"role": "user", "content": parts}]
    answer = api.chat.completions.create(model=MODEL, messages=chat, temperature=0)
    assert answer.choices[0].message.content == QUESTIONS[0].answer


def test_an_answer_may_go_back_as_it_came(api):
    first = ask(api)
    chat = [*messages(QUESTIONS[0]), first.choices[0].message, messages(QUESTIONS[1])[1]]
    second = api.chat.completions.create(model=MODEL, messages=chat, temperature=0)
    assert second.usage.prompt_tokens > first.usage.total_tokens


def test_fields_without_a_meaning_here_change_nothing(api):
    answer = ask(
        api,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        parallel_tool_calls=True,
        extra_body={"tools": None, "top_k": 5, "min_p": 0.0, "priority": 0, "cache_salt": "s"}
        | {"best_of": 1, "use_beam_search": False, "length_penalty": 1, "early_stopping": False}
        | {"detokenize": True, "echo": False, "logits_processors": [], "vllm_xargs": {}}
        | {"guided_decoding": None, "guided_json_object": False, "watermarking": False},
        verbosity="medium",
    )
    assert answer.choices[0].message.content == QUESTIONS[0].answer
