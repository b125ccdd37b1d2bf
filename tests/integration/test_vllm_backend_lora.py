"""vllm_backend's contract for LoRA adapters: its own cases, with adapters of the demo model.

The cases are those of its continuous integration. Where they compare an answer with the words of
one checkpoint, the answer is compared with that of `LLM` here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from effort import ALL
from faults.adapter_folders import make_adapter
from test_vllm_backend import QUESTION, Answer, Server, add_model, serving

from paged_backend import LLM, LoRARequest, SamplingParams

pytestmark = pytest.mark.server

PROMPT = QUESTION.question
SAMPLING = {"temperature": "0", "max_tokens": "24", "ignore_eos": "true"}
DISABLED = "LoRA feature is not enabled."
UNKNOWN = "LoRA bactrian is not supported, we currently support ['doll', 'sheep']"
SWITCHES = {"bool": True, "text": "true", "off": False, "off_text": "false"}
FEW = ("text", "off_text")  # our own tests of adapters have the option as a truth value


def switches(*names: str) -> list[Any]:
    """Names of models; those beside a few are left out, unless everything is tried."""
    return [n if n in FEW else pytest.param(n, marks=pytest.mark.thorough) for n in names]


def names_beside(model_json: Path, modules: dict[str, str]) -> None:
    (model_json.parent / "multi_lora.json").write_text(json.dumps(modules))


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(root / name, seed) for seed, name in enumerate(("doll", "sheep"))}


@pytest.fixture(scope="module")
def expected(modules: dict[str, str]) -> dict[str, str]:
    """The answer with each adapter, and without any."""
    llm = LLM("demo", enable_lora=True)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    loras = {
        name: LoRARequest(name, number, folder)
        for number, (name, folder) in enumerate(modules.items(), 1)
    }
    answers = {
        name: llm.generate(PROMPT, params, lora)[0].outputs[0].text
        for name, lora in {"": None, **loras}.items()
    }
    assert len(set(answers.values())) == 3, "each adapter changes the answer"
    return answers


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory, modules: dict[str, str]) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("vllm_lora")
    for name in SWITCHES if ALL else FEW:
        switch = SWITCHES[name]
        options = {"model": "demo", "enable_lora": switch}
        if switch in (True, "true"):
            options |= {"max_lora_rank": 8, "max_loras": 2, "cpu_threads": 1}
        names_beside(add_model(root / "models", name, options), modules)
    if ALL:
        add_model(root / "models", "left_out", {"model": "demo"})
    flags = ("--model-control-mode=explicit", "--load-model=*")
    with serving(root / "models", root / "server.log", *flags) as running:
        yield running


def ask(vllm: Server, model: str, adapter: str) -> Answer:
    """The only response to a request that names an adapter, or none if the name is empty."""
    sampling = SAMPLING | ({"lora_name": adapter} if adapter else {})
    (answer,) = vllm.infer(
        model,
        text_input=PROMPT,
        stream=False,
        exclude_input_in_output=True,
        sampling_parameters=json.dumps(sampling),
    )
    return answer


@pytest.mark.parametrize("model", switches("bool", "text"))
def test_requests_get_the_answers_of_their_adapters(
    vllm: Server, model: str, expected: dict[str, str]
) -> None:
    """Alone, and all at once, which share steps."""
    for adapter, text in expected.items():
        assert ask(vllm, model, adapter).text == text
    adapters = [*expected] * 4
    with ThreadPoolExecutor(len(adapters)) as pool:
        answers = pool.map(lambda adapter: ask(vllm, model, adapter).text, adapters)
        assert list(answers) == [expected[adapter] for adapter in adapters]


@pytest.mark.parametrize("model", switches("bool", "text"))
def test_a_name_without_an_adapter_is_refused(
    vllm: Server, model: str, expected: dict[str, str]
) -> None:
    error = ask(vllm, model, "bactrian").error
    assert error is not None and UNKNOWN in error.message()
    assert ask(vllm, model, "doll").text == expected["doll"]


@pytest.mark.parametrize("model", switches("off", "off_text", "left_out"))
def test_without_the_option_every_name_is_refused(
    vllm: Server, model: str, expected: dict[str, str]
) -> None:
    error = ask(vllm, model, "doll").error
    assert error is not None and DISABLED in error.message()
    assert ask(vllm, model, "").text == expected[""]


def test_a_model_with_adapters_needs_their_names(vllm: Server) -> None:
    add_model(vllm.repository, "nameless", {"model": "demo", "enable_lora": True})
    status, text = vllm.load("nameless")
    assert status == 400
    assert "multi_lora.json" in text
