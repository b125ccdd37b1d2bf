"""What the engine generates without Dynamo."""

from __future__ import annotations

import pytest
from worker_requests import PARAMS, PROMPTS

from paged_backend import LLM
from paged_backend.values.outputs import CompletionOutput


@pytest.fixture(scope="session")
def expected() -> list[CompletionOutput]:
    """The answer to each of the requests."""
    return [output.outputs[0] for output in LLM("demo", device="cpu").generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="session")
def expected_tokens(expected: list[CompletionOutput]) -> list[list[int]]:
    """The tokens of each answer."""
    return [completion.token_ids for completion in expected]


@pytest.fixture(scope="session")
def expected_texts(expected: list[CompletionOutput]) -> list[str]:
    """The text of each answer."""
    return [completion.text for completion in expected]
