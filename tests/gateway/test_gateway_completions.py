"""Completions through the gateway, asked with OpenAI's own client."""

from __future__ import annotations

import pytest
import tokenizers
from gateways import MODEL
from paged_client.gateway.backlog import MAX_STARTING

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.tools.demo import load_questions

pytestmark = pytest.mark.server
QUESTIONS = load_questions()
PROMPT = QUESTIONS[0].question
ANSWER = "\n" + QUESTIONS[0].answer  # what follows the bare question


def complete(api, prompt=PROMPT, **options):
    return api.completions.create(
        model=MODEL, prompt=prompt, **{"temperature": 0, "max_tokens": 64, **options}
    )


def texts(chunks):
    """The joined text of each choice of a stream, in order of the index."""
    joined: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            joined[choice.index] = joined.get(choice.index, "") + choice.text
    return [text for _, text in sorted(joined.items())]


def ids_of(gateway, text):
    return gateway.post("/tokenize", {"model": MODEL, "prompt": text}).json["tokens"]


def test_a_completion(api):
    answer = complete(api)
    (choice,) = answer.choices
    assert (answer.object, answer.id[:5]) == ("text_completion", "cmpl-")
    assert (choice.text, choice.finish_reason, choice.logprobs) == (ANSWER, "stop", None)


def test_16_tokens_are_the_default(api):
    answer = api.completions.create(model=MODEL, prompt="x", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16


def test_a_stream(api):
    chunks = list(complete(api, stream=True))
    assert texts(chunks) == [ANSWER]
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {chunk.object for chunk in chunks} == {"text_completion"}


def test_a_token_that_there_is_not_is_named_as_in_the_body(gateway):
    answer = gateway.post("/detokenize", {"model": MODEL, "tokens": [1, 2048]})
    assert (answer.status, answer.error["param"]) == (400, "tokens")
    assert answer.error["message"] == "tokens: must be from 0 to 2047, got 2048"


def test_tokenize_and_detokenize_are_inverse(gateway):
    text = "What does os.path.join do? \u00e9\u4e2d\U0001f600"
    answer = gateway.post("/tokenize", {"model": MODEL, "prompt": text}).json
    assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == 2048
    back = gateway.post("/detokenize", {"model": MODEL, "tokens": answer["tokens"]})
    assert back.json == {"prompt": text}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["texts", "ids"])
def test_several_prompts_each_have_n_answers_in_order(api, gateway, kind, stream):
    prompts = [question.question for question in QUESTIONS[:3]]
    if kind == "ids":
        prompts = [ids_of(gateway, prompt) for prompt in prompts]
    answer = complete(api, prompts, n=2, stream=stream)
    found = texts(answer) if stream else [choice.text for choice in answer.choices]
    assert found == ["\n" + question.answer for question in QUESTIONS[:3] for _ in range(2)]
    if not stream:
        assert [choice.index for choice in answer.choices] == [*range(6)]


def test_usage_counts_all_prompts(api, gateway):
    prompts = [question.question for question in QUESTIONS[:3]]
    usage = complete(api, prompts, max_tokens=2, extra_body={"ignore_eos": True}).usage
    assert usage.prompt_tokens == sum(len(ids_of(gateway, prompt)) for prompt in prompts)
    assert usage.completion_tokens == 6


def test_one_list_of_ids_is_one_prompt(api, gateway):
    (choice,) = complete(api, ids_of(gateway, PROMPT)).choices
    assert choice.text == ANSWER


@pytest.mark.parametrize("stream", [False, True])
def test_echo(api, gateway, stream):
    for prompt in (PROMPT, ids_of(gateway, PROMPT)):
        answer = complete(api, prompt, echo=True, n=2, stream=stream)
        found = texts(answer) if stream else [choice.text for choice in answer.choices]
        assert found == [PROMPT + ANSWER] * 2


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_columns(api, client, stream):
    answer = complete(api, logprobs=2, stream=stream)
    parts = [c.choices[0].logprobs for c in answer] if stream else [answer.choices[0].logprobs]
    tokens = [token for part in parts for token in part.tokens]
    values = [value for part in parts for value in part.token_logprobs]
    top = [others for part in parts for others in part.top_logprobs]
    offsets = [offset for part in parts for offset in part.text_offset]
    direct = client.generate(PROMPT, temperature=0, max_tokens=64, logprobs=2)
    sampled = [position[0] for position in direct.answers[0].logprobs]
    assert (tokens, values) == ([t.text for t in sampled], [t.logprob for t in sampled])
    assert "".join(tokens).startswith(ANSWER)
    assert [ANSWER[start : start + len(t)] for start, t in zip(offsets, tokens, strict=True)][
        :-1
    ] == tokens[:-1]
    for token, value, others in zip(tokens, values, top, strict=True):
        assert others[token] == value == max(others.values())
        assert len(others) == 2 and next(iter(others)) == token


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_bytes_that_are_no_text(gateway, stream):
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    no_text = tokenizer.token_to_id("ÿ")  # the byte 0xff
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2, "logprobs": 1, "stream": stream}
    answer = gateway.post("/v1/completions", body | {"allowed_token_ids": [no_text]})
    assert answer.status == 200, answer.body
    assert b"text_offset" in answer.body and b'"error"' not in answer.body


