"""A server with a draft model answers as one without it, also when its engine is killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from callers import QUESTIONS, Ask, Crowd, ask_all, greedy
from deep_model import make_deep_model
from demo_server import Server
from servers import LOAD_TIMEOUT_S, kill_engine, metrics, serve_demo, wait_for

from paged_backend.launch.server_process import RunningServer
from paged_backend.tools.scrape import scrape

pytestmark = pytest.mark.server

SEEDED: dict[str, Any] = {"temperature": 0.6, "max_tokens": 80, "ignore_eos": True}
ASKS = [
    *(greedy(index, 80) for index in range(3)),
    Ask(QUESTIONS[3], {**SEEDED, "seed": 7, "structured_outputs": {"regex": "([a-c]{2}, ){20}"}}),
    Ask(QUESTIONS[4], {**SEEDED, "seed": 8, "n": 2}),
    Ask(QUESTIONS[5], {**SEEDED, "seed": 9, "logprobs": 2}, True),
    Ask(QUESTIONS[6], {**SEEDED, "seed": 10, "repetition_penalty": 1.1, "stop": [" the "]}),
]
COUNTS = ("total_draft_tokens", "total_accepted_draft_tokens")
NAMES = ("draft_tokens", "accepted_tokens")


def counts_of_answer(server: RunningServer, question: str) -> list[int]:
    """The numbers of drafts, and of right ones, of an answer of 80 tokens."""
    fields = {"text_input": question, "return_metrics": True, "max_tokens": 80, "temperature": 0.0}
    status, body = Server(server).post("generate", {**fields, "ignore_eos": True})
    assert status == 200, body
    found = json.loads(json.loads(body)["metrics"])
    return [found[name] for name in COUNTS]


def counts_of_server(server: RunningServer) -> list[float]:
    return [metrics(server)[f"spec_decode_num_{name}_total"] for name in NAMES]


def test_streams_are_those_of_a_server_without_a_draft_model(
    server: Server, tmp_path: Path
) -> None:
    """A draft that is drawn by the same layers is right, wherever it is verified."""
    expected = [call.token_ids for call in ask_all(server.running, ASKS)]
    make_deep_model(tmp_path / "deep")
    options = {
        "model": str(tmp_path / "deep"),
        "speculative_config": {"method": "draft_model", "model": "demo"},
    }
    with serve_demo(tmp_path, **options) as drafting:
        assert [call.token_ids for call in ask_all(drafting, ASKS)] == expected
        wait_for(lambda: metrics(drafting)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S)
        restarts = metrics(drafting)["engine_restarts_total"] + 1
        with Crowd(drafting, ASKS) as crowd:
            wait_for(lambda: crowd.have_tokens(10), LOAD_TIMEOUT_S)
            kill_engine(drafting)
        assert [call.token_ids for call in crowd.calls] == expected
        wait_for(lambda: metrics(drafting)["engine_restarts_total"] == restarts, LOAD_TIMEOUT_S)
        wait_for(lambda: metrics(drafting)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S)
        # The counters of the new engine have begun anew, and all is quiet.
        start = counts_of_server(drafting)
        answers = [counts_of_answer(drafting, question) for question in QUESTIONS[:6]]
        drafts, accepted = (sum(numbers) for numbers in zip(*answers, strict=True))
        assert drafts == accepted > 0

        def are_counted() -> bool:
            counted = [a - b for a, b in zip(counts_of_server(drafting), start, strict=True)]
            return counted == [drafts, accepted]

        wait_for(are_counted, LOAD_TIMEOUT_S, "the drafts of the answers are not all counted")
        page = scrape(drafting.metrics_url)
    by_place = page.by_label("spec_decode_num_accepted_tokens_per_pos_total", "position")
    numbers = [by_place[str(place)] for place in range(len(by_place))]
    assert sum(numbers) == page.value("spec_decode_num_accepted_tokens_total")
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] == page.value("spec_decode_num_drafts_total")
