"""Defaults of sampling of a checkpoint, over the wire: at each door, and turned off by options."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from demo_server import Server
from effort import ALL
from gateways import Gateway, running_gateway
from pipelines import write_part_of_pipeline

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import start_server

pytestmark = pytest.mark.server

# For this text the model is unsure, so greedy tokens are unlikely to be drawn.
PROMPT = "zebra 17 q"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
AUTHOR, OFF, CAPPED = "author", "off", "capped"
MAX_NEW_TOKENS = 20
WARM = {"temperature": 2.0, "seed": 3}
COLD = {"temperature": 0.0}


@dataclass(frozen=True)
class Doors:
    server: Server
    gateway: Gateway

    def generate(self, model: str, **values: Any) -> str:
        """Return the new text of a `generate` request."""
        fields = {"text_input": PROMPT, "exclude_input_in_output": True, **values}
        with self.server.connection() as connection:
            connection.request("POST", f"/v2/models/{model}/generate", json.dumps(fields).encode())
            body = connection.getresponse().read().decode()
        return str(json.loads(body)["text_output"])

    def chat(self, model: str, **values: Any) -> str | None:
        with self.gateway.sdk() as api:
            answer = api.chat.completions.create(model=model, messages=MESSAGES, **values)
        return answer.choices[0].message.content


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("defaults")
    shutil.copytree(MODEL_DIR, folder / "model")
    path = folder / "model" / "generation_config.json"
    values = {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS}
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    options = {"model": str(folder / "model"), "kv_cache_memory_bytes": 2**25}
    names = ("preprocess", "postprocess", "llm", "tensorrt_llm_bls")
    write_part_of_pipeline(folder / "repository", AUTHOR, options, names)
    others: dict[str, dict[str, Any]] = {OFF: {"generation_config": "vllm"}}
    if ALL:
        others[CAPPED] = {"override_generation_config": {"top_k": 1, "max_new_tokens": 4}}
    for name, more in others.items():
        write_model_repository(folder / "repository", name, options | more, instances=1)
    with (
        start_server(folder / "repository") as server,
        running_gateway("--triton", server.grpc_url) as gateway,
    ):
        yield Doors(Server(server), gateway)


def test_generate(doors: Doors) -> None:
    greedy = doors.generate(OFF, max_tokens=MAX_NEW_TOKENS, **COLD)
    assert doors.generate(AUTHOR) == greedy
    assert doors.generate(AUTHOR, sampling_parameters='{"temperature": null}') == greedy
    warm = doors.generate(OFF, max_tokens=MAX_NEW_TOKENS, **WARM)
    assert warm != greedy
    assert doors.generate(AUTHOR, **WARM) == warm


def test_a_neutral_value_of_a_client_wins(doors: Doors) -> None:
    own = {"temperature": 1.0, "max_tokens": 16}
    answers = {doors.generate(AUTHOR, seed=seed, **own) for seed in range(4)}
    assert len(answers) > 1
    assert answers == {doors.generate(OFF, seed=seed, max_tokens=16) for seed in range(4)}


def test_chats_completions_responses_and_messages(doors: Doors) -> None:
    import anthropic  # which takes a second, in the process that uses it

    greedy = doors.chat(OFF, max_tokens=MAX_NEW_TOKENS, **COLD)
    assert doors.chat(AUTHOR) == greedy
    warm = doors.chat(OFF, max_tokens=MAX_NEW_TOKENS, **WARM)
    assert warm != greedy
    assert doors.chat(AUTHOR, **WARM) == warm
    with doors.gateway.sdk() as api:
        assert _responses(api, AUTHOR) == greedy
        text = api.completions.create(model=AUTHOR, prompt=PROMPT).choices[0].text
    assert text == doors.generate(OFF, max_tokens=16, **COLD)
    url = f"http://{doors.gateway.address}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        answer = claude.messages.create(model=AUTHOR, max_tokens=MAX_NEW_TOKENS, messages=MESSAGES)
    assert "".join(block.text for block in answer.content if block.type == "text") == greedy


def _responses(api: openai.OpenAI, model: str) -> str:
    return api.responses.create(model=model, input=PROMPT).output_text


def test_without_the_defaults_clients_get_drawn_tokens(doors: Doors) -> None:
    greedy = doors.chat(OFF, max_tokens=16, **COLD)
    drawn = {
        doors.chat(OFF, max_tokens=16, seed=seed, extra_body={"top_k": 0}) for seed in range(4)
    }
    assert drawn != {greedy}
    assert len(doors.generate(OFF, ignore_eos=True)) > 0


@pytest.mark.thorough  # `serving/test_sampling_defaults.py` has it without a server
def test_the_operators_number_of_tokens_limits_every_request(doors: Doors) -> None:
    greedy = doors.generate(OFF, max_tokens=4, **COLD)
    assert doors.generate(CAPPED, max_tokens=500, temperature=1.0) == greedy
    with doors.gateway.sdk() as api:
        answer = api.completions.create(model=CAPPED, prompt=PROMPT)
    assert answer.choices[0].text == greedy
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_the_ensemble_has_the_same_defaults_and_tensorrtllms_names_have_none(doors: Doors) -> None:
    greedy = doors.generate(AUTHOR)
    assert doors.generate("llm") == greedy
    # The first step makes the model's checks: with 16 tokens as the default it would refuse this.
    least = json.dumps({"min_tokens": MAX_NEW_TOKENS - 1})
    by_model = doors.generate(AUTHOR, sampling_parameters=least)
    assert doors.generate("llm", sampling_parameters=least) == by_model
    # top_k turns sampling on, and the temperature is TensorRT-LLM's default of 1.
    fields = {"max_tokens": 16, "top_k": 9}
    warm = {doors.generate("tensorrt_llm_bls", seed=seed, **fields) for seed in range(4)}
    assert warm == {doors.generate(OFF, seed=seed, **fields) for seed in range(4)}
    assert len(warm) > 1
