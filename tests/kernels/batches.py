"""Ragged batches over a paged cache; every unused slot holds NaN, so that a read of it shows."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field

import torch
from paged_kernels.attention_params import AttentionParams
from paged_kernels.reference import paged_attention as reference
from paged_kernels.windows import Chunks, Window
from torch import Tensor

POISON = {torch.float8_e4m3fn: 0x7F, torch.int8: 127}


@dataclass
class Batch:
    """Sequences of `(queries, keys)` tokens; the queries are the last of the keys' positions."""

    lengths: list[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    shared_blocks: int = 0  # that all sequences begin with
    token_scales: bool = False  # instead of a scale for each head

    def __post_init__(self) -> None:
        starts = [0]
        for queries, _ in self.lengths:
            starts.append(starts[-1] + queries)
        size = self.block_size
        per_seq = [-(-keys // size) for _, keys in self.lengths]
        num_blocks = sum(per_seq) + 5
        ids = torch.randperm(num_blocks)
        # Entries past a sequence's last block may hold anything.
        self.block_table = torch.full((len(per_seq), max(per_seq) + 2), 2**30, dtype=torch.int32)
        cache = self._poisoned(num_blocks)
        scales = torch.full(cache.shape[:4], torch.nan)
        used = 0
        for seq, count in enumerate(per_seq):
            self.block_table[seq, :count] = ids[used : used + count]
            self.block_table[seq, : min(self.shared_blocks, count)] = ids[: self.shared_blocks]
            used += count
            for index in range(count):
                filled = min(size, self.lengths[seq][1] - index * size)
                block = int(self.block_table[seq, index])
                cache[block, :, :, :filled] = self._random(
                    (2, self.num_kv_heads, filled, self.head_dim)
                )
                unit = torch.rand(2, self.num_kv_heads, filled) + 0.5
                scales[block, :, :, :filled] = unit / (32 if cache.dtype == torch.int8 else 1)
        self.kv_cache, self.kv_scales = cache.to(self.device), scales.to(self.device)
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = torch.randn(starts[-1], width).to(self.dtype).to(self.device)
        self.seq_lens = torch.tensor([keys for _, keys in self.lengths], dtype=torch.int32)
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32)
        for name in ("block_table", "seq_lens", "query_start_loc"):
            setattr(self, name, getattr(self, name).to(self.device))

    @property
    def q(self) -> Tensor:
        """Queries as a model has them: a part of wider rows."""
        heads = self.qkv.view(len(self.qkv), -1, self.head_dim)
        return heads[:, : self.num_heads]

    def params(self, **options: object) -> AttentionParams:
        """The usual scale and, for a quantized cache, a scale for each head or token and head."""
        scales = {}
        if self.token_scales:
            scales = {"kv_scales": self.kv_scales}
        elif self.kv_cache.dtype != self.dtype:
            heads = torch.arange(self.num_kv_heads, dtype=torch.float32, device=self.device)
            factor = 1 / 32 if self.kv_cache.dtype == torch.int8 else 1.0
            scales = {"k_scale": factor * (1 + heads / 4), "v_scale": factor * (2 - heads / 4)}
        return AttentionParams(**{"scale": self.head_dim**-0.5, **scales, **options})

    def wanted(self, params: AttentionParams) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp in float64."""
        return reference.paged_attention(
            self.q, self.kv_cache, self.block_table, self.seq_lens, self.query_start_loc, params
        )

    def empty_out(self) -> Tensor:
        """A poisoned output."""
        shape = (len(self.qkv), self.num_heads, self.head_dim)
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    def empty_lse(self) -> Tensor:
        """A poisoned log-sum-exp."""
        return torch.full((len(self.qkv), self.num_heads), torch.nan, device=self.device)

    def without_tokens_before(self, window: Window) -> Batch:
        """A copy with poison for tokens that no query sees; their blocks are not in the table."""
        hidden = copy(self)
        hidden.kv_cache, hidden.kv_scales = self.kv_cache.clone(), self.kv_scales.clone()
        hidden.block_table = self.block_table.clone()
        poison = self._poisoned(1)[0, :, :, 0].to(self.device)
        for seq, (queries, keys) in enumerate(self.lengths):
            position = keys - queries
            if isinstance(window, Chunks):
                first = position // window.size * window.size
            else:
                first = max(0, position - window + 1)
            for key in range(first):
                block = self.block_table[seq, key // self.block_size]
                hidden.kv_cache[block, :, :, key % self.block_size] = poison
                hidden.kv_scales[block, :, :, key % self.block_size] = torch.nan
            hidden.block_table[seq, : first // self.block_size] = 2**30
        return hidden

    def _poisoned(self, num_blocks: int) -> Tensor:
        dtype = self.cache_dtype or self.dtype
        shape = (num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)
        if dtype in POISON:
            return torch.full(shape, POISON[dtype], dtype=torch.uint8).view(dtype)
        return torch.full(shape, torch.nan, dtype=dtype)

    def _random(self, shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape)
        if self.cache_dtype == torch.int8:
            values = (values * 32).round().clamp(-127, 127)
        return values.to(self.cache_dtype or self.dtype)


TOLERANCE = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_close(
    got: Tensor, wanted: Tensor, dtype: torch.dtype, tolerance: float | None = None
) -> None:
    """Within some roundings of the type that the kernel keeps its numbers in."""
    tolerance = tolerance or TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)
