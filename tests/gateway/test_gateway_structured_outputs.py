"""Constrained answers through the gateway, asked with OpenAI's own client."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from constraint_forms import forms_of
from gateways import MODEL
from pydantic import BaseModel

pytestmark = pytest.mark.server


class Module(BaseModel):
    name: str
    functions: list[str]


class Builtin(BaseModel):
    kind: Literal["function", "class", "constant"]
    is_callable: bool


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "functions": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "functions"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "module", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Name a module."}]
OPTIONS = {"temperature": 1.0, "seed": 5, "max_tokens": 1500}


def chat(api, **options):
    return api.chat.completions.create(model=MODEL, messages=MESSAGES, **{**OPTIONS, **options})


def test_a_chat_is_a_document_of_the_schema(api):
    choice = chat(api, response_format=FORMAT).choices[0]
    assert choice.finish_reason == "stop"
    Module.model_validate_json(choice.message.content)


def test_a_stream_is_the_same_document(api):
    whole = chat(api, response_format=FORMAT).choices[0].message.content
    chunks = list(chat(api, response_format=FORMAT, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole


def test_the_client_s_own_classes(api):
    answer = api.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Builtin, **OPTIONS
    )
    assert isinstance(answer.choices[0].message.parsed, Builtin)


def test_completions_take_the_same_formats(api):
    for extra in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}):
        answer = api.completions.create(model=MODEL, prompt="x", extra_body=extra, **OPTIONS)
        assert answer.choices[0].text in ("yes", "no")
    json_object = {"response_format": {"type": "json_object"}}
    answer = api.completions.create(model=MODEL, prompt="x", extra_body=json_object, **OPTIONS)
    assert answer.choices[0].text.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].text), dict)


def test_each_form_means_the_same_in_chats_and_completions(gateway):
    prompts = {"completions": {"prompt": "x"}, "chat/completions": {"messages": MESSAGES}}
    for path, prompt in prompts.items():
        texts = {}
        for form, fields in forms_of(SCHEMA).items():
            response = gateway.post(f"/v1/{path}", {"model": MODEL, **prompt, **OPTIONS, **fields})
            assert response.status == 200, (path, form, response.body)
            choice = response.json["choices"][0]
            texts[form] = choice["text"] if "text" in choice else choice["message"]["content"]
        assert len(set(texts.values())) == 1, texts
        Module.model_validate_json(texts["vllm"])


def test_a_schema_that_cannot_be_enforced_is_named(gateway):
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    body = {"model": MODEL, "messages": MESSAGES, "response_format": wrong}
    response = gateway.post("/v1/chat/completions", body)
    assert response.status == 400
    assert response.error["param"] == "response_format.json_schema.schema"
    assert "not" in response.error["message"]
