"""Biases of positions as columns of queries and keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from paged_backend.checkpoint.fallback_config import load_fallback_config
from paged_backend.engine.worker import Worker
from paged_backend.models.alibi import (
    COLUMNS,
    MAX_POSITIONS,
    halving_slopes,
    interleaved_slopes,
    with_columns,
)
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError

SCALE = 0.25


@pytest.mark.parametrize("num_heads", [1, 4, 6, 12, 71])
def test_slopes_equal_transformers(num_heads: int) -> None:
    bloom = build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(halving_slopes(num_heads), bloom, rtol=1e-6, atol=0)
    mpt = build_mpt_alibi_tensor(num_heads, 2)[:, 0, 0].neg()
    torch.testing.assert_close(interleaved_slopes(num_heads, 8), mpt, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.float16, 2e-6), (torch.bfloat16, 2e-5)]
)
def test_columns_add_the_biases_and_nothing_else(dtype: torch.dtype, bound: float) -> None:
    """Within `bound` of the bias, at positions that the dtype itself cannot hold."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 7, 16).to(dtype) for heads in (6, 2, 2))
    positions = torch.tensor([0, 1, 255, 256, 257, 4099, MAX_POSITIONS - 1])
    slopes = halving_slopes(6)
    longer = with_columns(q, k, v, slopes, SCALE, positions)
    before, after = _scores(q, k), _scores(longer[0], longer[1])
    biases = slopes.double()[:, None, None] * positions.double()
    error = (after - before - biases).abs()
    assert (error <= bound * biases + 1e-9).all()
    assert longer[2].shape[-1] == 16 + COLUMNS
    assert torch.equal(longer[2][..., :16], v)
    assert not longer[2][..., 16:].any()


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Scores [heads, queries, keys] in float64."""
    keys = k[0].double().repeat_interleave(q.shape[1] // k.shape[1], dim=0)
    return SCALE * q[0].double() @ keys.transpose(1, 2)


@pytest.mark.parametrize("option", ["fp8", "fp8_per_token_head", "int8_per_token_head"])
def test_keys_with_positions_do_not_fit_8_bits(option: str, tmp_path: Path) -> None:
    make_checkpoint("mpt", tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", kv_cache_dtype=option)
    message = f"biases of positions .ALiBi. cannot have a KV cache in {option}; option kv_cache_dty"
    with pytest.raises(ConfigError, match=message):
        Worker(config, tmp_path)


def test_length_of_a_bloom_that_gives_none(tmp_path: Path) -> None:
    make_checkpoint("bloom", tmp_path, seq_length=None, max_position_embeddings=None)
    assert load_fallback_config(tmp_path).default_max_model_len == 2048
