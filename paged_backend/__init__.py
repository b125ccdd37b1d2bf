"""LLM serving for NVIDIA Triton Inference Server: continuous batching over a paged KV cache.

`LLM` is the offline API. The rest of the package serves models inside Triton; begin with
``docs/architecture.md``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from paged_backend.values import (
    errors,
    outputs,
    pooling_params,
    sampling_params,
    structured_outputs,
)
from paged_backend.values.beams import BeamSearchParams
from paged_backend.values.errors import (
    ConfigError,
    EngineDead,
    InvalidRequest,
    PagedError,
    RequestRefused,
)
from paged_backend.values.lora import LoRARequest
from paged_backend.values.outputs import (
    BeamSearchOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    FinishReason,
    RequestOutput,
    ScoringRequestOutput,
    TokenLogprobs,
)
from paged_backend.values.pooling_params import PoolingParams
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from paged_backend.engine.llm import LLM

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineDead",
    "FinishReason",
    "InvalidRequest",
    "LoRARequest",
    "PagedError",
    "PoolingParams",
    "RequestOutput",
    "RequestRefused",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TokenLogprobs",
]

# Modules that have been public under shorter names, as vLLM's `vllm.sampling_params` is.
for _module in (errors, outputs, pooling_params, sampling_params, structured_outputs):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module


def __getattr__(name: str) -> object:
    """Import the offline API only when it is asked for: it needs torch, Triton's stubs do not."""
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from paged_backend.engine.llm import LLM

    return LLM
