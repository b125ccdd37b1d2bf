"""Families of models on a real server, where each engine is killed within an answer.

`PAGED_FAMILIES=all` serves every family of `checkpoints`, some at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copy

import pytest
import torch
from checkpoints import FALLBACKS, FAMILIES, make_checkpoint
from effort import ALL
from paged_client import Client
from servers import engines_of, serve_repository
from transformers import AutoTokenizer, PreTrainedModel

from paged_backend.checkpoint.bundled import BUNDLED_MODELS
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer

DEMO = Path(BUNDLED_MODELS["demo"])
TOKENIZER = AutoTokenizer.from_pretrained(DEMO)
PROMPT, MAX_TOKENS = "What does abs do?", 48
# One with states and one of transformers; with everything, one with windows and experts, too.
# Engines of the demo model are killed in the tests of faults.
FEW = ("qwen3-next", "cohere2", *(("gpt-oss",) if ALL else ()))
CHOSEN = (*FAMILIES, *FALLBACKS) if os.environ.get("PAGED_FAMILIES") == "all" else FEW

BATCHES = [CHOSEN[start : start + 5] for start in range(0, len(CHOSEN), 5)]


@dataclass
class Deployment:
    """A server with a model of each family, and transformers' models with the same weights."""

    server: RunningServer
    references: dict[str, PreTrainedModel]


@pytest.fixture(scope="module", params=BATCHES, ids="-".join)
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("models")
    references = {}
    for family in request.param:
        references[family] = make_checkpoint(
            family, folder / family, vocab_size=len(TOKENIZER), eos_token_id=None
        )
        for name in ("tokenizer.json", "tokenizer_config.json"):
            copy(DEMO / name, folder / family)
        options = {"model": str(folder / family), "kv_cache_memory_bytes": 2**24}
        write_model_repository(folder / "repository", family, options, instances=1)
    with serve_repository(folder) as server:
        yield Deployment(server, references)


@pytest.mark.server
def test_answers_are_those_of_transformers_when_the_engines_are_killed(
    deployment: Deployment,
) -> None:
    url, references = deployment.server.grpc_url, deployment.references
    clients = {family: Client(url, family, timeout=120) for family in references}
    streams = {
        family: client.stream(PROMPT, temperature=0, max_tokens=MAX_TOKENS)
        for family, client in clients.items()
    }
    answers = {family: list(next(stream).token_ids) for family, stream in streams.items()}
    killed = engines_of(deployment.server)
    assert len(killed) == len(references)
    for engine in killed:
        engine.kill()
    for family, stream in streams.items():
        answers[family] += [token for chunk in stream for token in chunk.token_ids]
        clients[family].close()
    assert not {engine.pid for engine in killed} & {e.pid for e in engines_of(deployment.server)}
    for family, answer in answers.items():
        assert len(answer) == MAX_TOKENS
        assert answer == likeliest(references[family], answer), family


@torch.inference_mode()
def likeliest(model: PreTrainedModel, answer: list[int]) -> list[int]:
    """The likeliest token after the prompt, and after it with each part of the answer."""
    prompt = TOKENIZER(PROMPT)["input_ids"]
    logits = model(torch.tensor([prompt + answer])).logits[0]
    tokens: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return tokens
