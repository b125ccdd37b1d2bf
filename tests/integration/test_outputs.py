"""What callers may ask for besides text, and the kinds of prompts and tasks."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput

from paged_backend.cli import main
from paged_backend.engine.llm import LLM
from paged_backend.text.text_stream import StreamState, resumed_delta
from paged_backend.tools.demo import load_questions
from paged_backend.values.outputs import FinishReason
from paged_backend.values.sampling_params import SamplingParams

pytestmark = pytest.mark.server
QUESTION = load_questions()[0]
GREEDY = {"temperature": 0, "max_tokens": 64}
CHAT = [{"role": "user", "content": QUESTION.question}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The same checkpoint in this process."""
    return LLM("demo")


def generate(server, **fields):
    status, body = server.post("generate", {"exclude_input_in_output": True, **fields})
    assert status == 200, body
    return json.loads(body)


def stream(server, **fields):
    _, body = server.post("generate_stream", {"stream": True, **fields})
    return [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]


def listed(value):
    """HTTP gives a single element as a scalar."""
    return value if isinstance(value, list) else [value]


# --- prompts and tasks ----------------------------------------------------------------------------


def test_messages_are_rendered_with_the_models_template(server, llm):
    answer = generate(server, messages=json.dumps(CHAT), **GREEDY)
    assert answer["text_output"] == QUESTION.answer
    ids = generate(server, messages=json.dumps(CHAT), task="tokenize")["output_ids"]
    text = f"<|user|>{QUESTION.question}<|end|><|assistant|>"
    assert ids == llm.tokenizer.encode(text, add_special_tokens=False)


def test_a_chat_may_leave_its_last_message_open(server):
    begun, rest = QUESTION.answer.split(" ", 1)
    chat = {
        "messages": [*CHAT, {"role": "assistant", "content": begun}],
        "continue_final_message": True,
    }
    answer = generate(server, messages=json.dumps(chat), **GREEDY)
    assert answer["text_output"] == " " + rest


def test_text_becomes_tokens_and_tokens_become_text(server, llm):
    text = "naïve 日本語 👩‍👩‍👧 text"
    tokens = generate(server, text_input=text, task="tokenize")
    assert tokens["output_ids"] == llm.tokenizer.encode(text)
    assert tokens["num_input_tokens"] == len(tokens["output_ids"])
    back = generate(server, input_ids=tokens["output_ids"], task="detokenize")
    assert back["text_output"] == text


def test_the_model_tells_its_limits(server, llm):
    info = json.loads(generate(server, task="info")["text_output"])
    defaults = asdict(llm.engine.executor.info.sampling_defaults)
    assert info == {
        **asdict(llm.engine.limits),
        "sampling_defaults": defaults,
        "has_chat_template": True,
        "adapters": {},
    }


def test_lists_may_be_plain_fields(server):
    words = QUESTION.answer.split()
    stopped = generate(server, messages=json.dumps(CHAT), stop=[words[2], "never"], **GREEDY)
    assert stopped["text_output"] == QUESTION.answer[: QUESTION.answer.index(words[2])]
    other = generate(server, messages=json.dumps(CHAT), bad_words=[words[0], words[1]], **GREEDY)
    assert words[0] not in other["text_output"].split()
    ids = generate(server, text_input="abc def", task="tokenize")["output_ids"]
    only = generate(
        server, text_input="x", allowed_token_ids=ids, max_tokens=9, return_output_ids=True
    )
    assert set(only["output_ids"]) <= set(ids)
    (first, *_) = only["output_ids"]
    ended = generate(
        server,
        text_input="x",
        allowed_token_ids=[first],
        stop_token_ids=[first],
        return_finish_reason=True,
    )
    assert ended["finish_reason"] == "stop"


# --- outputs --------------------------------------------------------------------------------------


