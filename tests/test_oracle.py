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
# Chunks concern these, and what depends on positions or has states in another way.
CHUNKED = (
    *PARTS,
    "minimax",
    "kimi-linear",
    "zamba2",
    "falcon-h1",
    "phi4-mini",
    "ministral3",
    "opt",
)


def names(usual: tuple[str, ...]) -> list[object]:
    """All families, of which others than the usual ones are left to `make soak`."""
    return [pytest.param(n, marks=() if n in usual else pytest.mark.thorough) for n in NAMES]


@pytest.fixture(scope="module", params=NAMES)
def case(request, tmp_path_factory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_tokens_equal_those_of_transformers(case):
    one_batch(case)


@pytest.mark.parametrize("case", names(CHUNKED), indirect=True)
def test_tokens_do_not_depend_on_chunks(case):
    chunked_prompts(case)


@pytest.mark.parametrize("scenario", [prefix_hits, preemption])
@pytest.mark.parametrize("case", names(PARTS), indirect=True)
def test_tokens_do_not_depend_on_the_cache(case, scenario):
    scenario(case)


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_generate_gives_the_same_answers(tmp_path, family):
    case = Case(family, tmp_path)
    work = case.work[:4]
    assert tokens_of(run(case.engine(), work)) == [case.oracle.generate(*item) for item in work]
