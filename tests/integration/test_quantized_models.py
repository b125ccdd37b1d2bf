"""A checkpoint of each number format of weights, on one real server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import copytree

import pytest
import torch
from effort import ALL
from gguf import GGMLQuantizationType
from gguf_vocabulary import add_vocabulary
from paged_client import Client
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from paged_backend.checkpoint.bundled import BUNDLED_MODELS
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server

sys.path.insert(0, str(Path(__file__).parents[1] / "quantization"))

from gguf_files import GgufModel  # noqa: E402
from quantized_checkpoints import quantize_checkpoint  # noqa: E402
from test_checkpoints import FORMATS, whole  # noqa: E402

DEMO = Path(BUNDLED_MODELS["demo"])
NAMES = ["w4a16", "int8-group", "fp8-channel", "gptq-4", "awq"]  # names of folders
# The readers of all formats have tests without a server.
FEW = ("gguf",)
PROMPT = "What does abs do?"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """The demo model in each format, and transformers' model with the weights that are left."""
    folder = tmp_path_factory.mktemp("models")
    models = {}
    for name in NAMES if ALL else ():
        copytree(DEMO, folder / name)
        model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
        config, writer = FORMATS[name]
        quantize_checkpoint(model, folder / name, config, whole(writer))
        models[name] = folder / name, model
    models["gguf"] = gguf_demo(folder)
    return models


def gguf_demo(folder: Path) -> tuple[Path, PreTrainedModel]:
    """The demo model with its tokenizer in a GGUF file."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    file = GgufModel(folder / "demo.gguf", model).config()
    add_vocabulary(file.writer, Tokenizer.from_file(str(DEMO / "tokenizer.json")), "gpt-2")
    file.writer.add_eos_token_id(model.config.eos_token_id)
    return file.tensors(GGMLQuantizationType.Q8_0).close(), model


@pytest.fixture(scope="module")
def deployment(
    models: dict[str, tuple[Path, PreTrainedModel]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("repository")
    for name, (folder, _) in models.items():
        options = {"model": str(folder), "kv_cache_memory_bytes": 2**24}
        write_model_repository(repository, name, options, instances=1)
    with start_server(repository) as running:
        yield running


@pytest.mark.server
@pytest.mark.parametrize(
    "name",
    [
        name if name in FEW else pytest.param(name, marks=pytest.mark.thorough)
        for name in (*NAMES, "gguf")
    ],
)
def test_the_answer_is_that_of_transformers_on_the_same_weights(
    name: str, deployment: RunningServer, models: dict[str, tuple[Path, PreTrainedModel]]
) -> None:
    model = models[name][1]
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=24, do_sample=False, pad_token_id=0)
    wanted = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
    with Client(deployment.grpc_url, name, timeout=60) as client:
        answer = client.generate(PROMPT, temperature=0, max_tokens=24)
    assert answer.text == wanted
