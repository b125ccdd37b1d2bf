"""The tensors that clients and models exchange: vllm_backend's, and token ids.

The models in `serving` read and write them, and `launch` declares them in ensembles.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple


class TensorDeclaration(NamedTuple):
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
    TensorDeclaration("text_input", "TYPE_STRING", 1),
    TensorDeclaration("text_pair", "TYPE_STRING", 1),  # the second text of the task ``score``
    TensorDeclaration("input_ids", "TYPE_INT32", -1),
    TensorDeclaration("messages", "TYPE_STRING", 1),
    TensorDeclaration("image", "TYPE_STRING", -1),
    TensorDeclaration("embedding_request", "TYPE_STRING", 1),
    TensorDeclaration("task", "TYPE_STRING", 1),
    TensorDeclaration("stream", "TYPE_BOOL", 1),
    TensorDeclaration("sampling_parameters", "TYPE_STRING", 1),
    # Lists that JSON fields of `generate` can carry only as tensors.
    TensorDeclaration("stop", "TYPE_STRING", -1),
    TensorDeclaration("stop_token_ids", "TYPE_INT32", -1),
    TensorDeclaration("bad_words", "TYPE_STRING", -1),
    TensorDeclaration("allowed_token_ids", "TYPE_INT32", -1),
    TensorDeclaration("tools", "TYPE_STRING", 1),
    TensorDeclaration("tool_choice", "TYPE_STRING", 1),
    TensorDeclaration("parallel_tool_calls", "TYPE_BOOL", 1),
    TensorDeclaration("call_id", "TYPE_STRING", 1),
    TensorDeclaration("pass_through", "TYPE_STRING", 1),
    TensorDeclaration("add_special_tokens", "TYPE_BOOL", 1),
    TensorDeclaration("exclude_input_in_output", "TYPE_BOOL", 1),
    TensorDeclaration("return_finish_reason", "TYPE_BOOL", 1),
    TensorDeclaration("return_stop_reason", "TYPE_BOOL", 1),
    TensorDeclaration("return_cumulative_logprob", "TYPE_BOOL", 1),
    TensorDeclaration("return_logprobs", "TYPE_BOOL", 1),
    TensorDeclaration("return_prompt_logprobs", "TYPE_BOOL", 1),
    TensorDeclaration("return_context_logits", "TYPE_BOOL", 1),
    TensorDeclaration("return_generation_logits", "TYPE_BOOL", 1),
    TensorDeclaration("return_num_input_tokens", "TYPE_BOOL", 1),
    TensorDeclaration("return_num_cached_tokens", "TYPE_BOOL", 1),
    TensorDeclaration("return_num_output_tokens", "TYPE_BOOL", 1),
    TensorDeclaration("return_output_ids", "TYPE_BOOL", 1),
    TensorDeclaration("return_metrics", "TYPE_BOOL", 1),
    TensorDeclaration("return_context_ids", "TYPE_BOOL", 1),
    TensorDeclaration("return_tool_calls", "TYPE_BOOL", 1),
    TensorDeclaration("return_reasoning", "TYPE_BOOL", 1),
)

OUTPUTS = (
    TensorDeclaration("text_output", "TYPE_STRING", -1, optional=False),
    TensorDeclaration("finish_reason", "TYPE_STRING", -1, optional=False),
    TensorDeclaration("stop_reason", "TYPE_STRING", -1, optional=False),
    TensorDeclaration("cumulative_logprob", "TYPE_FP32", -1, optional=False),
    TensorDeclaration("logprobs", "TYPE_STRING", -1, optional=False),
    TensorDeclaration("prompt_logprobs", "TYPE_STRING", 1, optional=False),
    TensorDeclaration("context_logits", "TYPE_FP32", (-1, -1), optional=False),
    TensorDeclaration("generation_logits", "TYPE_FP32", (-1, -1), optional=False),
    TensorDeclaration("num_input_tokens", "TYPE_UINT32", 1, optional=False),
    TensorDeclaration("num_cached_tokens", "TYPE_UINT32", 1, optional=False),
    TensorDeclaration("num_output_tokens", "TYPE_UINT32", -1, optional=False),
    TensorDeclaration("output_ids", "TYPE_INT32", -1, optional=False),
    TensorDeclaration("metrics", "TYPE_STRING", -1, optional=False),
    # The answer to the task ``embed``.
    TensorDeclaration("embedding", "TYPE_FP32", -1, optional=False),
    # The answer to the task ``score``.
    TensorDeclaration("score", "TYPE_FP32", 1, optional=False),
    # Parts of the answer that `text_output` then leaves out.
    TensorDeclaration("tool_calls", "TYPE_STRING", -1, optional=False),
    TensorDeclaration("reasoning", "TYPE_STRING", -1, optional=False),
    # What a stateless detokenizer needs to continue: StreamState, for each completion.
    TensorDeclaration("context_ids", "TYPE_INT32", -1, optional=False),
    TensorDeclaration("num_context_ids", "TYPE_UINT32", -1, optional=False),
    TensorDeclaration("num_held_ids", "TYPE_UINT32", -1, optional=False),
    TensorDeclaration("sequence_length", "TYPE_INT32", -1, optional=False),
    # The input of that name, with every response.
    TensorDeclaration("pass_through", "TYPE_STRING", 1, optional=False),
)


# The input of a pipeline's last step that has the text of a parsed answer.
PARSED_TEXT = "parsed_text"
# Inputs that a pipeline's first step and its model both need.
TOOL_INPUTS = (
    *("tools", "tool_choice", "parallel_tool_calls"),
    *("return_tool_calls", "return_reasoning"),
)


def named(specs: Iterable[TensorDeclaration], *names: str) -> tuple[TensorDeclaration, ...]:
    """Return the specs with one of these names."""
    return tuple(spec for spec in specs if spec.name in names)
