"""The tensors that clients and this model exchange: vllm_backend's, and token ids besides."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

Array = npt.NDArray[Any]
"""A tensor on its way between Triton and this model."""


class TensorSpec(NamedTuple):
    """A tensor of the model's configuration; -1 is any length."""

    name: str
    data_type: str
    dims: int
    optional: bool = True

    def as_config(self) -> dict[str, Any]:
        """The entry in Triton's model configuration."""
        return {
            "name": self.name,
            "data_type": self.data_type,
            "dims": [self.dims],
            **({"optional": True} if self.optional else {}),
        }


INPUTS = (
    TensorSpec("text_input", "TYPE_STRING", 1),
    TensorSpec("input_ids", "TYPE_INT32", -1),
    TensorSpec("stream", "TYPE_BOOL", 1),
    TensorSpec("sampling_parameters", "TYPE_STRING", 1),
    TensorSpec("exclude_input_in_output", "TYPE_BOOL", 1),
    TensorSpec("return_finish_reason", "TYPE_BOOL", 1),
    TensorSpec("return_num_input_tokens", "TYPE_BOOL", 1),
    TensorSpec("return_num_output_tokens", "TYPE_BOOL", 1),
    TensorSpec("return_output_ids", "TYPE_BOOL", 1),
)

OUTPUTS = (
    TensorSpec("text_output", "TYPE_STRING", -1, optional=False),
    TensorSpec("finish_reason", "TYPE_STRING", -1, optional=False),
    TensorSpec("num_input_tokens", "TYPE_UINT32", 1, optional=False),
    TensorSpec("num_output_tokens", "TYPE_UINT32", -1, optional=False),
    TensorSpec("output_ids", "TYPE_INT32", -1, optional=False),
)
