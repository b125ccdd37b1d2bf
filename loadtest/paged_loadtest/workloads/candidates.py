"""A request before it is known to fit the model."""

from __future__ import annotations

from dataclasses import dataclass

from paged_loadtest.request import Message, Request, Turn
from paged_loadtest.workloads.tokens import Tokens


@dataclass(frozen=True, slots=True)
class Candidate:
    """A request, its place in the workload for error messages, and how long it grows."""

    place: str
    request: Request
    num_tokens: int  # of prompt and answer, at the end of a conversation


def chat_candidate(
    place: str,
    system: list[Message],
    turns: list[Turn],
    tokens: Tokens,
    *,
    ignore_eos: bool,
) -> Candidate:
    """A conversation, whose last call has all the earlier questions and answers in its prompt."""
    questions: list[Message] = [{"role": "user", "content": turn.content} for turn in turns]
    history: list[Message] = [*system]
    for question in questions:
        history += [question, {"role": "assistant", "content": ""}]
    first, *later = turns
    request = Request(
        prompt=(*system, questions[0]),
        max_tokens=first.max_tokens,
        ignore_eos=ignore_eos,
        later=tuple(later),
    )
    answers = sum(turn.max_tokens for turn in turns)
    return Candidate(place, request, tokens.count_chat(history[:-1]) + answers)
