"""Number formats of weights and of the KV cache: bits per number, and dtypes of the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

_GROUP = 128  # number of 4-bit weights that share a 16-bit scale and a 4-bit zero point


@dataclass(frozen=True, slots=True)
class WeightType:
    """Format of the decoder's linear layers; `rest` is the embedding, output layer and norms.

    An output layer that is quantized, too, has `head_bits`.
    """

    bits: float  # per weight, including its share of a scale
    rest_bits: int
    compute: str  # the dtype in which a GPU multiplies the linear layers
    rest_compute: str  # the dtype in which it computes everything else
    head_bits: float | None = None


WEIGHT_TYPES = {
    "float32": WeightType(32, 32, "float32", "float32"),
    "bfloat16": WeightType(16, 16, "bfloat16", "bfloat16"),
    "float16": WeightType(16, 16, "bfloat16", "bfloat16"),  # as fast as bfloat16 on all GPUs here
    "fp8": WeightType(8, 16, "fp8", "bfloat16"),  # per-output scales: below 0.1%, ignored
    "int8": WeightType(8, 16, "int8", "bfloat16"),
    "int4": WeightType(4 + (16 + 4) / _GROUP, 16, "bfloat16", "bfloat16"),
}


@dataclass(frozen=True, slots=True)
class KvType:
    """Format of keys and values."""

    bits: int
    scale_bits: int = 0  # for each token and head: once for the key, once for the value


KV_TYPES = {
    "float32": KvType(32),
    "bfloat16": KvType(16),
    "float16": KvType(16),
    "fp8": KvType(8, scale_bits=32),  # no scales here if the checkpoint has static ones
    "fp8_e4m3": KvType(8, scale_bits=32),
    "fp8_per_token_head": KvType(8, scale_bits=32),
    "int8_per_token_head": KvType(8, scale_bits=32),
}


def kv_type_of(weights: str) -> str:
    """The default KV cache dtype: that of the layers' outputs with these weights."""
    return weights if weights in ("float32", "float16") else "bfloat16"
