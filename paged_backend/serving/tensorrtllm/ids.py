"""The model ``tensorrt_llm``: token ids in, token ids out; or the LLM API, with text."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np

from paged_backend.serving import fields, triton
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.serving.model import TritonSender
from paged_backend.serving.requests.open_requests import IncomingRequest
from paged_backend.serving.requests.tasks import TaskKind
from paged_backend.serving.tensorrtllm.arrays import Outputs, padded
from paged_backend.serving.tensorrtllm.batch import BatchResponses, RowSender
from paged_backend.serving.tensorrtllm.completions import COMMON_OUTPUTS
from paged_backend.serving.tensorrtllm.lora import LLM_API_LORA_INPUTS
from paged_backend.serving.tensorrtllm.model import BatchModel, RowRequest, call_id
from paged_backend.serving.tensorrtllm.sampling import IDS, LLM_API, PREFIX, without_prefix
from paged_backend.serving.tensorrtllm.specs import SAMPLING_INPUTS, TEXT_INPUTS, specs
from paged_backend.serving.tensorrtllm.text import text_prompt
from paged_backend.values.contract import TensorDeclaration
from paged_backend.values.errors import InvalidRequest

# The LLM API's own outputs.
_REASONS = ("finish_reason", "stop_reason")
_LLM_API_MAX_TOKENS = 32  # its default
_NO_STOP_REASON = "None"  # stop reason of a completion that no stop string has ended
_LLM_API_INPUTS = (
    *specs("TYPE_INT32", 1, *(f"{PREFIX}{name}" for name in ("max_tokens", "top_k", "best_of"))),
    *specs("TYPE_FP32", 1, *(f"{PREFIX}{name}" for name in ("temperature", "top_p"))),
    *specs("TYPE_FP32", 1, *(f"{PREFIX}{n}_penalty" for n in ("frequency", "presence"))),
    *specs("TYPE_UINT64", 1, f"{PREFIX}seed"),
    *specs("TYPE_STRING", -1, f"{PREFIX}stop"),
    *specs("TYPE_BOOL", 1, f"{PREFIX}exclude_input_from_output"),
    *specs("TYPE_BOOL", 1, f"{PREFIX}return_perf_metrics"),
    *specs("TYPE_BOOL", 1, *(f"return_{name}" for name in _REASONS), "return_cumulative_logprob"),
    *LLM_API_LORA_INPUTS,
)
# Fields that belong to one kind of prompt.
_IDS_ONLY = (
    *("input_ids", "input_lengths", "request_output_len"),
    *("runtime_top_k", "runtime_top_p"),
)
_TEXT_ONLY = ("max_tokens", "top_k", "top_p", *(spec.name for spec in _LLM_API_INPUTS))


class TritonPythonModel(BatchModel):
    """Takes and returns token ids, or text if the request has ``text_input``."""

    stream_flag = "streaming"
    inputs = (
        *specs("TYPE_INT32", -1, "input_ids", "decoder_input_ids", "draft_input_ids"),
        *specs("TYPE_INT32", 1, "input_lengths", "decoder_input_lengths", "request_output_len"),
        *specs("TYPE_INT32", 1, "runtime_top_k", "runtime_top_p_reset_ids"),
        *specs("TYPE_FP32", 1, "runtime_top_p", "runtime_top_p_min", "runtime_top_p_decay"),
        *specs("TYPE_FP32", 1, "len_penalty"),
        *specs("TYPE_BOOL", 1, "streaming", "stop"),
        *specs("TYPE_INT32", (2, -1), "stop_words_list", "bad_words_list"),
        *specs("TYPE_FP32", -1, "embedding_bias"),
        *specs("TYPE_FP32", (-1, -1), "draft_logits"),
        *specs("TYPE_FP32", 1, "draft_acceptance_threshold"),
        *specs("TYPE_UINT64", -1, "prompt_table_extra_ids"),
        *specs("TYPE_INT32", 1, "lookahead_window_size", "lookahead_ngram_size"),
        *specs("TYPE_INT32", 1, "lookahead_verification_set_size"),
        *specs("TYPE_INT32", -1, "retention_token_range_starts", "retention_token_range_ends"),
        *specs("TYPE_INT32", -1, "retention_token_range_priorities"),
        *specs("TYPE_INT32", -1, "retention_token_range_durations_ms"),
        *specs("TYPE_INT32", 1, "retention_decode_priority", "retention_decode_duration_ms"),
        *SAMPLING_INPUTS,
        *TEXT_INPUTS,
        *_LLM_API_INPUTS,
    )
    outputs = (
        TensorDeclaration("output_ids", "TYPE_INT32", (-1, -1)),
        *specs("TYPE_STRING", -1, "text_output", *_REASONS),
        TensorDeclaration("cumulative_logprob", "TYPE_FP32", -1),
        *COMMON_OUTPUTS,
    )

    def execute(self, requests: list[Any]) -> None:
        """Check and submit requests; a request to stop cancels those with the same id."""
        super().execute([request for request in requests if not self._stops(request)])

    def _stops(self, request: Any) -> bool:
        """Handle a request to stop another; returns False for any other request."""
        tensors = triton.read_tensors(request, specs("TYPE_BOOL", 1, "stop"))
        if "stop" not in tensors or not tensors["stop"].any():
            return False
        sender = TritonSender(request.get_response_sender(), logging.DEBUG)
        if not request.request_id():
            sender.fail(InvalidRequest("stop", "must come with the request id of a request"))
            return True
        cancel = {
            "task": as_strings([TaskKind.CANCEL]),
            "call_id": as_strings([call_id(request.request_id())]),
        }
        stopping = BatchResponses(sender, 1, is_stream=False, is_decoupled=self._is_decoupled)
        nothing = RowSender(stopping, 0, lambda answer: iter(()), lambda error: error)
        self._front_end.submit(IncomingRequest(cancel, "", None, nothing))
        return True

    def _row(self, tensors: Tensors, *, is_stream: bool) -> RowRequest:
        if "text_input" in tensors:
            _refuse_others(tensors, _IDS_ONLY, "token ids")
            return _text_row(without_prefix(tensors))
        _refuse_others(tensors, _TEXT_ONLY, "text_input")
        prompt = _prompt(tensors)
        # A stream never contains the prompt.
        echo = not (is_stream or fields.flag(tensors, "exclude_input_in_output"))
        pad_id = self._pad_id(tensors)

        def convert(model: Outputs, common: Outputs) -> Outputs:
            ends = np.cumsum(common["sequence_length"][0])[:-1]
            parts = np.split(model["output_ids"], ends)
            rows = [np.concatenate([prompt, part]) if echo else part for part in parts]
            found = {"output_ids": padded(rows, pad_id)}  # first: some clients take the first one
            return found | common | {"sequence_length": np.array([list(map(len, rows))], np.int32)}

        return RowRequest(IDS, tensors, {"input_ids": prompt}, convert, ("output_ids",))

    def _pad_id(self, tensors: Tensors) -> int:
        """Return the token after the end of a shorter beam: the client's, or the end token."""
        given = [int(fields.single(n, tensors[n])) for n in ("pad_id", "end_id") if n in tensors]
        known = [token_id for token_id in given if token_id >= 0]
        return known[0] if known else self._loaded.tokenizer.eos_token_id or 0


