"""Masks that are computed while a step is under way."""

from __future__ import annotations

import pytest
from masking import MaskingExecutor
from oracle import EOS, Oracle, make_engine, mixed_work

from paged_backend.engine.engine import Engine
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

ALLOWED = [EOS, *range(40, 80), 198]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle("llama3", tmp_path_factory.mktemp("llama3"))


def answers(engine: Engine, **params: object) -> dict[str, list[int]]:
    """The tokens of six requests; the second, fourth and sixth may have further parameters."""
    tokens: dict[str, list[int]] = {}
    for index, (prompt, _) in enumerate(mixed_work(6)):
        more = params if index % 2 else {}
        sampled = SamplingParams(
            max_tokens=12, seed=index, temperature=index % 3, logprobs=1, **more
        )
        engine.add_request(Request(str(index), prompt, sampled))
    while engine.has_unfinished:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mask_restricts_its_sequence_only(oracle: Oracle, dtype: str) -> None:
    expected = answers(make_engine(oracle.folder, dtype=dtype), allowed_token_ids=ALLOWED)
    masked = make_engine(oracle.folder, dtype=dtype)
    masked.executor = MaskingExecutor(masked.executor, ALLOWED)
    assert answers(masked) == expected
    assert any(set(tokens) - set(ALLOWED) for tokens in expected.values())