def test_log_probabilities_are_those_of_the_engine_itself(server, llm):
    params = {"logprobs": 2, "prompt_logprobs": 1, **GREEDY}
    prompt = llm.tokenizer.encode(QUESTION.question)
    (expected,) = llm.generate([prompt], SamplingParams(**params))
    answer = generate(
        server,
        input_ids=prompt,
        sampling_parameters=json.dumps(params),
        return_logprobs=True,
        return_cumulative_logprob=True,
        return_prompt_logprobs=True,
    )
    entries = json.loads(answer["logprobs"])
    assert [int(next(iter(entry))) for entry in entries] == expected.outputs[0].token_ids
    firsts = [next(iter(entry.values())) for entry in entries]
    assert [first["logprob"] for first in firsts] == pytest.approx(
        [entry.logprob for entry in expected.outputs[0].logprobs], abs=1e-5
    )
    assert "".join(first["decoded_token"] for first in firsts[:-1]) == "\n" + QUESTION.answer
    assert all(
        first["rank"] == 1 and len(entry) == 2 for first, entry in zip(firsts, entries, strict=True)
    )
    assert answer["cumulative_logprob"] == pytest.approx(
        sum(first["logprob"] for first in firsts), abs=1e-4
    )
    none, *rest = json.loads(answer["prompt_logprobs"])
    assert none is None
    assert [int(next(iter(entry))) for entry in rest] == prompt[1:]


def test_each_response_has_the_log_probabilities_of_its_tokens(server):
    fields = {"sampling_parameters": json.dumps({"logprobs": 0, "prompt_logprobs": 0, **GREEDY})}
    asked = ("logprobs", "cumulative_logprob", "prompt_logprobs", "num_output_tokens")
    fields |= {f"return_{name}": True for name in asked}
    events = stream(server, text_input=QUESTION.question, **fields)
    assert len(events) > 2
    totals = 0.0
    for event in events:
        entries = json.loads(event["logprobs"])
        assert len(entries) == event["num_output_tokens"]
        totals += sum(value["logprob"] for entry in entries for value in entry.values())
        assert event["cumulative_logprob"] == pytest.approx(totals, abs=1e-4)
    told = [json.loads(event["prompt_logprobs"]) is not None for event in events]
    assert told == [True] + [False] * (len(events) - 1)


def test_part_of_a_character_has_bytes(server, llm):
    ids = llm.tokenizer.encode("🦜", add_special_tokens=False)
    assert len(ids) == 4
    answer = generate(
        server,
        text_input="x",
        sampling_parameters=json.dumps({"allowed_token_ids": ids[:1], "logprobs": 0, "seed": 1}),
        return_logprobs=True,
    )
    entry = json.loads(answer["logprobs"])[0][str(ids[0])]
    assert entry["decoded_token"] == "�"
    assert entry["bytes"] == [0xF0]


def test_nothing_is_told_that_was_not_asked_for(server):
    answer = generate(server, text_input="x", max_tokens=1)
    assert set(answer) == {"model_name", "model_version", "text_output"}
    flags = {f"return_{name}": True for name in ("logprobs", "prompt_logprobs")}
    answer = generate(server, text_input="x", max_tokens=1, **flags)
    assert (answer["logprobs"], answer["prompt_logprobs"]) == ("null", "null")


def test_cached_tokens_are_counted(server):
    text = "Something that is asked twice, and long enough for several blocks. " * 2
    fields = {"text_input": text, "max_tokens": 1, "return_num_cached_tokens": True}
    assert generate(server, **fields)["num_cached_tokens"] == 0
    assert generate(server, **fields)["num_cached_tokens"] >= 16
    salted = generate(server, cache_salt="mine", **fields)
    assert salted["num_cached_tokens"] == 0


