"""Benchmark of prefill with Llama-3-8B's heads: whole prompts, chunks after a long context."""

from __future__ import annotations

from functools import partial

import paged_kernels.paged_prefill as kernel
from attention import KIB, AttentionBatch, Layer, Operation, search, time_peers
from measure import Bench, Call, Target
from paged_kernels.device import device_of
from paged_kernels.paged_prefill import paged_prefill, plan_prefill
from paged_kernels.tuning.prefill import prefill_config

LENGTHS = {  # queries and keys of each sequence
    "1x2k": ([2 * KIB], [2 * KIB]),
    "1x4k": ([4 * KIB], [4 * KIB]),
    "1x8k": ([8 * KIB], [8 * KIB]),
    "1x32k": ([32 * KIB], [32 * KIB]),
    "8x1k": ([KIB] * 8, [KIB] * 8),
    "2k after 30k": ([2 * KIB], [32 * KIB]),
    "512 after 7680": ([512], [8 * KIB]),
    "64 after 8k": ([64], [8 * KIB + 64]),
    "16 after 8k": ([16], [8 * KIB + 16]),
    "16 after 32k": ([16], [32 * KIB + 16]),
}
TARGETS = {"1x8k": Target("tflops", 400.0, aim=590.0)}
PEERS = ("1x8k", "8x1k")
CHOICES = {
    "rows": (64, 128, 256),
    "tile": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4),
}


def prefill(batch: AttentionBatch, layer: Layer) -> Operation:
    """Return the prefill attention of any layer; the layers share a plan, as in a model."""
    step = batch.block_table, batch.seq_lens, batch.query_start_loc, batch.params
    plan = plan_prefill(layer.q, layer.kv_cache, batch.seq_lens, batch.query_start_loc)
    return lambda layer: paged_prefill(layer.q, layer.kv_cache, *step, plan=plan)


def prompts(bench: Bench, shape: str) -> AttentionBatch:
    queries, keys = LENGTHS[shape]
    return AttentionBatch(bench, keys, queries)


def warm_up_call(bench: Bench, queries: int) -> Call:
    """Return a call on a sequence; the keys of few queries are split, those of many are not."""
    batch = AttentionBatch(bench, [8 * KIB], [queries])
    layer = batch.layer()
    return partial(prefill(batch, layer), layer)


def run(bench: Bench) -> None:
    bench.warm_up(*(warm_up_call(bench, queries) for queries in (8 * KIB, 16)))
    for shape in LENGTHS:
        batch = prompts(bench, shape)
        make = batch.calls(prefill(batch, batch.layer()))
        bench.time("paged_prefill", shape, batch.work, make, target=TARGETS.get(shape))
    for shape in PEERS:
        time_peers(shape, prompts(bench, shape))


def sweep(bench: Bench) -> None:
    for shape in ("1x2k", "1x8k", "2k after 30k"):
        batch = prompts(bench, shape)
        q = batch.layer().q
        start = prefill_config(device_of("q", q).arch, q.shape[2], q.element_size())
        search(shape, batch, (kernel, "prefill_config"), start, CHOICES, prefill)
