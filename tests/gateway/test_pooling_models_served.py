"""An encoder and a reranker behind a real server: our tensors, vllm_backend's, the gateway."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedding_models import expected, older_pooling, write_modules
from encoders import make_encoder, write_wordpiece
from gateways import MODEL, Gateway, running_gateway
from paged_client import Client, InvalidRequest
from rerankers import DOCUMENTS, QUERY, classifier_scores, make_reranker
from transformers import AutoTokenizer, PreTrainedModel

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server

pytestmark = pytest.mark.server

RERANKER = "reranker"
TEXTS = ["What do cats eat?", "dogs", "a b c. " * 12, "dogs"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bert")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[torch.Tensor]:
    """The embeddings of the texts by transformers."""
    model: PreTrainedModel = make_encoder("bert", folder)
    write_modules(folder, older_pooling("mean", 64))
    write_wordpiece(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [expected(model, tokenizer(text)["input_ids"], "mean") for text in TEXTS]


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A reranker, and its scores by transformers."""
    folder = tmp_path_factory.mktemp("reranker")
    model = make_reranker("qwen3", folder)
    return folder, torch.tensor(classifier_scores(model, folder)).sigmoid().tolist()


@pytest.fixture(scope="module")
def models(
    folder: Path,
    wanted: list[torch.Tensor],
    scores: tuple[Path, list[float]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    for name, place in ((MODEL, folder), (RERANKER, scores[0])):
        options = {"model": str(place), "dtype": "float32", "max_model_len": 96}
        write_model_repository(repository, name, options, instances=1)
    with start_server(repository) as running:
        yield running


@pytest.fixture(scope="module")
def door(models: RunningServer) -> Iterator[Gateway]:
    with running_gateway("--triton", models.grpc_url) as gateway:
        yield gateway


def http_post(server: RunningServer, fields: dict[str, Any], model: str = MODEL) -> dict[str, Any]:
    """The answer of Triton's HTTP front end."""
    url = f"{server.http_url}/v2/models/{model}/generate"
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(fields).encode()), timeout=60
    ) as answer:
        values: dict[str, Any] = json.load(answer)
    return values


def confirm(found: object, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(
        torch.tensor(np.asarray(found), dtype=torch.float32), wanted, rtol=0, atol=1e-5
    )


def test_every_wire_gives_the_embeddings_of_transformers(models, door, wanted):
    with Client(models.grpc_url, MODEL) as client:
        assert (client.info().max_model_len, client.info().embedding_size) == (96, 64)
        for text, vector in zip(TEXTS, wanted, strict=True):
            confirm(client.embed(text).vector, vector)
    fields = {"embedding_request": json.dumps({"input": TEXTS[0]})}
    confirm(json.loads(http_post(models, fields)["text_output"]), wanted[0])
    answer = door.post("/v1/embeddings", {"model": MODEL, "input": TEXTS})
    for item, vector in zip(answer.json["data"], wanted, strict=True):
        confirm(item["embedding"], vector)
    answer = door.post("/v1/score", {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS[1:]})
    scores = [item["score"] for item in answer.json["data"]]
    assert scores == pytest.approx([float(wanted[0] @ other) for other in wanted[1:]], abs=1e-5)


def test_bad_input_costs_only_its_caller(models, door, wanted):
    with Client(models.grpc_url, MODEL) as client:
        with pytest.raises(InvalidRequest, match="task: the model makes embeddings"):
            client.generate("a")
        with pytest.raises(InvalidRequest, match="at most 96 tokens: max_model_len"):
            client.embed("a " * 95)
        confirm(client.embed(TEXTS[0]).vector, wanted[0])
    answer = door.post("/v1/embeddings", {"model": MODEL, "input": ["a", "a " * 95]})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["param"] == "input[1]"


def test_a_reranker_scores_on_every_wire(models, door, scores):
    _, wanted = scores
    with Client(models.grpc_url, RERANKER) as client:
        assert (client.info().scores_pairs, client.info().embedding_size) == (True, 0)
        found = [client.score(QUERY, document, priority=1) for document in DOCUMENTS]
    assert [item.value for item in found] == pytest.approx(wanted, abs=1e-5)
    fields = {"task": "score", "text_input": QUERY, "text_pair": DOCUMENTS[0]}
    assert http_post(models, fields, RERANKER)["score"] == pytest.approx(wanted[0], abs=1e-5)
    body = {"model": RERANKER, "text_1": QUERY, "text_2": DOCUMENTS}
    answer = door.post("/v1/score", body).json
    assert [item["score"] for item in answer["data"]] == pytest.approx(wanted, abs=1e-5)
    assert answer["usage"]["total_tokens"] == sum(item.num_input_tokens for item in found)
    body = {"model": RERANKER, "query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    results = door.post("/v1/rerank", body).json["results"]
    best = sorted(range(len(wanted)), key=lambda index: -wanted[index])[:2]
    assert [item["index"] for item in results] == best
    assert results[0]["relevance_score"] == pytest.approx(wanted[best[0]], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        ("/v1/completions", {"prompt": "a"}, "model", "pairs of texts; it does not generate text"),
        ("/v1/embeddings", {"input": "a"}, "model", "pairs of texts; it makes no embeddings"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "a " * 99]}, "text_2[1]", "at most 96"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "must have 1"),
        (
            "/v1/rerank",
            {"query": "a", "documents": "b", "add_special_tokens": False},
            "add_special_tokens",
            "must be true for a reranker",
        ),
    ],
)
def test_what_a_reranker_refuses(door, path, fields, param, message):
    answer = door.post(path, {"model": RERANKER, **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        (RERANKER, {"task": "score", "text_input": "a"}, "text_pair: is missing"),
        (RERANKER, {"task": "score", "text_pair": "a"}, "text_input: is missing"),
        (
            RERANKER,
            {"task": "score", "text_input": "a", "text_pair": "b", "input_ids": [1]},
            "input_ids: cannot be used with scores",
        ),
        (
            RERANKER,
            {"task": "score", "text_input": "a", "text_pair": "b", "dimensions": 3},
            "dimensions: cannot be used with scores",
        ),
        (RERANKER, {"text_input": "a", "text_pair": "b"}, "it does not generate text"),
        (
            MODEL,
            {"task": "score", "text_input": "a", "text_pair": "b"},
            "task: the model makes embeddings; it does not score pairs of texts",
        ),
        (
            MODEL,
            {"task": "embed", "text_input": "a", "text_pair": "b"},
            "text_pair: cannot be used with embeddings",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(models, model, fields, message):
    with pytest.raises(urllib.error.HTTPError) as caught:
        http_post(models, fields, model)
    assert caught.value.code == 400
    assert message in json.load(caught.value)["error"]
