"""Greedy tokens equal transformers' own, token for token, in float32, whatever the schedule."""

from __future__ import annotations

import pytest
from checkpoints import FAMILIES
from oracle import run, tokens_of
from scenarios import Case, chunked_prompts, one_batch, preemption, prefix_hits

# Together they use all that the fallback has to get right: linear layers of another class, learned
# positions, layers with and without a window, heads and experts that transformers computes, keys
# and values of other layers.
FALLBACKS = "gpt2", "opt", "cohere2", "jetmoe", "nemotron", "gemma3n_text"


NAMES = *FAMILIES, *FALLBACKS
# Prefix hits and preemption concern the scheduler and the cache: these families have each kind of
# attention, of states and of experts.
PARTS = (
    *("llama3", "llama4", "gemma3", "gemma4-moe", "gpt-oss", "deepseek-v3", "qwen3-next", "lfm2"),
    *("nemotron-h", "jamba", "recurrent-gemma", "cohere2", "mamba", "mamba2"),
)


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("scenario", [one_batch, chunked_prompts])
def test_tokens_equal_those_of_transformers(case, scenario):
    scenario(case)


@pytest.mark.parametrize("scenario", [prefix_hits, preemption])
@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=() if n in PARTS else pytest.mark.thorough) for n in NAMES],
    indirect=True,
)
def test_tokens_do_not_depend_on_the_cache(case, scenario):
    scenario(case)


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_generate_gives_the_same_answers(tmp_path, family):
    case = Case(family, tmp_path)
    work = case.work[:4]
    assert tokens_of(run(case.engine(), work)) == [case.oracle.generate(*item) for item in work]
