"""An encoder behind a real server: our tensors, vllm_backend's, and the gateway."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from embedding_models import expected, older_pooling, write_modules
from encoders import make_encoder, write_wordpiece
from gateways import MODEL, Gateway, running_gateway
from paged_client import Client, InvalidRequest
from transformers import AutoTokenizer, PreTrainedModel

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server

pytestmark = pytest.mark.server

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
def encoder(
    folder: Path, wanted: list[torch.Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("encoder")
    options = {"model": str(folder), "dtype": "float32"}
    write_model_repository(repository, MODEL, options, instances=1)
    with start_server(repository) as running:
        yield running


@pytest.fixture(scope="module")
def door(encoder: RunningServer) -> Iterator[Gateway]:
    with running_gateway("--triton", encoder.grpc_url) as gateway:
        yield gateway


def http_post(server: RunningServer, fields: dict[str, str]) -> dict[str, str]:
    """The answer of Triton's HTTP front end."""
    url = f"{server.http_url}/v2/models/{MODEL}/generate"
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(fields).encode()), timeout=60
    ) as answer:
        values: dict[str, str] = json.load(answer)
    return values


def confirm(found: object, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(
        torch.tensor(np.asarray(found), dtype=torch.float32), wanted, rtol=0, atol=1e-5
    )


def test_every_wire_gives_the_embeddings_of_transformers(encoder, door, wanted):
    with Client(encoder.grpc_url, MODEL) as client:
        assert (client.info().max_model_len, client.info().embedding_size) == (96, 64)
        for text, vector in zip(TEXTS, wanted, strict=True):
            confirm(client.embed(text).vector, vector)
    fields = {"embedding_request": json.dumps({"input": TEXTS[0]})}
    confirm(json.loads(http_post(encoder, fields)["text_output"]), wanted[0])
    answer = door.post("/v1/embeddings", {"input": TEXTS})
    for item, vector in zip(answer.json["data"], wanted, strict=True):
        confirm(item["embedding"], vector)
    answer = door.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})
    scores = [item["score"] for item in answer.json["data"]]
    assert scores == pytest.approx([float(wanted[0] @ other) for other in wanted[1:]], abs=1e-5)


def test_bad_input_costs_only_its_caller(encoder, door, wanted):
    with Client(encoder.grpc_url, MODEL) as client:
        with pytest.raises(InvalidRequest, match="task: the model makes embeddings"):
            client.generate("a")
        with pytest.raises(InvalidRequest, match="at most 96 tokens: max_model_len"):
            client.embed("a " * 95)
        confirm(client.embed(TEXTS[0]).vector, wanted[0])
    answer = door.post("/v1/embeddings", {"input": ["a", "a " * 95]})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert answer.error["param"] == "input[1]"
