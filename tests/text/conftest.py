from __future__ import annotations

import functools

import pytest
from sample_tokenizers import KINDS

from paged_backend.text.tokenizer import Tokenizer


@functools.cache
def made(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


@pytest.fixture(params=list(KINDS))
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return made(request.param)


@pytest.fixture
def byte_level() -> Tokenizer:
    return made("byte_level")


@pytest.fixture
def byte_fallback() -> Tokenizer:
    return made("byte_fallback")
