"""How many bits a number takes in weights and in the KV cache, and what multiplies it."""

from __future__ import annotations

from dataclasses import dataclass

_GROUP = 128  # weights of four bits share a scale of 16 bits and a zero point of four


@dataclass(frozen=True, slots=True)
class WeightType:
    """Of the linear layers of the decoder; the embedding, the output layer and norms are `rest`."""

    bits: float  # of a weight, its part of a scale included
    rest_bits: int
    compute: str  # the dtype in which a GPU multiplies the linear layers
    rest_compute: str  # and everything else


WEIGHT_TYPES = {
    "float32": WeightType(32, 32, "float32", "float32"),
    "bfloat16": WeightType(16, 16, "bfloat16", "bfloat16"),
    "float16": WeightType(16, 16, "bfloat16", "bfloat16"),  # as fast on every GPU of the table
    "fp8": WeightType(8, 16, "fp8", "bfloat16"),  # a scale for each output: below 0.1%, left out
    "int8": WeightType(8, 16, "int8", "bfloat16"),
    "int4": WeightType(4 + (16 + 4) / _GROUP, 16, "bfloat16", "bfloat16"),
}


@dataclass(frozen=True, slots=True)
class KvType:
    """Of keys and values."""

    bits: int
    scale_bits: int = 0  # for each head's key and each head's value of a token


KV_TYPES = {
    "float32": KvType(32),
    "bfloat16": KvType(16),
    "float16": KvType(16),
    "fp8": KvType(8),  # one scale for the whole cache of a layer
    "int8": KvType(8, scale_bits=16),
    "int4": KvType(4, scale_bits=32),  # scale and zero point
}


def kv_type_of(weights: str) -> str:
    """What the KV cache holds where nobody chose: the dtype that the layers' results have."""
    return weights if weights in ("float32", "float16") else "bfloat16"
