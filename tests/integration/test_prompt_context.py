"""The text of a completion continues its prompt's, on every wire.

The tokenizer drops the first space of a text, as those of Llama 2, Mistral 7B and Phi-3 do.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from demo_server import MODEL, Server
from integration.generating import generate, generate_stream
from paged_client import Client
from pipelines import OWN, write_part_of_pipeline
from servers import engines_of
from tokenizer_layouts import sentencepiece_with_prefix

from paged_backend.engine.llm import LLM
from paged_backend.launch.server_process import start_server
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.sampling_params import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "gateway"))
from gateways import Gateway, running_gateway  # noqa: E402

MODELS = [MODEL, "llm", "llm_bls"]
PIPELINE = (*OWN, "llm_bls", "ensemble", "tensorrt_llm")
TEXT = "a theme"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint("llama2", folder, vocab_size=512, eos_token_id=None)
    sentencepiece_with_prefix(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    options = {"model": str(folder), "kv_cache_memory_bytes": 2**24, "max_model_len": 512}
    write_part_of_pipeline(repository, MODEL, options, PIPELINE)
    with start_server(repository) as running:
        yield Server(running)


@pytest.fixture(scope="module")
def gateway(server: Server) -> Iterator[Gateway]:
    with running_gateway("--triton", server.running.grpc_url) as running:
        yield running


@pytest.fixture(scope="module")
def spell(folder: Path) -> Any:
    """The ids of vocabulary entries."""
    tokenizer = load_tokenizer(folder)

    def ids(*tokens: str) -> list[int]:
        found = [tokenizer.token_id(token) for token in tokens]
        assert None not in found
        return [token_id for token_id in found if token_id is not None]

    return ids


def only(token_ids: list[int], count: int = 2, **options: Any) -> dict[str, Any]:
    return {
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "allowed_token_ids": token_ids,
        **options,
    }


@pytest.mark.server
@pytest.mark.parametrize("model", MODELS)
def test_the_first_space_is_kept_in_every_model(server: Server, spell: Any, model: str) -> None:
    options = only(spell("▁the"))
    assert generate(server, model, text_input=TEXT, **options)["text_output"] == TEXT + " the the"
    parts = generate_stream(server, model, text_input=TEXT, **options)
    assert "".join(part["text_output"] for part in parts) == " the the"
    several = generate(server, model, text_input=TEXT, n=2, exclude_input_in_output=True, **options)
    assert several["text_output"] == [" the the"] * 2


@pytest.mark.server
def test_it_is_kept_in_tensorrtllms_ensemble(server: Server) -> None:
    answer = generate(
        server,
        "ensemble",
        text_input=TEXT,
        max_tokens=2,
        embedding_bias_words=["the"],
        embedding_bias_weights=[100.0],
    )
    assert answer["text_output"] == TEXT + " the the"


@pytest.mark.server
def test_a_stop_string_may_begin_with_it(server: Server, spell: Any) -> None:
    options = only(spell("▁the"), 4, exclude_input_in_output=True)
    for model in MODELS:
        answer = generate(server, model, text_input=TEXT, stop=[" the the the"], **options)
        assert answer["text_output"] == ""


@pytest.mark.server
@pytest.mark.parametrize("as_ids", [False, True])
def test_completions_of_the_gateway(
    gateway: Gateway, server: Server, spell: Any, as_ids: bool
) -> None:
    body = {"model": MODEL, "logprobs": 2, "echo": True, **only(spell("▁the"))}
    with Client(server.running.grpc_url, MODEL) as client:
        ids = list(client.tokenize(TEXT))
    prompt, shown = (ids, "<s> " + TEXT) if as_ids else (TEXT, TEXT)
    answer = gateway.post("/v1/completions", {**body, "prompt": prompt}).json
    (choice,) = answer["choices"]
    assert choice["text"] == shown + " the the"
    columns = choice["logprobs"]
    assert columns["tokens"][-2:] == [" the", " the"]
    assert "".join(columns["tokens"]).removeprefix("" if as_ids else "<s>") == choice["text"]
    for token, offset in list(zip(columns["tokens"], columns["text_offset"], strict=True))[1:]:
        assert choice["text"][offset:].startswith(token)


@pytest.mark.server
def test_log_probabilities_spell_a_text_without_a_prompts(
    gateway: Gateway, folder: Path, spell: Any
) -> None:
    body = {"model": MODEL, "prompt": spell("<s>"), "logprobs": 2, **only(spell("▁the"))}
    (choice,) = gateway.post("/v1/completions", body).json["choices"]
    assert choice["text"] == "the the"
    assert choice["logprobs"]["tokens"] == ["the", " the"]
    lines = gateway.post("/v1/completions", {**body, "stream": True}).body.decode().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = [chunk["choices"][0]["logprobs"]["tokens"] for chunk in chunks if chunk["choices"]]
    assert [token for part in parts for token in part] == ["the", " the"]


@pytest.mark.server
@pytest.mark.parametrize("model", MODELS)
def test_a_character_that_the_prompt_begins_is_the_completions(
    server: Server, spell: Any, model: str
) -> None:
    begun = spell("<s>", "▁", "a", "<0xC3>")
    options = only(spell("<0xA9>"), 1, input_ids=begun)
    if model == MODEL:
        assert generate(server, model, **options)["text_output"] == "aé"
    answer = generate(server, model, exclude_input_in_output=True, **options)
    assert answer["text_output"] == "é"


@pytest.mark.server
def test_an_echo_ends_before_a_character_that_is_not_complete(gateway: Gateway, spell: Any) -> None:
    body = {"model": MODEL, "prompt": spell("▁", "a", "<0xC3>"), **only(spell("<0xA9>"), 1)}
    (choice,) = gateway.post("/v1/completions", {**body, "echo": True}).json["choices"]
    assert choice["text"] == "aé"


@pytest.mark.server
def test_chats_continue_their_prompts(gateway: Gateway, spell: Any) -> None:
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "the"}]}
    body = {**chat, "logprobs": True, **only(spell("▁the"))}
    (choice,) = gateway.post("/v1/chat/completions", body).json["choices"]
    assert choice["message"]["content"] == " the the"
    assert [part["token"] for part in choice["logprobs"]["content"]] == [" the", " the"]


@pytest.mark.server
def test_the_offline_api(folder: Path, spell: Any) -> None:
    params = SamplingParams.from_mapping(only(spell("▁the"), n=2))
    (answer,) = LLM(str(folder), kv_cache_memory_bytes=2**24).generate([TEXT], params)
    assert [output.text for output in answer.outputs] == [" the the"] * 2


@pytest.mark.server
def test_an_answer_goes_on_after_its_engines_death(server: Server, spell: Any) -> None:
    with Client(server.running.grpc_url, MODEL, timeout=120) as client:
        stream = client.stream(TEXT, **only(spell("▁the", "e"), 200))
        parts = [next(stream)]
        for engine in engines_of(server.running):
            engine.kill()
        parts += stream
        ids = [token_id for part in parts for token_id in part.token_ids]
        prompt = list(client.tokenize(TEXT))
        whole = client.detokenize(np.array([*prompt, *ids], np.int32).tolist())
    assert "".join(part.text for part in parts) == whole.removeprefix("<s> " + TEXT)