def test_each_response_has_what_a_detokenizer_without_memory_needs(server, llm):
    params = {"temperature": 1, "seed": 3, "n": 2, "max_tokens": 40, "stop": ["zq", "e"]}
    client = InferenceServerClient(server.running.grpc_url)
    responses = []
    client.start_stream(lambda result, error: responses.append(result))
    inputs = [
        InferInput("text_input", [1], "BYTES"),
        InferInput("sampling_parameters", [1], "BYTES"),
    ]
    inputs[0].set_data_from_numpy(np.array([b"What does"], dtype=object))
    inputs[1].set_data_from_numpy(np.array([json.dumps(params).encode()], dtype=object))
    flags = ("stream", "return_context_ids", "return_output_ids", "return_num_output_tokens")
    for name in (*flags, "return_finish_reason"):
        inputs.append(InferInput(name, [1], "BOOL"))
        inputs[-1].set_data_from_numpy(np.array([True]))
    client.async_stream_infer("paged_llm", inputs)
    client.stop_stream()
    client.close()

    def split(result, name, counts):
        return np.split(result.as_numpy(name), np.cumsum(result.as_numpy(counts))[:-1])

    sampling = SamplingParams.from_mapping(params)
    ended = set()
    for result in responses:
        contexts = split(result, "context_ids", "num_context_ids")
        new = split(result, "output_ids", "num_output_tokens")
        for index, text in enumerate(result.as_numpy("text_output")):
            if index in ended:
                continue
            total = int(result.as_numpy("sequence_length")[index])
            state = StreamState(
                contexts[index].tolist(),
                int(result.as_numpy("num_held_ids")[index]),
                total - len(new[index]),
            )
            reason = result.as_numpy("finish_reason")[index].decode()
            finish = None if reason == "None" else FinishReason(reason)
            delta = resumed_delta(llm.tokenizer, sampling, state, new[index].tolist(), finish)
            assert delta.text == text.decode()
            if finish:
                ended.add(index)
    assert ended == {0, 1}


# --- mistakes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"messages": "["}, "messages: is not valid JSON"),
        ({"messages": "[]"}, "messages: must be an array"),
        ({"messages": json.dumps(CHAT), "text_input": "x"}, "give either text_input or messages"),
        ({"task": "dance"}, "task: must be one of generate, "),
        ({"task": "tokenize"}, "text_input: is missing"),
        ({"task": "detokenize"}, "input_ids: is missing"),
        ({"task": "detokenize", "input_ids": [10**6]}, "input_ids: must be from 0 to"),
        ({"text_input": "x", "image": ["aGk="]}, "image: cannot be used"),
        ({"text_input": "x", "embedding_request": "{}"}, "embedding_request: cannot be used"),
        ({"text_input": "x", "logprobs": 21}, "logprobs: must be an integer from 0 up to 20"),
        ({"text_input": "x", "priority": "soon"}, "priority: must be an integer"),
        ({"text_input": "x", "tools": "{}"}, "tools: must be a list of tools"),
        ({"text_input": "x", "guided_json": "{"}, "guided_json: is not valid JSON"),
        ({"text_input": "x", "lora_name": "doll"}, "LoRA feature is not enabled."),
        ({"text_input": "x", "allowed_token_ids": [10**6]}, "allowed_token_ids: must be below"),
        ({"text_input": "x", "bad_words": ["x"] * 200}, "bad_words: at most 128 strings"),
        ({"text_input": "x", "stop_token_ids": [1] * 2**18}, "stop_token_ids: at most 256"),
        ({"text_input": "x", "stop": ["x"] * 300_000}, "stop: has 300000 elements, more than"),
        ({"input_ids": [5] * 9000}, "input_ids: has 9000 elements, more than 2048"),
        ({"task": "detokenize", "input_ids": [5] * 300_000}, "input_ids: has 300000 elements"),
        (
            {"text_input": "x", "sampling_parameters": json.dumps({"logit_bias": {"5": 101}})},
            "logit_bias: each must be a number from -100 up to 100",
        ),
        (
            {"text_input": "x", "sampling_parameters": json.dumps({"logit_bias": {"-5": 1}})},
            "logit_bias: each must be an integer from 0",
        ),
    ],
    ids=str,
)
def test_mistakes_are_named(server, fields, problem):
    status, body = server.post("generate", fields)
    assert status == 400
    assert problem in json.loads(body)["error"]


def test_the_command_line_sends_a_chat(server, capsys):
    argv = ["generate", "--chat", QUESTION.question, "--url", server.running.grpc_url]
    assert main([*argv, "--temperature", "0"]) == 0
    assert capsys.readouterr().out.strip() == QUESTION.answer
