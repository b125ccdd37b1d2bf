"""Shared by both Triton protocols: the tensors of vllm_backend's contract, plus some of ours."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError
from paged_loadtest.protocols.decoding import ResponseDecoder

NEEDED = ("return_num_input_tokens", "return_num_output_tokens")
"""Inputs that make the server return token counts; they are needed for every request."""

_ASKED_FOR = (*NEEDED, "return_finish_reason", "return_num_cached_tokens")
_NOT_FINISHED = "None"
_ABORTED = "abort"


def check_inputs(model: str, inputs: Collection[str]) -> None:
    """Check that a Triton model has the inputs that make it report token counts.

    Raises:
        ConfigError: an input is missing.
    """
    missing = [name for name in NEEDED if name not in inputs]
    if missing:
        raise ConfigError(
            f"--model: {model} has no input {missing[0]}, by which tokens are counted; "
            "give a model with vllm_backend's inputs"
        )


def asked_for(inputs: Collection[str] | None) -> Iterable[str]:
    """Return the ``return_*`` inputs to set, given the model's inputs (None: one of our models)."""
    return [name for name in _ASKED_FOR if inputs is None or name in inputs]


def sampling_parameters(request: WorkloadRequest, cache_salt: str | None) -> Mapping[str, Any]:
    """Return parameters for greedy sampling with the request's length."""
    return {
        "temperature": 0,
        "repetition_penalty": 1.0,  # a checkpoint's own would be work that vllm_backend does not do
        "max_tokens": request.max_tokens,
        **({"ignore_eos": True} if request.ignore_eos else {}),
        **({} if cache_salt is None else {"cache_salt": cache_salt}),
    }


def take_response(
    decoder: ResponseDecoder[Any],
    now_s: float,
    *,
    text: str,
    finish_reason: str,
    num_output_tokens: int,
    num_input_tokens: int,
    num_cached_tokens: int | None,
) -> None:
    """Add one response to a decoder's timeline and texts."""
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
