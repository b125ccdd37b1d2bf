"""Greedy calls of the engine in this process."""

from __future__ import annotations

from typing import cast

from paged_loadtest.request import Request as Work

from paged_backend.engine import Engine
from paged_backend.request import Request
from paged_backend.sampling_params import SamplingParams


def prompt_ids(work: Work) -> list[int]:
    """The prompt of a workload that is made of token ids."""
    return list(cast(tuple[int, ...], work.prompt))


def greedy(name: str, tokens: list[int], max_tokens: int | None = None) -> Request:
    """A request whose end-of-sequence token is ignored."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, tokens, params)


def drain(engine: Engine) -> None:
    """Make steps until nothing is under way."""
    while engine.has_unfinished:
        engine.step()
