"""The tensors that clients and models exchange: vllm_backend's, and token ids.

The models in `serving` read and write them, and `launch` declares them in ensembles.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class TensorSpec(NamedTuple):
    """A tensor in the model's configuration; -1 stands for any length."""

    name: str
    data_type: str
    dims: int | tuple[int, ...]
    optional: bool = True

    def as_config(self) -> dict[str, Any]:
        """The entry in Triton's model configuration."""
        return {
            "name": self.name,
            "data_type": self.data_type,
            "dims": list(self.dims) if isinstance(self.dims, tuple) else [self.dims],
            **({"optional": True} if self.optional else {}),
        }


INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", 1),
    TensorSpec("text_pair", "TYPE_STRING", 1),  # the second text of the task ``score``
    TensorSpec("input_ids", "TYPE_INT32", -1),
    TensorSpec("messages", "TYPE_STRING", 1),
    TensorSpec("image", "TYPE_STRING", -1),
    TensorSpec("embedding_request", "TYPE_STRING", 1),
    TensorSpec("task", "TYPE_STRING", 1),
    TensorSpec("stream", "TYPE_BOOL", 1),
    TensorSpec("sampling_parameters", "TYPE_STRING", 1),
    # Lists that JSON fields of `generate` can carry only as tensors.
    TensorSpec("stop", "TYPE_STRING", -1),
    TensorSpec("stop_token_ids", "TYPE_INT32", -1),
    TensorSpec("bad_words", "TYPE_STRING", -1),
    TensorSpec("allowed_token_ids", "TYPE_INT32", -1),
    TensorSpec("tools", "TYPE_STRING", 1),
    TensorSpec("tool_choice", "TYPE_STRING", 1),
    TensorSpec("parallel_tool_calls", "TYPE_BOOL", 1),
    TensorSpec("call_id", "TYPE_STRING", 1),
    TensorSpec("pass_through", "TYPE_STRING", 1),
    TensorSpec("add_special_tokens", "TYPE_BOOL", 1),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL", 1),
    TensorSpec("return_finish_reason", "TYPE_BOOL", 1),
    TensorSpec("return_stop_reason", "TYPE_BOOL", 1),
    TensorSpec("return_cumulative_logprob", "TYPE_BOOL", 1),
    TensorSpec("return_logprobs", "TYPE_BOOL", 1),
    TensorSpec("return_prompt_logprobs", "TYPE_BOOL", 1),
    TensorSpec("return_context_logits", "TYPE_BOOL", 1),
    TensorSpec("return_generation_logits", "TYPE_BOOL", 1),
    TensorSpec("return_num_input_tokens", "TYPE_BOOL", 1),
    TensorSpec("return_num_cached_tokens", "TYPE_BOOL", 1),
    TensorSpec("return_num_output_tokens", "TYPE_BOOL", 1),
    TensorSpec("return_output_ids", "TYPE_BOOL", 1),
    TensorSpec("return_metrics", "TYPE_BOOL", 1),
    TensorSpec("return_context_ids", "TYPE_BOOL", 1),
    TensorSpec("return_tool_calls", "TYPE_BOOL", 1),
    TensorSpec("return_reasoning", "TYPE_BOOL", 1),
)

OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", -1, optional=False),
    TensorSpec("finish_reason", "TYPE_STRING", -1, optional=False),
    TensorSpec("stop_reason", "TYPE_STRING", -1, optional=False),
    TensorSpec("cumulative_logprob", "TYPE_FP32", -1, optional=False),
    TensorSpec("logprobs", "TYPE_STRING", -1, optional=False),
    TensorSpec("prompt_logprobs", "TYPE_STRING", 1, optional=False),
    TensorSpec("context_logits", "TYPE_FP32", (-1, -1), optional=False),
    TensorSpec("generation_logits", "TYPE_FP32", (-1, -1), optional=False),
    TensorSpec("num_input_tokens", "TYPE_UINT32", 1, optional=False),
    TensorSpec("num_cached_tokens", "TYPE_UINT32", 1, optional=False),
    TensorSpec("num_output_tokens", "TYPE_UINT32", -1, optional=False),
    TensorSpec("output_ids", "TYPE_INT32", -1, optional=False),
    TensorSpec("metrics", "TYPE_STRING", -1, optional=False),
    # The answer to the task ``embed``.
    TensorSpec("embedding", "TYPE_FP32", -1, optional=False),
    # The answer to the task ``score``.
    TensorSpec("score", "TYPE_FP32", 1, optional=False),
    # Parts of the answer that `text_output` then leaves out.
    TensorSpec("tool_calls", "TYPE_STRING", -1, optional=False),
    TensorSpec("reasoning", "TYPE_STRING", -1, optional=False),
    # What a stateless detokenizer needs to continue: StreamState, for each completion.
    TensorSpec("context_ids", "TYPE_INT32", -1, optional=False),
    TensorSpec("num_context_ids", "TYPE_UINT32", -1, optional=False),
    TensorSpec("num_held_ids", "TYPE_UINT32", -1, optional=False),
    TensorSpec("sequence_length", "TYPE_INT32", -1, optional=False),
    # The input of that name, with every response.
    TensorSpec("pass_through", "TYPE_STRING", 1, optional=False),
)


# The input of a pipeline's last step that has the text of a parsed answer.
PARSED_TEXT = "parsed_text"
# Inputs that a pipeline's first step and its model both need.
TOOL_INPUTS = (
    *("tools", "tool_choice", "parallel_tool_calls"),
    *("return_tool_calls", "return_reasoning"),
)


def named(specs: Iterable[TensorSpec], *names: str) -> tuple[TensorSpec, ...]:
    """Return the specs with one of these names."""
    return tuple(spec for spec in specs if spec.name in names)
