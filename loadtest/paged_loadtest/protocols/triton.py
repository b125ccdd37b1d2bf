"""What both of Triton's wires carry: the tensors of vllm_backend's contract, and a few of ours."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from paged_loadtest.protocols.decoding import Decoder
from paged_loadtest.request import Request

NEEDED = ("return_num_input_tokens", "return_num_output_tokens")
"""Inputs without which nobody counts the tokens."""

_ASKED_FOR = (*NEEDED, "return_finish_reason", "return_num_cached_tokens")
_NOT_FINISHED = "None"
_ABORTED = "abort"


def asked_for(inputs: Collection[str] | None) -> Iterable[str]:
    """What to ask of a model that has these inputs; None stands for a model of ours."""
    return [name for name in _ASKED_FOR if inputs is None or name in inputs]


def sampling_parameters(request: Request, cache_salt: str | None) -> Mapping[str, Any]:
    """Greedy, and as long as the request says."""
    return {
        "temperature": 0,
        "max_tokens": request.max_tokens,
        **({"ignore_eos": True} if request.ignore_eos else {}),
        **({} if cache_salt is None else {"cache_salt": cache_salt}),
    }


def take_response(
    decoder: Decoder[Any],
    now_s: float,
    *,
    text: str,
    finish_reason: str,
    num_output_tokens: int,
    num_input_tokens: int,
    num_cached_tokens: int | None,
) -> None:
    """Put one response into a decoder's timeline."""
    timeline = decoder.timeline
    if num_output_tokens:
        timeline.arrivals_s.append(now_s)
        timeline.num_output_tokens += num_output_tokens
    timeline.num_input_tokens = num_input_tokens
    timeline.num_cached_tokens = num_cached_tokens
    if text:
        decoder.texts.append(text)
    if finish_reason != _NOT_FINISHED:
        decoder.done = True
        if finish_reason == _ABORTED:
            decoder.fail("the server aborted the request")
