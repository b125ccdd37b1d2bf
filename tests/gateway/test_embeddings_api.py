"""Embeddings, scores and rankings through a real gateway and a real server."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import numpy as np
import openai
import pytest
from demo_server import Server
from documented_commands import answer_of, curl_commands
from gateways import MODEL, Gateway, running_gateway
from paged_client import Client

pytestmark = pytest.mark.server

TEXTS = ["What does len do?", "import os", "x"]


@pytest.fixture(scope="module")
def door(embedder: Server) -> Iterator[Gateway]:
    with running_gateway("--triton", embedder.running.grpc_url) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def sdk(door: Gateway) -> Iterator[openai.OpenAI]:
    with door.sdk() as api:
        yield api


@pytest.fixture(scope="module")
def vectors(embedder: Server) -> list[list[float]]:
    with Client(embedder.running.grpc_url, MODEL) as client:
        return [client.embed(text).vector.tolist() for text in TEXTS]


def test_floats_and_base64_are_the_same_numbers(sdk, door, vectors):
    floats = sdk.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    assert [item.embedding for item in floats.data] == vectors
    assert [item.index for item in floats.data] == [0, 1, 2]
    assert floats.usage.prompt_tokens == floats.usage.total_tokens > 3
    body = {"input": TEXTS, "encoding_format": "base64"}
    coded = [item["embedding"] for item in door.post("/v1/embeddings", body).json["data"]]
    decoded = [np.frombuffer(base64.b64decode(text), "<f4").tolist() for text in coded]
    assert decoded == vectors
    # The SDK asks for base64 if it is not told.
    assert [i.embedding for i in sdk.embeddings.create(model=MODEL, input=TEXTS).data] == vectors


def test_a_text_token_ids_and_lists_of_token_ids(sdk, embedder, vectors):
    with Client(embedder.running.grpc_url, MODEL) as client:
        ids = [list(client.tokenize(text)) for text in TEXTS]
    for prompt in (TEXTS[0], ids[0], [ids[0]]):
        (item,) = sdk.embeddings.create(model=MODEL, input=prompt).data
        assert item.embedding == vectors[0]
    assert [i.embedding for i in sdk.embeddings.create(model=MODEL, input=ids).data] == vectors


def test_dimensions(sdk, vectors):
    (item,) = sdk.embeddings.create(model=MODEL, input=TEXTS[0], dimensions=5).data
    wanted = np.array(vectors[0][:5])
    np.testing.assert_allclose(item.embedding, wanted / np.linalg.norm(wanted), atol=1e-6)


def test_a_thousand_short_texts_in_one_request(sdk):
    texts = [f"text {index % 50}" for index in range(1000)]
    found = sdk.embeddings.create(model=MODEL, input=texts)
    assert [item.index for item in found.data] == list(range(1000))
    distinct = {text: tuple(item.embedding) for text, item in zip(texts, found.data, strict=True)}
    for text, item in zip(texts, found.data, strict=True):
        assert tuple(item.embedding) == distinct[text]
    assert len(set(distinct.values())) == 50


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({}, "input", "input: is missing"),
        ({"input": []}, "input", "must be a text, token ids, or a list of either"),
        ({"input": ["a", [1]]}, "input", "must be a text, token ids, or a list of either"),
        ({"input": ["a"] * 2049}, "input", "at most 2048 prompts, got 2049"),
        ({"input": ["a", ""]}, "input[1]", "is empty"),
        ({"input": ""}, "input", "is empty"),
        ({"input": [2048]}, "input", "token ids must be from 0 to 2047"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "dimensions": 193}, "dimensions", "model's embeddings (192), got 193"),
        ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens", "not supported"),
        ({"input": "a", "temperature": 0}, "temperature", "is not known"),
    ],
)
def test_wrong_requests_are_refused_by_name(door, fields, param, message):
    answer = door.post("/v1/embeddings", fields)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]


def test_a_text_that_is_too_long_has_openais_code(door):
    answer = door.post("/v1/embeddings", {"input": ["a", "b " * 3000]})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["param"] == "input[1]"
    assert "2048 tokens" in answer.error["message"]


def test_scores_are_cosine_similarities(door, vectors):
    a, b, c = map(np.array, vectors)
    answer = door.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json
    assert [item["score"] for item in answer["data"]] == pytest.approx([1, a @ b, a @ c], abs=1e-6)
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    answer = door.post("/v1/score", {"text_1": TEXTS[:2], "text_2": TEXTS[1:]}).json
    assert [item["score"] for item in answer["data"]] == pytest.approx([a @ b, b @ c], abs=1e-6)
    assert answer["usage"]["total_tokens"] > 3
    refused = door.post("/v1/score", {"text_1": TEXTS[:2], "text_2": TEXTS})
    assert (refused.status, refused.error["param"]) == (400, "text_1")
    refused = door.post("/v1/score", {"text_1": "a", "text_2": ["b", ""]})
    assert (refused.status, refused.error["param"]) == (400, "text_2[1]")


def test_documents_are_ranked(door, vectors):
    a, b, c = map(np.array, vectors)
    body = {"query": TEXTS[0], "documents": TEXTS}
    answer = door.post("/v1/rerank", body).json
    assert answer["meta"]["tokens"]["input_tokens"] == answer["usage"]["total_tokens"] > 3
    results = answer["results"]
    by_index = {item["index"]: item["relevance_score"] for item in results}
    assert [by_index[i] for i in range(3)] == pytest.approx([1, a @ b, a @ c], abs=1e-6)
    scores = [item["relevance_score"] for item in results]
    assert scores == sorted(scores, reverse=True)
    assert results[0] == {
        "index": 0, "document": {"text": TEXTS[0]}, "relevance_score": pytest.approx(1),
    }  # fmt: skip
    fewer = {**body, "top_n": 1, "return_documents": False}
    (top,) = door.post("/v1/rerank", fewer).json["results"]
    assert top.keys() == {"index", "relevance_score"}
    refused = door.post("/v1/rerank", {**body, "documents": []})
    assert (refused.status, refused.error["param"]) == (400, "documents")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_clients_of_others_rank_documents_in_their_forms(door, path):
    body = {"query": TEXTS[0], "documents": TEXTS}
    wanted = door.post("/v1/rerank", body).json["results"]
    forms = (
        [{"text": text} for text in TEXTS],
        [TEXTS[0], {"text": TEXTS[1]}, {"content": TEXTS[2]}],
        [{"content": [{"type": "text", "text": text}]} for text in TEXTS],
    )
    for documents in forms:
        more = {"top_n": 100, "rank_fields": ["text"], "max_tokens_per_doc": 0, "user": "a"}
        answer = door.post(path, {**body, "documents": documents, **more}).json
        assert answer["results"] == wanted
        assert answer["meta"]["api_version"]["version"] == ("2" if "v2" in path else "1")
    query = {"text": TEXTS[0]}
    (one,) = door.post(path, {"query": query, "documents": {"text": TEXTS[0]}}).json["results"]
    assert one["document"] == {"text": TEXTS[0]}
    for number, wrong in enumerate(
        (1, {"text": 1}, {"text": "a", "title": "b"}, {"content": [{"type": "image_url"}]}, {})
    ):
        documents = ["a"] * number + [wrong]
        refused = door.post(path, {"query": "a", "documents": documents})
        assert (refused.status, refused.error["param"]) == (400, f"documents[{number}]")
        assert 'must be a text, {"text": TEXT}' in refused.error["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_take_all_names_of_vllm(door, path):
    wanted = door.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS}).json["data"]
    pairs = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"))
    for first, second in (*pairs, ("data_1", "data_2")):
        for documents in (TEXTS, [{"content": text} for text in TEXTS]):
            answer = door.post(path, {first: TEXTS[0], second: documents})
            assert answer.json["data"] == wanted
        refused = door.post(path, {first: "a", second: ["b", ""]})
        assert (refused.status, refused.error["param"]) == (400, f"{second}[1]")
        refused = door.post(path, {first: ["a", "a"], second: ["b"] * 3})
        assert (refused.status, refused.error["param"]) == (400, first)
    for fields, param in (
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"documents": "a"}, "queries"),
        ({"queries": "a", "text_2": "b"}, "text_1"),
        ({"text_1": "a", "text_2": "b", "items": "c"}, "text_2"),
    ):
        refused = door.post(path, fields)
        assert (refused.status, refused.error["param"]) == (400, param)
        assert "queries and documents" in refused.error["message"]


def test_pooling_returns_embeddings(door, vectors):
    body = {"model": MODEL, "input": TEXTS}
    answer = door.post("/pooling", {**body, "task": "embed"}).json
    assert answer["id"].startswith("pool-") and answer["usage"]["prompt_tokens"] > 3
    assert [item["data"] for item in answer["data"]] == vectors
    assert {item["object"] for item in answer["data"]} == {"pooling"}
    refused = door.post("/pooling", {**body, "task": "token_embed"})
    assert (refused.status, refused.error["param"]) == (400, "task")


def test_a_model_does_one_or_the_other(door, gateway):
    answer = door.post("/v1/completions", {"prompt": "a"})
    assert (answer.status, answer.error["param"]) == (400, "model")
    assert answer.error["message"] == (
        "model: the model makes embeddings; it does not generate text"
    )
    for path, fields in (
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        answer = gateway.post(path, fields)
        assert (answer.status, answer.error["param"]) == (400, "model")
        assert answer.error["message"] == "model: the model generates text; it makes no embeddings"


def test_with_api_keys_the_tenant_is_that_of_the_key(embedder):
    with running_gateway("--triton", embedder.running.grpc_url, keys="a secret") as gateway:
        body = {"input": "a"}
        assert gateway.post("/v1/embeddings", body).status == 401
        headers = {"Authorization": "Bearer secret"}
        assert gateway.post("/v1/embeddings", body, **headers).status == 200
        refused = gateway.post("/v1/embeddings", {**body, "tenant": "b"}, **headers)
        assert (refused.status, refused.error["param"]) == (400, "tenant")


def test_the_routes_are_a_group_that_can_be_restricted(embedder):
    restricted = ("--openai-restricted-api", "embedding", "key", "secret")
    with running_gateway("--triton", embedder.running.grpc_url, *restricted) as gateway:
        paths = ("/v1/embeddings", "/v1/score", "/v1/rerank", "/score", "/rerank", "/v2/rerank")
        for path in (*paths, "/pooling"):
            assert gateway.post(path, {"input": "a"}).status == 401
        assert gateway.post("/v1/embeddings", {"input": "a"}, key="secret").status == 200
        document = json.loads(gateway.get("/openapi.json").body)
        assert "requestBody" in document["paths"]["/v1/rerank"]["post"]
        assert "requestBody" in document["paths"]["/rerank"]["post"]


def test_the_curl_commands_of_the_documents_are_answered(embedder, door):
    found = [command for command in curl_commands() if "embed" in command]
    assert len(found) >= 2
    for command in found:
        answer = json.loads(answer_of(command, embedder.running.http_url, door.address))
        assert answer.get("embedding") or len(answer["data"]) == 2
