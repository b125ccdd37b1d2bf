"""Requests that take every way through an engine, and what it answers."""

from __future__ import annotations

from typing import NamedTuple

from effort import ALL

from paged_backend.engine.engine import Engine
from paged_backend.values.outputs import SequenceOutput, TokenLogprobs
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

NUM_EACH = 5 if ALL else 3  # requests of two sorts, with prompts of different lengths
SHARED = [(7 * i) % 190 + 3 for i in range(40)]  # the prefix of most prompts


class Answers(NamedTuple):
    """What an engine has answered, and how often it did what is to be tested."""

    tokens: dict[tuple[str, int], list[int]]  # by request and completion
    logprobs: dict[str, list[TokenLogprobs]]  # by request, of prompt and answer
    num_preemptions: int
    num_hits: int


def all_sorts() -> list[Request]:
    """Long and short prompts, greedy and seeded, with several completions, some with logprobs."""
    length = {"max_tokens": 14 if ALL else 9, "ignore_eos": True}
    greedy = {"temperature": 0, **length}
    seeded = {"temperature": 1.0, "top_p": 0.9, "seed": 3, **length}
    return [
        *(
            Request(f"g{i}", [*SHARED[: 20 + 3 * i], i + 5], SamplingParams(**greedy))
            for i in range(5)[-NUM_EACH:]
        ),
        *(
            Request(f"s{i}", [*SHARED[: 12 + 5 * i], i + 9], SamplingParams(**seeded, n=1 + i % 2))
            for i in range(5)[-NUM_EACH:]
        ),
        Request("penalties", SHARED[5:], SamplingParams(**seeded, repetition_penalty=1.3)),
        Request("logprobs", SHARED[:30], SamplingParams(**greedy, logprobs=3, prompt_logprobs=2)),
    ]


def answers_of(engine: Engine, requests: list[Request] | None = None) -> Answers:
    """Submit all requests at once, and once more after they have ended."""
    tokens: dict[tuple[str, int], list[int]] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}
    for turn in ("", "again-"):
        for request in all_sorts() if requests is None else requests:
            name = turn + request.request_id
            engine.add_request(Request(name, request.prompt_token_ids, request.params))
        while engine.has_unfinished:
            for output in engine.step():
                tokens.setdefault((output.request_id, output.index), []).extend(
                    output.new_token_ids
                )
                logprobs.setdefault(output.request_id, []).extend(_logprobs(output))
            engine.scheduler.check_invariants()
    stats = engine.stats()
    return Answers(tokens, logprobs, stats.num_preemptions, stats.num_cache_hits)


def _logprobs(output: SequenceOutput) -> list[TokenLogprobs]:
    return [*(output.prompt_logprobs or ()), *(output.logprobs or ())]