@pytest.mark.parametrize(
    ("prompts", "fields", "problem"),
    [
        (["x"] * 3, {"allowed_token_ids": [7] * 2**17}, "allowed_token_ids: at most 262144 for"),
        (["x"], {"logprobs": 20, "max_tokens": 2000}, "logprobs: at most 32768 in all (max_total"),
        (
            [[7] * 1500] * 5,
            {"prompt_logprobs": 20},
            "logprobs: a whole answer has at most 131072 in all; stream it",
        ),
    ],
    ids=["ids", "answer", "answers"],
)
def test_what_multiplies_is_bounded(gateway, prompts, fields, problem):
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 1, **fields}
    answer = gateway.post("/v1/completions", body)
    assert answer.status == 400
    assert problem in answer.error["message"]


def test_a_sampled_token_that_is_not_likely_is_shown_besides(api):
    logprobs = (
        complete(
            api,
            "q",
            temperature=2,
            seed=3,
            logprobs=1,
            max_tokens=32,
            extra_body={"ignore_eos": True},
        )
        .choices[0]
        .logprobs
    )
    assert {len(others) for others in logprobs.top_logprobs} == {1, 2}
    assert all(
        t in others for t, others in zip(logprobs.tokens, logprobs.top_logprobs, strict=True)
    )


def test_parts_of_characters_are_named_by_their_bytes(api, gateway):
    (first, *rest) = ids_of(gateway, "\u4e2d")  # in several tokens of the demo model
    assert rest
    logprobs = (
        complete(api, "x", max_tokens=1, logprobs=0, extra_body={"allowed_token_ids": [first]})
        .choices[0]
        .logprobs
    )
    assert logprobs.tokens[0].startswith("bytes:\\xe4")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_a_prompt_is_scored(api, gateway, client, max_tokens, stream):
    """As evaluation harnesses do it: echo, log-probabilities, few or no new tokens."""
    text = PROMPT + ANSWER
    for prompt in (text, ids_of(gateway, text)):
        answer = complete(api, prompt, max_tokens=max_tokens, echo=True, logprobs=1, stream=stream)
        choices = [c.choices[0] for c in answer] if stream else [answer.choices[0]]
        parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
        tokens = [token for part in parts for token in part.tokens]
        values = [value for part in parts for value in part.token_logprobs]
        offsets = [offset for part in parts for offset in part.text_offset]
        count = len(ids_of(gateway, text))
        direct = client.generate(text, max_tokens=1, prompt_logprobs=1).prompt_logprobs
        assert values[0] is None
        assert values[1:count] == pytest.approx([p[0].logprob for p in direct[1:]], abs=1e-4)
        assert "".join(tokens[:count]) == text
        assert len(tokens) <= count + max_tokens and len(tokens) >= count
        assert all(text.startswith(t, o) for t, o in zip(tokens[:count], offsets, strict=False))
        assert "".join(choice.text for choice in choices).startswith(text)
        assert choices[-1].finish_reason in ("length", "stop")


def test_nothing_is_counted_that_is_not_shown(api):
    usage = complete(api, max_tokens=0, echo=True).usage
    assert (usage.completion_tokens, usage.total_tokens) == (0, usage.prompt_tokens)


def test_logprobs_of_the_prompt_as_vllm_has_them(api):
    answer = complete(api, max_tokens=1, extra_body={"prompt_logprobs": 0})
    first, *rest = answer.choices[0].model_extra["prompt_logprobs"]
    assert first is None
    assert len(rest) == answer.usage.prompt_tokens - 1
    assert all(len(entry) == 1 for entry in rest)


def test_a_salt_keeps_caches_apart(api):
    prompt = "A text for one and for the other, long enough for some blocks. " * 3

    def cached(salt):
        answer = complete(api, prompt, max_tokens=1, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert (cached("a"), cached("b")) == (0, 0)
    assert cached("a") > 0


@pytest.mark.parametrize("stream", [False, True])
def test_more_prompts_than_start_at_once_are_all_answered_in_order(api, stream):
    prompts = [question.question for question in QUESTIONS[:10]] * 5
    answer = complete(api, prompts, stream=stream)
    found = texts(answer) if stream else [choice.text for choice in answer.choices]
    assert found == ["\n" + question.answer for question in QUESTIONS[:10]] * 5


@pytest.mark.parametrize("stream", [False, True])
def test_after_a_refused_prompt_no_more_are_started(gateway, stream):
    def num_routed():
        return sum(gateway.metrics("paged_gateway_routed_total").values())

    before = num_routed()
    body = {"model": MODEL, "prompt": [[99999]] * 256, "stream": stream}
    assert gateway.post("/v1/completions", body).status == 400
    assert 1 <= num_routed() - before <= MAX_STARTING
