"""Many random requests have the same tokens with every drafter as without one.

``SPECULATION_REQUESTS`` is the number of requests of each server (500).
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from callers import QUESTIONS, Ask, Crowd
from deep_model import make_deep_model
from servers import LOAD_TIMEOUT_S, kill_engine, metrics, serve_demo, wait_for, wait_loaded

from paged_backend.launch.server_process import RunningServer

pytestmark = [pytest.mark.server, pytest.mark.soak]

NUM_REQUESTS = int(os.environ.get("SPECULATION_REQUESTS", "500"))
AT_ONCE = (1, 3, 20)
KILL_EVERY = 10  # times that 20 requests run at once
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
OUTPUTS: list[dict[str, Any]] = [
    {"regex": "([a-c]{2}, ){20}"},
    {"json": SCHEMA},
    {"choice": ["to the north", "to the south"]},
]
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": "demo"},
}

Tokens = list[list[tuple[int, ...]]]


def random_ask(rng: random.Random) -> Ask:
    """A request with random parameters; half of the prompts repeat a phrase."""
    prompt = rng.choice(QUESTIONS)
    if rng.random() < 0.5:
        prompt = f"{prompt} " * rng.randint(2, 4) + prompt[: len(prompt) // 2]
    params: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.0, 0.3, 0.8, 1.2]),
        "max_tokens": rng.randint(1, 90),
        "seed": rng.randrange(10**6),
    }
    several: list[dict[str, Any]] = [
        {"n": rng.randint(2, 3)},
        {"top_p": 0.9},
        {"top_k": rng.randint(2, 20)},
        {"min_p": 0.05},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.3, "frequency_penalty": 0.2},
        {"ignore_eos": True},
        {"min_tokens": params["max_tokens"] // 2},
        {"logprobs": 2},
        {"stop": [" the ", "e."]},
        {"bad_words": [" the"]},
        {"structured_outputs": rng.choice(OUTPUTS)},
    ]
    for more in rng.sample(several, rng.randrange(4)):
        params |= more
    if "structured_outputs" in params:  # it decides where the output may end
        params.pop("min_tokens", None)
    return Ask(prompt, params, whole=rng.random() < 0.2)


def with_prediction(ask: Ask, tokens: str, rng: random.Random) -> Ask:
    """The request with a text that its answer may repeat, or that it does not."""
    text = rng.choice([tokens, QUESTIONS[0], tokens[len(tokens) // 3 :]])
    return Ask(ask.prompt, {**ask.params, "prediction": text}, ask.whole) if text else ask


def answer(server: RunningServer, asks: list[Ask], *, kills: bool) -> tuple[Tokens, list[str]]:
    """The tokens of all requests, and the text of the first answer of each."""
    tokens: Tokens = []
    texts: list[str] = []
    rng, waiting, num_large = random.Random(1), list(asks), 0
    while waiting:
        number = rng.choice(AT_ONCE)
        num_large += number == max(AT_ONCE)
        is_hurt = kills and number == max(AT_ONCE) and num_large % KILL_EVERY == 1
        with Crowd(server, waiting[:number]) as crowd:
            if is_hurt:
                wait_for(lambda crowd=crowd: crowd.num_tokens > 40, LOAD_TIMEOUT_S)
                kill_engine(server)
                wait_loaded(server, num_large // KILL_EVERY + 1)
        del waiting[:number]
        for call in crowd.calls:
            tokens.append(call.token_ids)
            assert call.completion is not None
            texts.append(call.completion.text)
    return tokens, texts


def test_tokens_are_those_without_speculation(tmp_path: Path) -> None:
    rng = random.Random(5)
    asks = [random_ask(rng) for _ in range(NUM_REQUESTS)]
    with serve_demo(tmp_path / "plain") as server:
        expected, texts = answer(server, asks, kills=False)
    make_deep_model(tmp_path / "deep")
    for name, config in DRAFTERS.items():
        mixed = [
            with_prediction(ask, text, rng) if name != "draft_model" and rng.random() < 0.2 else ask
            for ask, text in zip(asks, texts, strict=True)
        ]
        model = {"model": str(tmp_path / "deep")} if name == "draft_model" else {}
        with serve_demo(tmp_path / name, **model, speculative_config=config) as server:
            found, _ = answer(server, mixed, kills=True)
            page = metrics(server)
        different = [index for index in range(NUM_REQUESTS) if found[index] != expected[index]]
        assert not different, (name, [mixed[index] for index in different[:3]])
        drafts = page["spec_decode_num_draft_tokens_total"]
        accepted = page["spec_decode_num_accepted_tokens_total"]
        assert 0 < accepted <= drafts
        print(f"{name}: {NUM_REQUESTS} requests, {drafts:.0f} drafts, {accepted:.0f} of them right")
