"""Clients know models by names that Triton's models cannot have, and by several names."""

from __future__ import annotations

import pytest
from gateways import MODEL, running_gateway
from paged_client.gateway.served_names import ServedNames, read_served_names

NAMES = ("HuggingFaceTB/SmolLM2-135M", "gpt-4o:latest")


@pytest.fixture(scope="module")
def named(server):
    flags = ("--served-model-name", *NAMES)
    with running_gateway("--triton", server.running.grpc_url, *flags) as gateway:
        yield gateway


@pytest.mark.server
def test_a_model_has_the_names_that_the_operator_gives(named):
    with named.sdk() as api:
        assert [model.id for model in api.models.list()] == list(NAMES)
        for name in (*NAMES, MODEL):
            assert api.models.retrieve(name).id == name
            answer = api.completions.create(model=name, prompt="x", max_tokens=1)
            assert answer.model == NAMES[0]
    for path in (f"/v1/models/{NAMES[0]}", f"/v1/models/{NAMES[0].replace('/', '%2F')}"):
        card = named.get(path).json
        assert (card["id"], card["object"]) == (NAMES[0], "model")
        assert card["max_model_len"] > 0


@pytest.mark.server
def test_every_route_answers_with_the_first_name(named):
    chat = [{"role": "user", "content": "x"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": chat, "max_tokens": 1}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1}),
        ("/v1/messages", {"messages": chat, "max_tokens": 1}),
    ):
        for model in ({}, {"model": NAMES[1]}, {"model": MODEL}):
            answer = named.post(path, body | model)
            assert (answer.status, answer.json["model"]) == (200, NAMES[0])
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]})):
        assert named.post(path, body | {"model": NAMES[0]}).status == 200


@pytest.mark.server
def test_errors_have_the_names_that_clients_know(named):
    for answer in (
        named.post("/v1/completions", {"model": "org/other", "prompt": "x"}),
        named.get("/v1/models/org/other"),
    ):
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert f"'org/other' is not known; known: {', '.join(NAMES)}" in answer.error["message"]


def test_names_of_one_of_several_models():
    names = ServedNames(read_served_names(["org/a=first", "b=second", "c=first", "d"]))
    models = ["first", "second", "third"]
    assert names.shown(models) == {
        "third": "third", "org/a": "first", "b": "second", "c": "first",
    }  # fmt: skip
    assert [names.first(model, models) for model in models] == ["org/a", "b", "third"]
    assert names.model("first", models) == names.model("c", models) == "first"
    assert names.model("d", models) is None  # stands for the only model
    assert names.shown(["second"]) == {"b": "second", "d": "second"}
    assert names.shown([]) == {}
    with pytest.raises(ValueError, match="given twice"):
        read_served_names(["a=x", "a=y"])
    for entry in ("", "=x", "a=", "a b", "a=x/y", "a=b=c", "\u00e9", "x" * 257):
        with pytest.raises(ValueError, match="must be NAME or NAME=MODEL"):
            read_served_names([entry])