def _refuse_others(tensors: Tensors, names: Iterable[str], of: str) -> None:
    """Refuse the fields that have no meaning for this kind of prompt."""
    for name in names:
        if name in tensors and tensors[name].any():
            raise InvalidRequest(name, f"can only be used with {of}")


def _text_row(tensors: dict[str, Array]) -> RowRequest:
    """Return what a request to the LLM API asks for."""
    tensors.setdefault("max_tokens", np.array([_LLM_API_MAX_TOKENS]))
    flags = (*_REASONS, "cumulative_logprob")
    wanted = [name for name in flags if fields.flag(tensors, f"return_{name}")]
    echo = not fields.flag(tensors, "exclude_input_in_output", default=True)

    def convert(model: Outputs, common: Outputs) -> Outputs:
        found = {name: model[name] for name in wanted}
        if "stop_reason" in found:
            reasons = fields.strings("stop_reason", found["stop_reason"])
            found["stop_reason"] = as_strings(text or _NO_STOP_REASON for text in reasons)
        return {"text_output": model["text_output"], **common, **found}

    return RowRequest(LLM_API, tensors, text_prompt(tensors, echo=echo), convert, wanted)


def _prompt(tensors: Tensors) -> Array:
    """Return the token ids of a prompt, without the padding.

    Raises:
        InvalidRequest: there are none, or their number does not fit the array.
    """
    if "input_ids" not in tensors:
        raise InvalidRequest("input_ids", "is missing; give token ids, or text as text_input")
    # A copy: the server takes the memory back before the answer is complete.
    ids = tensors["input_ids"].reshape(-1).copy()
    if "input_lengths" not in tensors:
        return ids
    length = fields.single("input_lengths", tensors["input_lengths"]).item()
    if not 0 < length <= len(ids):
        raise InvalidRequest("input_lengths", f"must be from 1 to {len(ids)}, got {length}")
    return ids[:length]
