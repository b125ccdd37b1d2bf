"""Turns Dynamo's requests into requests for the engine, and its outputs into Dynamo's chunks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from paged_backend.grammar.client import GrammarChecker
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import NOT_ENABLED, LoRARequest, unsupported
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.outputs import FinishReason, SequenceOutput
from paged_backend.values.request import Request, RequestLimits, RequestOptions
from paged_backend.values.sampling_defaults import SamplingDefaults
from paged_backend.values.sampling_params import SamplingParams

Chunk: TypeAlias = dict[str, Any]
"""A part of an answer, with the fields of Dynamo's ``GenerateChunk``."""

_STOPS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
_PASSED_STOPS = ("max_tokens", "min_tokens", "ignore_eos")
# Requests for other kinds of workers, or with inputs that are no tokens.
_REFUSED = (
    *("prefill_result", "bootstrap_info", "encoder_result", "prompt_embeds"),
    *("multi_modal_data", "mm_processor_kwargs", "mm_routing_info"),
)
_REASONS = {FinishReason.ABORT: "cancelled", FinishReason.CACHE_THRESHOLD: "stop"}


class RequestReader:
    """Checks Dynamo's requests against one loaded model.

    Args:
        limits: limits of requests.
        defaults: parameters of requests that leave them out.
        grammars: translates constraints.
        adapters: the LoRA adapters by their names.
    """

    def __init__(
        self,
        limits: RequestLimits,
        defaults: SamplingDefaults,
        grammars: GrammarChecker,
        adapters: Mapping[str, LoRARequest],
    ) -> None:
        self._limits = limits
        self._defaults = defaults
        self._grammars = grammars
        self._adapters = adapters

    def read(self, request_id: str, values: Mapping[str, Any]) -> Request:
        """Check one request. A request with a constraint blocks until it has been translated.

        Args:
            request_id: the id by which the engine will know it.
            values: the request, with the fields of Dynamo's ``GenerateRequest``; ``token_ids`` is
                a list.

        Raises:
            InvalidRequest: naming the field and the allowed range.
            RequestRefused: the constraint cannot be checked at present.
        """
        for name in _REFUSED:
            if values.get(name):
                raise InvalidRequest(name, "cannot be used: this worker takes tokens only")
        lora = self._adapter((values.get("routing") or {}).get("lora_name"))
        token_ids = values["token_ids"]
        params = self._sampling_params(values, len(token_ids))
        self._limits.check(token_ids, params)
        self._limits.check_total_logprobs(len(token_ids), params)
        options = RequestOptions.take_from({"cache_salt": _nvext(values).get("cache_salt")})
        grammar = ""
        if params.structured_outputs is not None:
            constraint = OutputConstraint(params.structured_outputs)
            grammar = self._grammars.grammar(constraint, tenant="", salt=options.cache_salt)
            params = replace(params, structured_outputs=None)
        return Request(
            request_id, token_ids, params, options.cache_salt, grammar=grammar, lora=lora
        )

    def _adapter(self, name: str | None) -> LoRARequest | None:
        """Return the adapter of a name; None for a request without a name."""
        if not name:
            return None
        if not self._limits.has_adapters:
            raise InvalidRequest.verbatim("lora_name", NOT_ENABLED)
        if name not in self._adapters:
            raise InvalidRequest.verbatim("lora_name", unsupported(name, self._adapters))
        return self._adapters[name]

    def _sampling_params(self, values: Mapping[str, Any], num_tokens: int) -> SamplingParams:
        given = _without_nulls(values.get("sampling_options"))
        stops = _without_nulls(values.get("stop_conditions"))
        outputs = _without_nulls(values.get("output_options"))
        if "max_thinking_tokens" in stops:
            raise InvalidRequest("max_thinking_tokens", "cannot be used: reasoning has no limit")
        if "prompt_logprobs" in outputs:
            raise InvalidRequest("prompt_logprobs", "cannot be used: Dynamo gets none of them")
        # Dynamo finds stop strings in its own text, and cancels the request.
        given |= {name: stops[name] for name in _PASSED_STOPS if name in stops}
        given["stop_token_ids"] = sorted({id_ for name in _STOPS for id_ in stops.get(name, ())})
        if "logprobs" in outputs:
            given["logprobs"] = outputs["logprobs"]
        completed = self._defaults.completed(given, self._limits.max_output_tokens)
        longest = min(self._limits.max_model_len - num_tokens, self._limits.max_output_tokens)
        completed.setdefault("max_tokens", max(longest, 1))
        return self._defaults.limited(SamplingParams.from_mapping(completed))


def is_slow(values: Mapping[str, Any]) -> bool:
    """Return whether reading a request may take long, because it has a constraint."""
    return bool((values.get("sampling_options") or {}).get("guided_decoding"))


def read_chunk(output: SequenceOutput, num_prompt_tokens: int, num_tokens: int) -> Chunk:
    """Return what Dynamo gets of an output.

    Args:
        output: new tokens of one completion.
        num_prompt_tokens: number of tokens of the prompt.
        num_tokens: number of tokens of the completion so far, those of ``output`` included.
    """
    chunk: Chunk = {"token_ids": output.new_token_ids, "index": output.index}
    if output.logprobs is not None:
        chunk["log_probs"] = [entry.logprob for entry in output.logprobs]
        chunk["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token_id, "token": None, "logprob": logprob}
                for rank, (token_id, logprob) in enumerate(
                    zip(entry.top_token_ids, entry.top_logprobs, strict=True), start=1
                )
            ]
            for entry in output.logprobs
        ]
    if output.finish_reason is not None:
        chunk["finish_reason"] = _finish_reason(output.finish_reason, output.problem)
        chunk["completion_usage"] = {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": num_prompt_tokens + num_tokens,
            "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
        }
    return chunk


def _finish_reason(reason: FinishReason, problem: str) -> str:
    """Return Dynamo's word for a finish reason; an error is followed by its text."""
    if reason is FinishReason.ERROR:
        return f"error: {problem or 'the request has failed'}"
    return _REASONS.get(reason, str(reason))


def _without_nulls(values: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (values or {}).items() if value is not None}


def _nvext(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a client's request that is named ``nvext``, which Dynamo passes on."""
    return (values.get("extra_args") or {}).get("nvext") or {}
