"""The same 50 requests over every interface give the same tokens."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from demo_server import MODEL, Server
from gateway.gateways import Gateway, running_gateway
from paged_client import Client

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.tools.demo import load_questions

pytestmark = pytest.mark.server

NUM_REQUESTS = 50
VOCABULARY = 2048
TOKENIZER = load_tokenizer(MODEL_DIR)
# Tokens that a client can name by their text, too.
PLAIN = [
    token_id
    for token_id in range(300, VOCABULARY)
    if TOKENIZER.encode(TOKENIZER.decode([token_id]), add_special_tokens=False) == [token_id]
]


@dataclass(frozen=True)
class Asked:
    """A request, with parameters that every interface has."""

    question: str
    is_chat: bool
    params: dict[str, Any]  # by vLLM's names
    biased: dict[int, float] = field(default_factory=dict)  # token -> bias

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]

    @property
    def all_params(self) -> dict[str, Any]:
        bias = {str(token_id): weight for token_id, weight in self.biased.items()}
        return self.params | ({"logit_bias": bias} if bias else {})

    @property
    def prompt(self) -> dict[str, Any]:
        """The prompt as fields of ``generate``."""
        if self.is_chat:
            return {"messages": json.dumps(self.messages)}
        return {"text_input": self.question}


def draw() -> list[Asked]:
    """Greedy and sampled requests, with stops, biases, penalties and bad words, and chats."""
    rng = random.Random(16)
    asked = []
    for number, question in enumerate(rng.sample(load_questions(), NUM_REQUESTS)):
        params: dict[str, Any] = {"max_tokens": rng.randint(8, 40)}
        biased: dict[int, float] = {}
        if number % 2:
            params |= {"temperature": rng.choice([0.7, 1.5, 2.0]), "seed": number, "top_p": 0.95}
            params |= {"top_k": rng.choice([5, 50, 500])}
        else:
            params["temperature"] = 0.0
        if number % 5 == 1:
            params["stop"] = [rng.choice(question.answer.split()), "zz"]
        if number % 5 == 2:
            biased = {token_id: rng.choice([-3.0, 4.0]) for token_id in rng.sample(PLAIN, 3)}
        if number % 5 == 3:
            params |= {"repetition_penalty": 1.2, "presence_penalty": 0.5}
            params |= {"frequency_penalty": 0.25}
        if number % 5 == 4:
            params["bad_words"] = [rng.choice(question.answer.split())]
        asked.append(Asked(question.question, number % 3 == 0, params, biased))
    return asked


ASKED = draw()


@dataclass(frozen=True)
class Answered:
    """Text, and token ids where an interface returns them."""

    text: str
    token_ids: list[int] | None = None


@dataclass(frozen=True)
class Doors:
    server: Server
    gateway: Gateway

    def post(self, path: str, fields: dict[str, Any]) -> str:
        connection = http.client.HTTPConnection(
            self.server.running.http_url.removeprefix("http://"), timeout=60
        )
        try:
            connection.request("POST", path, json.dumps(fields).encode())
            response = connection.getresponse()
            body = response.read().decode()
            assert response.status == 200, (body, fields)
            return body
        finally:
            connection.close()


@pytest.fixture(scope="module")
def doors(pipeline: Server) -> Iterator[Doors]:
    with running_gateway("--triton", pipeline.running.grpc_url) as gateway:
        yield Doors(pipeline, gateway)


@pytest.fixture(scope="module")
def wanted(doors: Doors) -> list[Answered]:
    """What the model answers over gRPC, to one request after the other."""
    return [over_grpc(doors, asked) for asked in ASKED]


def over_grpc(doors: Doors, asked: Asked) -> Answered:
    prompt = asked.messages if asked.is_chat else asked.question
    with Client(doors.server.running.grpc_url, MODEL, timeout=60) as client:
        answer = client.generate(prompt, **asked.all_params).answers[0]
    return Answered(answer.text, list(answer.token_ids))


def over_grpc_stream(doors: Doors, asked: Asked) -> Answered:
    prompt = asked.messages if asked.is_chat else asked.question
    with Client(doors.server.running.grpc_url, MODEL, timeout=60) as client:
        chunks = list(client.stream(prompt, **asked.all_params))
    text = "".join(chunk.text for chunk in chunks)
    return Answered(text, [token for chunk in chunks for token in chunk.token_ids])


def over_generate(doors: Doors, asked: Asked, model: str = MODEL) -> Answered:
    fields = {"exclude_input_in_output": True, "return_output_ids": True}
    fields |= {"sampling_parameters": json.dumps(asked.all_params)}
    body = json.loads(doors.post(f"/v2/models/{model}/generate", asked.prompt | fields))
    return Answered(body["text_output"], np.atleast_1d(body["output_ids"]).tolist())


def over_generate_stream(doors: Doors, asked: Asked, model: str = MODEL) -> Answered:
    fields = {"stream": True, "return_output_ids": True}
    fields |= {"sampling_parameters": json.dumps(asked.all_params)}
    body = doors.post(f"/v2/models/{model}/generate_stream", asked.prompt | fields)
    events = [json.loads(line.removeprefix("data: ")) for line in body.split("\n\n") if line]
    text = "".join(event["text_output"] for event in events)
    parts = (np.atleast_1d(event.get("output_ids", [])).tolist() for event in events)
    return Answered(text, [token for part in parts for token in part])


# Their names in tensorrtllm_backend.
TEXT_NAMES = {"stop": "stop_words"}
ID_NAMES = {"max_tokens": "request_output_len", "top_k": "runtime_top_k", "top_p": "runtime_top_p"}


def there(asked: Asked, names: dict[str, str]) -> dict[str, Any]:
    # Without top_k and top_p decoding is greedy there.
    params = {name: value for name, value in asked.params.items() if value != 0.0}
    return {names.get(name, name): value for name, value in params.items()}


def over_ensemble(doors: Doors, asked: Asked, model: str = "ensemble") -> Answered:
    fields = {"exclude_input_in_output": True, **there(asked, TEXT_NAMES)}
    if asked.biased:
        fields["embedding_bias_words"] = [TOKENIZER.decode([token]) for token in asked.biased]
        fields["embedding_bias_weights"] = list(asked.biased.values())
    prompt = TOKENIZER.decode(prompt_ids(doors, asked), skip_special_tokens=False)
    body = doors.post(f"/v2/models/{model}/generate", {"text_input": prompt, **fields})
    return Answered(json.loads(body)["text_output"])


def over_tensorrt_llm(doors: Doors, asked: Asked) -> Answered:
    fields = {"exclude_input_in_output": True, **there(asked, ID_NAMES)}
    words = {name: fields.pop(name) for name in ("stop", "bad_words") if name in fields}
    if words:  # they are token ids there; as text, they belong to the LLM API
        return over_llm_api(doors, asked)
    if asked.biased:
        bias = [asked.biased.get(token_id, 0.0) for token_id in range(VOCABULARY)]
        fields["embedding_bias"] = bias
    fields["input_ids"] = prompt_ids(doors, asked)
    body = json.loads(doors.post("/v2/models/tensorrt_llm/generate", fields))
    token_ids = np.atleast_1d(body["output_ids"]).tolist()
    return Answered(TOKENIZER.decode(token_ids), token_ids)


def over_llm_api(doors: Doors, asked: Asked) -> Answered:
    fields = {f"sampling_param_{name}": value for name, value in there(asked, {}).items()}
    for name in ("bad_words", "repetition_penalty"):  # names of tensorrt_llm's own
        if f"sampling_param_{name}" in fields:
            fields[name] = fields.pop(f"sampling_param_{name}")
    prompt = TOKENIZER.decode(prompt_ids(doors, asked), skip_special_tokens=False)
    body = doors.post("/v2/models/tensorrt_llm/generate", {"text_input": prompt, **fields})
    return Answered(json.loads(body)["text_output"])


def prompt_ids(doors: Doors, asked: Asked) -> list[int]:
    with Client(doors.server.running.grpc_url, MODEL, timeout=60) as client:
        return list(client.tokenize(asked.messages if asked.is_chat else asked.question))


OF_OPENAI = (
    *("max_tokens", "temperature", "top_p", "seed", "stop", "logit_bias"),
    *("presence_penalty", "frequency_penalty"),
)


def openai_params(asked: Asked) -> dict[str, Any]:
    params = asked.all_params
    more = {name: value for name, value in params.items() if name not in OF_OPENAI}
    return {name: params[name] for name in params if name in OF_OPENAI} | {"extra_body": more}


def over_completions(doors: Doors, asked: Asked) -> Answered:
    prompt = prompt_ids(doors, asked) if asked.is_chat else asked.question
    with doors.gateway.sdk() as api:
        answer = api.completions.create(model=MODEL, prompt=prompt, **openai_params(asked))
    return Answered(answer.choices[0].text)


def over_chat_completions(doors: Doors, asked: Asked) -> Answered:
    with doors.gateway.sdk() as api:
        answer = api.chat.completions.create(
            model=MODEL,
            messages=asked.messages,  # type: ignore[arg-type]
            **openai_params(asked),
        )
    assert isinstance(answer.choices[0].message.content, str)
    return Answered(answer.choices[0].message.content)


Door = Callable[[Doors, Asked], Answered]
DOORS: dict[str, Door] = {
    "gRPC stream": over_grpc_stream,
    "generate": over_generate,
    "generate_stream": over_generate_stream,
    "llm": partial(over_generate, model="llm"),
    "llm_bls": partial(over_generate_stream, model="llm_bls"),
    "ensemble": over_ensemble,
    "tensorrt_llm_bls": partial(over_ensemble, model="tensorrt_llm_bls"),
    "tensorrt_llm": over_tensorrt_llm,
    "completions": over_completions,
    "chat completions": over_chat_completions,
}


@pytest.mark.parametrize("door", DOORS)
def test_every_interface_gives_the_same_tokens(
    doors: Doors, wanted: list[Answered], door: str
) -> None:
    only_chats = door == "chat completions"
    pairs = [
        (asked, right)
        for asked, right in zip(ASKED, wanted, strict=True)
        if asked.is_chat or not only_chats
    ]
    # Several streams of a program can hang or crash it; see docs/protocols.md.
    with ThreadPoolExecutor(1 if "bls" in door else 8) as pool:
        found = list(pool.map(partial(DOORS[door], doors), [asked for asked, _ in pairs]))
    for (asked, right), answer in zip(pairs, found, strict=True):
        assert answer.text == right.text, asked
        assert answer.token_ids in (None, right.token_ids), asked
    assert len({answer.text for answer in wanted}) > NUM_REQUESTS // 2
