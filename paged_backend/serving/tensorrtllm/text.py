"""The models ``ensemble`` and ``tensorrt_llm_bls``: text in, text out."""

from __future__ import annotations

import numpy as np

from paged_backend.serving import fields
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.serving.tensorrtllm.arrays import Outputs, element
from paged_backend.serving.tensorrtllm.completions import COMMON_OUTPUTS
from paged_backend.serving.tensorrtllm.model import BatchModel, RowRequest
from paged_backend.serving.tensorrtllm.sampling import TEXT
from paged_backend.serving.tensorrtllm.specs import SAMPLING_INPUTS, TEXT_INPUTS, specs
from paged_backend.values.contract import TensorDeclaration

_COUNTS = ("num_input_tokens", "num_output_tokens")
_REQUIRED = ("text_input", "max_tokens")


class TritonPythonModel(BatchModel):
    """Takes and returns text."""

    stream_flag = "stream"
    inputs = (
        *(spec._replace(optional=spec.name not in _REQUIRED) for spec in TEXT_INPUTS),
        *SAMPLING_INPUTS,
        *specs("TYPE_STRING", 1, "decoder_text_input"),
        *specs("TYPE_INT32", 1, "num_draft_tokens"),
        *specs("TYPE_FP32", 1, "length_penalty"),
        *specs("TYPE_UINT64", 1, "prompt_table_extra_id"),
        *specs("TYPE_BOOL", 1, "stream", "use_draft_logits"),
        *specs("TYPE_BOOL", 1, *(f"return_{name}" for name in _COUNTS)),
    )
    outputs = (
        TensorDeclaration("text_output", "TYPE_STRING", -1),
        *specs("TYPE_INT32", 1, *_COUNTS),
        *COMMON_OUTPUTS,
    )

    def _row(self, tensors: Tensors, *, is_stream: bool) -> RowRequest:
        wanted = [name for name in _COUNTS if fields.flag(tensors, f"return_{name}")]
        # A stream never contains the prompt.
        echo = not (is_stream or fields.flag(tensors, "exclude_input_in_output"))

        def convert(model: Outputs, common: Outputs) -> Outputs:
            counts = {name: element(model[name].sum()) for name in wanted}
            return {"text_output": model["text_output"], **common, **counts}

        return RowRequest(TEXT, tensors, text_prompt(tensors, echo=echo), convert)


def text_prompt(tensors: Tensors, *, echo: bool) -> dict[str, Array]:
    """Return the model's inputs for a prompt of text; ``echo`` puts it before the answer.

    Raises:
        InvalidRequest: the text is not valid UTF-8.
    """
    text = fields.string("text_input", tensors["text_input"])
    return {"text_input": as_strings([text]), "exclude_input_in_output": np.array([not echo])}
