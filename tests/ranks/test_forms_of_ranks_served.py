"""Models of each form on a real server: several ranks answer as one.

Prompts come in chunks, have the beginnings of others, and are preempted. `RANK_REQUESTS` is the
number of requests of each sort.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
from callers import Ask, Call, ask_all
from checkpoints import make_checkpoint
from comparison import EP2, PP2, STEPS, TP2, TP2_PP2, small_pool
from numpy.typing import NDArray
from oracle import make_engine
from paged_client import Client
from ranks_in_threads import make_ranks_engine
from servers import MODEL, metrics

from paged_backend.checkpoint.bundled import BUNDLED_MODELS
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server

pytestmark = [pytest.mark.server, pytest.mark.soak, pytest.mark.timeout(3600)]

NUM_REQUESTS = int(os.environ.get("RANK_REQUESTS", "28"))
DEMO = Path(BUNDLED_MODELS["demo"])
VOCAB_SIZE = 2048  # the demo model's; all models of this file have its tokenizer
EMBEDDER = "embedder"
START_TIMEOUT_S = 600  # up to eight ranks on a busy machine
Layouts = dict[str, dict[str, Any]]

DENSE: Layouts = {"TP2": TP2, "PP2": PP2, "TP2xPP2": TP2_PP2}
EXPERTS: Layouts = {**DENSE, "EP2": EP2, "EP2xPP2": EP2 | PP2}


@dataclass(frozen=True)
class Form:
    """A form of models: a family with random weights, or else the demo model, and its options."""

    family: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    layouts: Layouts = field(default_factory=lambda: DENSE)
    embeds: bool = True

    def folder(self, parent: Path) -> Path:
        """Return the folder of the checkpoint, which is made if it has random weights."""
        if self.family is None:
            return DEMO
        folder = parent / self.family
        make_checkpoint(self.family, folder, vocab_size=VOCAB_SIZE, eos_token_id=None)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            copy(DEMO / name, folder)
        return folder


FORMS = {
    "dense": Form(),
    "int8": Form(options={"quantization": "int8"}),
    "int4": Form(options={"quantization": "int4"}),
    "experts": Form("qwen2-moe", layouts=EXPERTS),
    "sliding windows": Form("gemma3"),
    "fallback": Form("cohere2", embeds=False),  # transformers computes it, and only generates
}

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "max_tokens": 20, "ignore_eos": True}
PATTERN = {"structured_outputs": {"regex": "([a-z]{2,9}, ){3}"}}


def prompts() -> list[list[int]]:
    """Prompts of up to 70 tokens, most of which have the beginning of others."""
    chance = random.Random(7)
    shared = [chance.randrange(3, VOCAB_SIZE) for _ in range(64)]
    return [
        [*shared[: chance.randrange(64)], *chance.choices(range(3, VOCAB_SIZE), k=6)]
        for _ in range(NUM_REQUESTS)
    ]


def asks() -> list[Ask]:
    """So many requests of each sort."""
    return [
        ask
        for seed, prompt in enumerate(prompts())
        for ask in (
            Ask(prompt, GREEDY),
            Ask(prompt, {**SEEDED, "seed": seed}),
            Ask(prompt, {**SEEDED, "seed": seed, "n": 2}),
            Ask(prompt, {**GREEDY, "logprobs": 3, "prompt_logprobs": 2}, True),
            Ask(prompt, {**SEEDED, "seed": seed, **PATTERN}),
        )
    ]


class Served(NamedTuple):
    """What a server has answered, and how often it did what is to be tested."""

    tokens: list[list[tuple[int, ...]]]
    logprobs: list[list[float]]
    vectors: list[NDArray[np.float32]]
    num_preemptions: int
    num_hits: int


def serve(form: Form, folder: Path, parent: Path, layout: dict[str, Any]) -> Served:
    """Ask a server of this form and layout."""
    options = {**STEPS, **form.options, **layout}
    # transformers cannot load the ranks of a model in one process.
    make = make_ranks_engine if form.embeds else make_engine
    pool = {"kv_cache_memory_bytes": small_pool(make(folder, **options).executor.info)[1]}
    values = {"model": str(folder), "dtype": "float32", **options}
    write_model_repository(parent / "repository", MODEL, values | pool, instances=1)
    if form.embeds:
        embedder = {**values, "task": "embed", "pooling_type": "mean"}
        write_model_repository(parent / "repository", EMBEDDER, embedder, instances=1)
    with start_server(parent / "repository", ready_timeout_s=START_TIMEOUT_S) as server:
        calls = ask_all(server, asks())
        vectors = embeddings(server) if form.embeds else []
        shown = metrics(server)
    return Served(
        [call.token_ids for call in calls],
        [logprobs_of(call) for call in calls],
        vectors,
        int(shown["num_preemptions_total"]),
        int(shown["prefix_cache_hits_total"]),
    )


def embeddings(server: RunningServer) -> list[NDArray[np.float32]]:
    with Client(server.grpc_url, EMBEDDER) as client:
        return [client.embed(prompt).vector for prompt in prompts()]


def logprobs_of(call: Call) -> list[float]:
    """All log-probabilities of a call, of its prompt and its answers."""
    assert call.completion is not None
    positions = [position for answer in call.completion.answers for position in answer.logprobs]
    positions += [position for position in call.completion.prompt_logprobs if position is not None]
    return [candidate.logprob for position in positions for candidate in position]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Served]]:
    """Return the checkpoint of a form, and what one rank answers; asked once for each form."""

    @functools.cache
    def answer(name: str) -> tuple[Path, Served]:
        parent = tmp_path_factory.mktemp("one")
        folder = FORMS[name].folder(parent)
        served = serve(FORMS[name], folder, parent, {})
        assert sum(map(bool, served.logprobs)) == NUM_REQUESTS
        return folder, served

    return answer


CASES = [(name, layout) for name, form in FORMS.items() for layout in form.layouts]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_several_ranks_answer_as_one(
    name: str, layout: str, one_rank: Callable[[str], tuple[Path, Served]], tmp_path: Path
) -> None:
    folder, one = one_rank(name)
    form, started = FORMS[name], time.monotonic()
    several = serve(form, folder, tmp_path, form.layouts[layout])
    differing = sum(a != b for a, b in zip(several.tokens, one.tokens, strict=True))
    print(
        f"\n{name}, {layout}: {differing} of {len(one.tokens)} requests differ, "
        f"{several.num_preemptions} preemptions, {several.num_hits} tokens found cached, "
        f"{time.monotonic() - started:.0f} s"
    )
    assert several.tokens == one.tokens
    for found, expected in zip(several.logprobs, one.logprobs, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    for vector, wanted in zip(several.vectors, one.vectors, strict=True):
        np.testing.assert_allclose(vector, wanted, rtol=0, atol=1e-5)
    assert several.num_preemptions > 0
    assert several.num_hits > 0
