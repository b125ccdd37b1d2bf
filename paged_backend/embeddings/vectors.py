"""Makes embeddings of the pooled hidden states of prompts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paged_backend.values.pooling_params import PoolingParams

_SMALLEST_NORM = 1e-12  # shorter vectors are divided by it, as torch does


def make_embedding(pooled: bytes, params: PoolingParams, *, normalize: bool) -> NDArray[np.float32]:
    """Return the embedding of a prompt [dimensions] from its pooled hidden states.

    Args:
        pooled: hidden_size numbers in float32, little-endian.
        params: parameters of the request.
        normalize: scale the embedding to a length of 1, after dimensions were left out.
    """
    vector = np.frombuffer(pooled, "<f4")[: params.dimensions].astype(np.float64)
    if normalize:
        vector /= max(float(np.linalg.norm(vector)), _SMALLEST_NORM)
    return vector.astype(np.float32)


def read_score(pooled: bytes) -> float:
    """Return the score that a reranker has made of a pair: a number in float32, little-endian."""
    return float(np.frombuffer(pooled, "<f4")[0])


def cosine_similarity(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of the angle between two embeddings of the same size."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    similarity = float(x @ y) / max(float(np.linalg.norm(x) * np.linalg.norm(y)), _SMALLEST_NORM)
    return min(1.0, max(-1.0, similarity))  # rounding can lead beyond
