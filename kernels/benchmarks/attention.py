"""Shared parts of the attention benchmarks: batches over a paged cache, and torch peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from measure import Bench, Call, Work, descend
from paged_kernels.attention_params import AttentionParams
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

BLOCK_SIZE = 16
DTYPE = torch.bfloat16
KIB = 1024


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers of query and KV heads of a layer, and their dimension."""

    queries: int
    keys: int
    dim: int


LLAMA_8B = Heads(32, 8, 128)
_TINY = Heads(4, 2, 64)
_TINY_SEQS, _TINY_SHARE = 3, 512  # a quick run: number of sequences, divisor of lengths


@dataclass(frozen=True, slots=True)
class Layer:
    """The tensors that differ between the layers of a step."""

    q: Tensor  # [tokens, num_heads, dim], slices of wider rows
    kv_cache: Tensor  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE, dim]
    kv_scales: Tensor | None = None  # [num_blocks, 2, num_kv_heads, BLOCK_SIZE]


Operation = Callable[[Layer], object]
Prepare = Callable[[Layer], Call]


class AttentionBatch:
    """The sequences of a step: their lengths and block tables, which all layers share.

    Blocks are scattered over the pool of a layer, as on a server that has run for a while.
    """

    def __init__(
        self,
        bench: Bench,
        keys: Sequence[int],
        queries: Sequence[int] | None = None,
        *,
        shared_keys: int = 0,
        cache_dtype: torch.dtype = DTYPE,
        token_scales: bool = False,
        heads: Heads = LLAMA_8B,
    ) -> None:
        """Make sequences with the given numbers of keys and of queries (1 by default) each.

        The queries are the last tokens of a sequence. All sequences begin with the same
        `shared_keys` keys, a multiple of the block size. A quantized cache has a scale for each
        head or, with `token_scales`, for each token and head.
        """
        self.bench = bench
        self.cache_dtype, self.token_scales = cache_dtype, token_scales
        self.keys = list(keys)
        self.queries = [1] * len(self.keys) if queries is None else list(queries)
        self.shared_blocks = shared_keys // BLOCK_SIZE
        self.heads = heads
        if bench.quick:
            self.heads = _TINY
            self.shared_blocks = min(self.shared_blocks, 1)
            shared = self.shared_blocks * BLOCK_SIZE
            self.keys = [shared + 1 + count // _TINY_SHARE for count in self.keys[-_TINY_SEQS:]]
            self.queries = [1 + count // _TINY_SHARE for count in self.queries[-_TINY_SEQS:]]
        counts = torch.tensor([-(-count // BLOCK_SIZE) for count in self.keys])
        self.num_blocks = int(counts.sum())
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        used = torch.arange(table.shape[1]) < counts[:, None]
        table[used] = torch.randperm(self.num_blocks, dtype=torch.int32)
        table[:, : self.shared_blocks] = table[0, : self.shared_blocks]
        self.block_table = table.to(bench.device)
        self.seq_lens = self._ints(self.keys)
        self.query_start_loc = self._ints([0, *accumulate(self.queries)])
        scale = None
        if cache_dtype != DTYPE and not token_scales:
            scale = torch.ones(self.heads.keys, device=bench.device)
        self.params = AttentionParams(self.heads.dim**-0.5, k_scale=scale, v_scale=scale)

    @property
    def work(self) -> Work:
        """The work of a layer: bytes for sequences with one query, flops for all others."""
        heads, num_bytes, pairs = self.heads, 0, 0
        for queries, keys in zip(self.queries, self.keys, strict=True):
            if queries == 1:
                num_bytes += 2 * keys * heads.keys * self._head_bytes
                num_bytes += 2 * heads.queries * heads.dim * DTYPE.itemsize  # query and output
            else:  # each query sees the keys up to its own position
                pairs += queries * keys - queries * (queries - 1) // 2
        again = 2 * (len(self.keys) - 1) * self.shared_blocks * BLOCK_SIZE * heads.keys
        num_bytes -= again * self._head_bytes
        return Work(num_bytes, 4 * pairs * heads.queries * heads.dim)

    def layer(self) -> Layer:
        """Return a new layer with random contents."""
        heads, bench = self.heads, self.bench
        qkv = bench.random(sum(self.queries), heads.queries + 2 * heads.keys, heads.dim)
        cache = bench.random(self.num_blocks, 2, heads.keys, BLOCK_SIZE, heads.dim)
        scales = torch.ones(cache.shape[:4], device=bench.device) if self.token_scales else None
        return Layer(qkv[:, : heads.queries], cache.to(self.cache_dtype), scales)

    def params_of(self, layer: Layer) -> AttentionParams:
        """Return the options of the scores with the scales of a layer."""
        return replace(self.params, kv_scales=layer.kv_scales) if self.token_scales else self.params

    @property
    def _head_bytes(self) -> int:
        """Bytes of a head of a cached token."""
        scale = torch.float32.itemsize if self.token_scales else 0
        return self.heads.dim * self.cache_dtype.itemsize + scale

    def calls(self, operation: Operation) -> Callable[[], Call]:
        """Return a factory for `Bench.time`: each call runs the operation on its own layer."""

        return lambda: partial(operation, self.layer())

    def gathered(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """Return contiguous keys and values [num_seqs, num_kv_heads, keys, dim] (equal lengths)."""
        found = layer.kv_cache.index_select(0, self.block_table.view(-1))
        shape = (*self.block_table.shape, *found.shape[1:])
        keys_values = found.view(shape).permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
        k, v = keys_values[:, :, :, : self.keys[0]].contiguous()
        return k, v

    def padded_queries(self, layer: Layer) -> Tensor:
        """Return queries [num_seqs, num_heads, queries, dim] (equal numbers per sequence)."""
        shape = (len(self.keys), self.queries[0], self.heads.queries, self.heads.dim)
        return layer.q.reshape(shape).transpose(1, 2)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.bench.device)


def time_peers(shape: str, batch: AttentionBatch) -> None:
    """Measure torch's equivalents of the attention, for sequences of equal lengths."""
    bench = batch.bench
    for name, peer in (
        ("SDPA", _sdpa),
        ("gather + SDPA", _gather_and_sdpa),
        ("FlexAttention", _flex),
    ):

        def time(name: str = name, peer: Callable[[AttentionBatch], Prepare] = peer) -> object:
            prepare = peer(batch)
            return bench.time(name, shape, batch.work, lambda: prepare(batch.layer()))

        bench.peer(f"{name} {shape}", time)


def _sdpa(batch: AttentionBatch) -> Prepare:
    """Prepare torch's fused attention over keys that were gathered beforehand."""

    def prepare(layer: Layer) -> Call:
        q, (k, v) = batch.padded_queries(layer), batch.gathered(layer)
        return lambda: _attend(q, k, v, batch)

    return prepare


def _gather_and_sdpa(batch: AttentionBatch) -> Prepare:
    """Prepare torch's fused attention including the gather from the paged cache."""
    return lambda layer: lambda: _attend(batch.padded_queries(layer), *batch.gathered(layer), batch)


def _attend(q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=batch.queries[0] > 1, enable_gqa=True
    )


def _flex(batch: AttentionBatch) -> Prepare:
    """Prepare FlexAttention over gathered keys; it is compiled only on a GPU."""
    attend: Callable[..., object] = flex_attention
    if batch.bench.device.type == "cuda":
        torch._dynamo.reset()  # after several shapes it would stop compiling
        attend = torch.compile(flex_attention, dynamic=False)
    mask = None
    if batch.queries[0] > 1:
        sizes = batch.queries[0], batch.keys[0]
        mask = create_block_mask(_causal, None, None, *sizes, device=str(batch.bench.device))

    def prepare(layer: Layer) -> Call:
        q, (k, v) = batch.padded_queries(layer), batch.gathered(layer)
        return lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)

    return prepare


def _causal(_seq: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def search(
    shape: str,
    batch: AttentionBatch,
    table: tuple[ModuleType, str],
    start: Any,
    choices: Mapping[str, Sequence[int]],
    prepare: Callable[[AttentionBatch, Layer], Operation],
) -> None:
    """Search for a better launch configuration for a batch and print the result.

    Args:
        shape: label to print.
        batch: batch to measure.
        table: the function that the kernel asks for its configuration: a module and a name in it.
        start: the configuration to begin with.
        choices: values to try, by field.
        prepare: returns the operation to measure, made with the current configuration.
    """
    bench = batch.bench
    _, limit = bench.ceiling(batch.work)
    layers = [batch.layer() for _ in range(bench.num_calls(limit))]

    def cost(config: Any) -> float:
        with patch.object(*table, lambda *_, **__: config):
            try:
                operation = prepare(batch, layers[0])
                return bench.clock.microseconds([partial(operation, layer) for layer in layers])
            except Exception as error:  # too many registers, too much shared memory
                print(f"  {config}: {type(error).__name__}", flush=True)
                return float("inf")

    best, microseconds = descend(start, choices, cost)
    print(f"{shape}: {cost(start):.2f} us by {start}")
    print(f"{shape}: {microseconds:.2f} us by {best}", flush=True)
