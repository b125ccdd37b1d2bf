"""Constrained answers over Triton's own protocols."""

from __future__ import annotations

import json
from typing import Any

import pytest
from constraint_forms import forms_of
from demo_server import MODEL, Server
from paged_client import Client
from valid_json import validate

pytestmark = pytest.mark.server

SCHEMA = {
    "type": "object",
    "properties": {
        "module": {"type": "string", "maxLength": 10},
        "calls": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 8},
                    "count": {"type": "integer", "minimum": 0, "maximum": 1000},
                },
                "required": ["name", "count"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 1,
        },
    },
    "required": ["module", "calls"],
    "additionalProperties": False,
}
FORMS = forms_of(SCHEMA)
SAMPLED = {"temperature": 1.0, "seed": 11, "max_tokens": 600}


def generate(client: Client, prompt: str = "Answer in JSON:", **params: Any) -> Any:
    return client.generate(prompt, **{**SAMPLED, **params})


@pytest.fixture(scope="module")
def document(server: Server) -> str:
    """The answer to `generate` under the schema."""
    with Client(server.running.grpc_url, MODEL) as client:
        answer = generate(client, structured_outputs={"json": SCHEMA})
    assert answer.finish_reason == "stop"
    validate(json.loads(answer.text), SCHEMA)
    return str(answer.text)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_constrains_the_answer_alike(client: Client, document: str, form: str) -> None:
    assert generate(client, **FORMS[form]).text == document


@pytest.mark.parametrize("form", FORMS)
def test_each_form_in_the_parameters_of_a_plain_request(
    server: Server, document: str, form: str
) -> None:
    fields = {"text_input": "Answer in JSON:", "exclude_input_in_output": True, **SAMPLED}
    constraint = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in FORMS[form].items()
        if value is not None  # Triton has no parameter of this kind
    }
    status, body = server.post("generate", fields | constraint)
    assert (status, json.loads(body).get("text_output")) == (200, document), body


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_a_constraint_in_the_parameters_of_a_plain_request(server: Server, verb: str) -> None:
    fields = {
        "text_input": "Is len a builtin?",
        "stream": verb == "generate_stream",
        "structured_outputs": json.dumps({"choice": ["certainly", "certainly not"]}),
    }
    status, body = server.post(verb, fields)
    assert status == 200
    lines = [body] if verb == "generate" else [x[6:] for x in body.splitlines() if x]
    text = "".join(json.loads(line)["text_output"] for line in lines)
    assert text.removeprefix(fields["text_input"]) in ("certainly", "certainly not")


def test_several_answers_and_a_stream(client: Client) -> None:
    answer = generate(client, structured_outputs={"regex": "[a-f]{4}-[0-9]{2}"}, n=4)
    assert len({part.text for part in answer.answers}) > 1
    for part in answer.answers:
        assert len(part.text) == 7 and part.text[4] == "-"
    chunks = list(client.stream("x", structured_outputs={"regex": "(ab){20}"}, **SAMPLED))
    assert "".join(chunk.text for chunk in chunks) == "ab" * 20
    assert chunks[-1].finish_reason == "stop"
