"""Embeddings over a real server: our tensors and vllm_backend's, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from demo_server import MODEL, TIMEOUT_S, Server
from embedding_models import expected
from paged_client import Client, InvalidRequest, RequestCancelled, RequestTimeout
from transformers import AutoModelForCausalLM, PreTrainedModel

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.server

TEXT = "What does os.path.join do?"


@pytest.fixture
def client(embedder: Server) -> Iterator[Client]:
    with Client(embedder.running.grpc_url, MODEL, timeout=TIMEOUT_S) as client:
        yield client
    embedder.wait_for("kv_blocks_used", 0)


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
    return model


def confirm(oracle: PreTrainedModel, found: Any, text: str, dimensions: int | None = None) -> None:
    wanted = expected(oracle, load_tokenizer(MODEL_DIR).encode(text), "mean", dimensions=dimensions)
    torch.testing.assert_close(
        torch.tensor(np.asarray(found), dtype=torch.float32), wanted, rtol=0, atol=1e-5
    )


def test_texts_token_ids_and_chats(client, oracle):
    found = client.embed(TEXT)
    confirm(oracle, found.vector, TEXT)
    ids = client.tokenize(TEXT)
    assert found.num_input_tokens == len(ids)
    assert (client.embed(ids).vector == found.vector).all()
    chat = client.embed([{"role": "user", "content": TEXT}])
    assert chat.num_input_tokens > len(ids)
    assert client.info().embedding_size == len(chat.vector) == 192


def test_dimensions_and_parameters_of_all_requests(client, oracle):
    found = client.embed(TEXT, dimensions=5, priority=-1, tenant="a", timeout_s=30, cache_salt="x")
    confirm(oracle, found.vector, TEXT, dimensions=5)


def test_many_at_once_are_those_of_one_after_the_other(client):
    texts = [" ".join(["word", str(index)] * (1 + index % 40)) for index in range(60)]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(client.embed, texts))
    for text, found in zip(texts, together, strict=True):
        assert (client.embed(text).vector == found.vector).all()


def test_the_tensors_of_generate(embedder, oracle):
    fields = {"task": "embed", "text_input": TEXT, "dimensions": 3, "pass_through": "x"}
    status, body = embedder.post("generate", fields | {"return_num_input_tokens": True})
    answer = json.loads(body)
    assert (status, answer["pass_through"]) == (200, "x")
    assert "text_output" not in answer
    confirm(oracle, answer["embedding"], TEXT, dimensions=3)


@pytest.mark.parametrize("dimensions", [None, 4])
def test_vllm_backends_tensor(embedder, oracle, dimensions):
    """Triton's OpenAI frontend sends it."""
    request: dict[str, Any] = {"input": TEXT}
    if dimensions is not None:
        request["pooling_params"] = {"dimensions": [dimensions]}
    ids = load_tokenizer(MODEL_DIR).encode(TEXT)
    counts = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    for prompt in (TEXT, ids):
        fields = {"embedding_request": json.dumps({**request, "input": prompt}), **counts}
        status, body = embedder.post("generate", fields)
        answer = json.loads(body)
        assert status == 200, body
        assert (answer["num_input_tokens"], answer["num_output_tokens"]) == (len(ids), 0)
        confirm(oracle, json.loads(answer["text_output"]), TEXT, dimensions)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_input": "x"}, "task: the model makes embeddings; it does not generate text"),
        ({"task": "embed"}, "text_input: is missing"),
        ({"task": "embed", "text_input": ""}, "prompt: is empty"),
        ({"task": "embed", "input_ids": [2048]}, "prompt: token ids must be from 0 to 2047"),
        ({"task": "embed", "text_input": "a b " * 2000}, "at most 2048 tokens: max_model_len"),
        ({"task": "embed", "text_input": "x", "dimensions": 0}, "dimensions: must be an integer"),
        ({"task": "embed", "text_input": "x", "dimensions": 193}, "model's embeddings (192)"),
        ({"task": "embed", "text_input": "x", "dimensions": "many"}, "dimensions: must be"),
        ({"task": "embed", "text_input": "x", "temperature": 0.5}, "temperature: is not known"),
        ({"task": "embed", "text_input": "x", "stream": True}, "stream: cannot be used"),
        ({"task": "embed", "text_input": "x", "return_logprobs": True}, "return_logprobs: cannot"),
        ({"task": "embed", "text_input": "x", "tools": "[]"}, "tools: cannot be used"),
        (
            {"task": "embed", "text_input": "x", "thinking_token_budget": 3},
            "thinking_token_budget: cannot be used",
        ),
        ({"embedding_request": "{}"}, "embedding_request: input must be a string or token ids"),
        ({"embedding_request": "[]"}, "embedding_request: must be a JSON object"),
        ({"embedding_request": '{"input": ["a"]}'}, "input must be a string or token ids"),
        ({"embedding_request": '{"input": "a", "user": "b"}'}, "user is not known"),
        (
            {"embedding_request": '{"input": "a", "pooling_params": {"dimensions": [0]}}'},
            "dimensions: must be an integer from 1",
        ),
        (
            {"embedding_request": '{"input": "a", "pooling_params": [1]}'},
            "pooling_params must be an object",
        ),
        ({"embedding_request": '{"input": "a"}', "text_input": "x"}, "text_input: cannot be used"),
        ({"embedding_request": '{"input": "a"}', "task": "generate"}, "task: must be embed"),
    ],
)
def test_wrong_requests_are_refused_by_name(embedder, fields, message):
    status, body = embedder.post("generate", fields)
    assert status == 400, body
    assert message in json.loads(body)["error"]


def test_a_request_can_be_canceled_by_its_name(client, embedder):
    """It waits behind long prompts, so that it cannot end before."""
    with ThreadPoolExecutor(9) as pool:
        long = [pool.submit(client.embed, [7] * 2000) for _ in range(8)]
        embedder.wait_for("num_requests_running", 1)
        fields = {"task": "embed", "text_input": "x", "call_id": "one", "priority": 9}
        canceled = pool.submit(embedder.post, "generate", fields)
        while not canceled.done():  # the first cancellations may come before the request
            embedder.post("generate", {"task": "cancel", "call_id": "one"})
        status, body = canceled.result()
        assert (status, json.loads(body)["error"]) == (400, "Request was cancelled")
        assert len({call.result().vector.tobytes() for call in long}) == 1


def test_deadlines_and_cancellation_by_the_connection(client, embedder):
    """The requests wait behind long prompts, so that they cannot end before."""
    uncached = [[3 + place * step % 1500 for place in range(2000)] for step in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        long = [pool.submit(client.embed, prompt) for prompt in uncached]
        embedder.wait_for("num_requests_waiting", 4)
        with pytest.raises(RequestTimeout):
            client.embed("x", timeout_s=0.001, priority=9)
        with pytest.raises((RequestTimeout, RequestCancelled)):
            client.embed("x", timeout=0.001, priority=9)
        assert len({call.result().vector.tobytes() for call in long}) == 8


def test_a_model_that_generates_makes_no_embeddings(server):
    with Client(server.running.grpc_url, MODEL) as client:
        with pytest.raises(InvalidRequest, match="task: the model generates text"):
            client.embed("x")
        assert client.info().embedding_size == 0
