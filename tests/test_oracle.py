"""Greedy tokens equal transformers' own, token for token, in float32, whatever the schedule."""

from __future__ import annotations

import pytest
from checkpoints import FAMILIES
from oracle import run, tokens_of
from scenarios import SCENARIOS, Case

# Together they use all that the fallback has to get right: linear layers of another class, learned
# positions, layers with and without a window, heads and experts that transformers computes, keys
# and values of other layers.
FALLBACKS = "gpt2", "opt", "cohere2", "jetmoe", "nemotron", "gemma3n_text"


@pytest.fixture(scope="module", params=[*FAMILIES, *FALLBACKS])
def case(request, tmp_path_factory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tokens_equal_those_of_transformers(case, scenario):
    scenario(case)


@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_generate_gives_the_same_answers(tmp_path, family):
    case = Case(family, tmp_path)
    work = case.work[:4]
    assert tokens_of(run(case.engine(), work)) == [case.oracle.generate(*item) for item in work]
