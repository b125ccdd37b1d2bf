"""A server that speculates answers as one that does not, also when its engine is killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from callers import QUESTIONS, Ask, Crowd, ask_all, greedy
from demo_server import Server
from paged_client import Client
from paged_client.errors import InvalidRequest
from servers import LOAD_TIMEOUT_S, MODEL, kill_engine, metrics, serve_demo, wait_for

from paged_backend.tools.scrape import scrape

pytestmark = pytest.mark.server

SEEDED: dict[str, Any] = {"temperature": 0.6, "max_tokens": 80, "ignore_eos": True}
# The questions of a request share their beginning, and greedy answers are made twice.
ASKS = [
    *(greedy(index % 3, 80) for index in range(6)),
    Ask(QUESTIONS[3], {**SEEDED, "seed": 7, "structured_outputs": {"regex": "([a-c]{2}, ){20}"}}),
    Ask(QUESTIONS[4], {**SEEDED, "seed": 8, "n": 2}),
    Ask(QUESTIONS[5], {**SEEDED, "seed": 9, "logprobs": 2}, True),
    Ask(QUESTIONS[6], {**SEEDED, "seed": 10, "repetition_penalty": 1.1, "stop": [" the "]}),
]


def test_streams_are_those_of_a_server_that_does_not_speculate(
    server: Server, tmp_path: Path
) -> None:
    plain = ask_all(server.running, ASKS)
    expected = [call.token_ids for call in plain]
    assert plain[0].completion is not None
    prediction = {"prediction": plain[0].completion.text}
    predicted = Ask(ASKS[0].prompt, {**ASKS[0].params, **prediction})
    with serve_demo(tmp_path, speculative_config={"method": "suffix"}) as drafting:
        assert [call.token_ids for call in ask_all(drafting, ASKS)] == expected
        before = metrics(drafting)
        with Crowd(drafting, [*ASKS, predicted]) as crowd:
            wait_for(lambda: crowd.have_tokens(10), LOAD_TIMEOUT_S)
            kill_engine(drafting)
        *others, resumed = crowd.calls
        assert [call.token_ids for call in others] == expected
        assert resumed.token_ids == expected[0] and resumed.completion is not None
        # No token of the answer is counted twice, though its engine was killed.
        counts = resumed.completion.answers[0].prediction_tokens
        assert counts is not None and 0 <= counts.accepted < len(expected[0][0])
        # The engine may have been killed after the last token; it is started again all the same.
        restarts = before["engine_restarts_total"] + 1
        wait_for(lambda: metrics(drafting)["engine_restarts_total"] == restarts, LOAD_TIMEOUT_S)
        wait_for(lambda: metrics(drafting)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S)
        after = metrics(drafting)
        # An answer is predicted, which this engine has not made yet.
        question = QUESTIONS[9]
        with Client(server.running.grpc_url, MODEL) as client:
            whole = client.generate(question, temperature=0.0, max_tokens=100)
            with pytest.raises(InvalidRequest, match="prediction: cannot be used: the engine does"):
                client.generate(question, max_tokens=4, prediction=whole.text)
        with Client(drafting.grpc_url, MODEL) as client:
            greedily = {"temperature": 0.0, "max_tokens": 100}
            again = client.generate(question, **greedily, prediction=whole.text)
            unlike = client.generate(question, **greedily, prediction=QUESTIONS[2])
            assert client.generate(question, max_tokens=8).answers[0].prediction_tokens is None
        assert again.token_ids == whole.token_ids
        counts = again.answers[0].prediction_tokens
        assert counts is not None and 0 < counts.accepted < len(whole.token_ids)
        wrong = unlike.answers[0].prediction_tokens
        assert wrong is not None and wrong.accepted < counts.accepted
        accepted = "spec_decode_num_accepted_tokens_total"
        wait_for(lambda: metrics(drafting)[accepted] > after[accepted], LOAD_TIMEOUT_S)
        wait_for(lambda: metrics(drafting)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S)
        page = scrape(drafting.metrics_url)
    by_place = page.by_label("spec_decode_num_accepted_tokens_per_pos_total", "position")
    drafts, tokens, right = (
        page.value(f"spec_decode_num_{name}_total")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert 0 < right <= tokens >= drafts > 0
    numbers = [by_place[str(place)] for place in range(len(by_place))]
    assert sum(numbers) == right and numbers == sorted(numbers, reverse=True)
