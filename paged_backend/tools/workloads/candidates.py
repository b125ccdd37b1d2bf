"""Requests not yet checked to fit the model."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.tools.workloads.request import Message, Turn, WorkloadRequest
from paged_backend.tools.workloads.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request, its place in the workload for error messages, and its final length."""

    place: str
    request: WorkloadRequest
    num_tokens: int  # prompt and response, at the end of a conversation


def chat_candidate(
    place: str,
    system: list[Message],
    turns: list[Turn],
    tokens: Tokens,
    *,
    ignore_eos: bool,
) -> Candidate:
    """Create a conversation; its length is the last request's, with the whole history."""
    questions: list[Message] = [{"role": "user", "content": turn.content} for turn in turns]
    history: list[Message] = [*system]
    for question in questions:
        history += [question, {"role": "assistant", "content": ""}]
    first, *later = turns
    request = WorkloadRequest(
        prompt=(*system, questions[0]),
        max_tokens=first.max_tokens,
        ignore_eos=ignore_eos,
        later=tuple(later),
    )
    answers = sum(turn.max_tokens for turn in turns)
    return Candidate(place, request, tokens.count_chat(history[:-1]) + answers)
