"""Workloads at a real server: it counts the tokens asked for, and finds what prompts share."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_backend.tools.workloads import TokenizerContext, WorkloadOptions, make_requests

pytestmark = pytest.mark.server

TRACE = Path(__file__).parent.parent.parent / "loadtest" / "workloads" / "sample_trace.jsonl"


def ask(client, **values):
    """The requests of a workload, and what became of each, one after the other."""
    info = client.info()
    material = TokenizerContext(info.vocab_size, info.max_model_len, "demo")
    requests = make_requests(WorkloadOptions(**values), material)
    return [
        (
            request,
            client.generate(
                list(request.prompt) if isinstance(request.prompt, tuple) else request.prompt,
                max_tokens=request.max_tokens,
                ignore_eos=request.ignore_eos,
                temperature=0,
            ),
        )
        for request in requests
    ]


@pytest.mark.parametrize("prompt_format", ["ids", "text", "chat"])
def test_prompts_and_answers_have_their_lengths(client, prompt_format):
    values = {"num_prompts": 6, "input_len": "uniform:min=10,max=90", "output_len": "3"}
    asked = ask(client, prompt_format=prompt_format, **values)
    lengths = [len(request.prompt) for request, _ in ask(client, prompt_format="ids", **values)]
    assert [completion.num_input_tokens for _, completion in asked] == lengths
    assert all(completion.answers[0].num_output_tokens == 3 for _, completion in asked)


@pytest.mark.parametrize("prompt_format", ["ids", "text"])
def test_all_but_the_first_of_a_group_find_its_prefix(client, prompt_format):
    asked = ask(
        client,
        dataset_name="shared-prefix",
        prompt_format=prompt_format,
        seed=7,
        num_prompts=12,
        num_prefixes=3,
        prefix_len=64,
        input_len="20",
        output_len="1",
    )
    assert all(completion.num_input_tokens == 84 for _, completion in asked)
    cached = sorted(completion.num_cached_tokens for _, completion in asked)
    assert cached == [0] * 3 + [64] * 9


def test_requests_of_a_trace_find_the_blocks_of_those_before(client):
    asked = ask(client, dataset_name="trace", dataset_path=str(TRACE), num_prompts=12, seed=11)
    known: set[tuple[int, ...]] = set()
    for request, completion in asked:
        whole = [request.prompt[: 512 * n] for n in (1, 2, 3) if 512 * n < len(request.prompt)]
        found = [prefix for prefix in whole if prefix in known]
        assert completion.num_cached_tokens == max(map(len, found), default=0)
        known.update(whole)
    assert known
