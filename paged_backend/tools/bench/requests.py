"""Greedy requests to the engine in this process."""

from __future__ import annotations

import time
from typing import cast

from paged_backend.engine.engine import Engine
from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams


def prompt_ids(work: WorkloadRequest) -> list[int]:
    """The token ids of a request's prompt; the workload's prompt format must be `ids`."""
    return list(cast(tuple[int, ...], work.prompt))


def greedy(
    name: str, tokens: list[int], max_tokens: int | None = None, grammar: str = ""
) -> Request:
    """Make a greedy request that ignores the end-of-sequence token."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(name, tokens, params, grammar=grammar)


def drain(engine: Engine) -> None:
    """Run steps until no request is in flight."""
    while engine.has_unfinished:
        engine.step()


def first_token_ms(engine: Engine, tokens: list[int]) -> float:
    """Milliseconds from a request to its first token, in an engine without other requests."""
    started = time.perf_counter()
    engine.add_request(greedy("first-token", tokens))
    while not engine.step():
        pass
    seconds = time.perf_counter() - started
    engine.abort_request("first-token")
    drain(engine)
    return seconds * 1e3
