"""Benchmark of attention on mixed batches, and of decoding sequences with a shared prefix."""

from __future__ import annotations

from functools import partial

from attention import BLOCK_SIZE, KIB, AttentionBatch, Operation
from measure import Bench
from paged_kernels.paged_attention import cascade_decode, paged_attention, plan_cascade
from paged_kernels.paged_decode import paged_decode, plan_decode
from paged_kernels.paged_prefill import plan_prefill

DECODES = 64
MIXED = {  # keys of each decode, queries and keys of the prefill chunk
    "64x1k + 512": (KIB, 512, 512),
    "64x1k + 64 after 8k": (KIB, 64, 8 * KIB + 64),
    "64x4k + 2k": (4 * KIB, 2 * KIB, 2 * KIB),
    "64x4k + 2k after 2k": (4 * KIB, 2 * KIB, 4 * KIB),
}
WARM_UP = (KIB, KIB, KIB), (KIB, 64, KIB)  # the keys of few queries are split
SHARED = {  # number of sequences, shared keys, own keys of each
    "64x(8k + 512)": (64, 8 * KIB, 512),
    "256x(2k + 512)": (256, 2 * KIB, 512),
}


def mixed(
    bench: Bench, keys: int, chunk_queries: int, chunk_keys: int
) -> tuple[AttentionBatch, Operation]:
    """Return a batch of decodes and one prefill chunk, and its attention."""
    batch = AttentionBatch(bench, [keys] * DECODES + [chunk_keys], [1] * DECODES + [chunk_queries])
    decodes = batch.queries.count(1)
    layer = batch.layer()
    plan = plan_decode(layer.q[:decodes], layer.kv_cache, batch.seq_lens[:decodes])
    lengths = batch.seq_lens, batch.query_start_loc
    prompt_plan = plan_prefill(layer.q, layer.kv_cache, *lengths, first_seq=decodes)
    step = batch.block_table, *lengths, batch.params
    return batch, lambda layer: paged_attention(
        layer.q, layer.kv_cache, *step, num_decodes=decodes, plan=plan, prompt_plan=prompt_plan
    )


def cascade(bench: Bench, seqs: int, shared: int, own: int) -> tuple[AttentionBatch, Operation]:
    """Return a batch with shared keys, and attention that reads them once."""
    batch = AttentionBatch(bench, [shared + own] * seqs, shared_keys=shared)
    layer, step = batch.layer(), (batch.block_table, batch.seq_lens)
    plan = plan_cascade(layer.q, layer.kv_cache, *step, num_shared_blocks=batch.shared_blocks)
    return batch, lambda layer: cascade_decode(layer.q, layer.kv_cache, batch.params, plan)


def plain(batch: AttentionBatch) -> Operation:
    """Return decode attention of the same batch without sharing."""
    layer, step = batch.layer(), (batch.block_table, batch.seq_lens, batch.params)
    plan = plan_decode(layer.q, layer.kv_cache, batch.seq_lens)
    return lambda layer: paged_decode(layer.q, layer.kv_cache, *step, plan=plan)


def run(bench: Bench) -> None:
    steps = [mixed(bench, *sizes) for sizes in WARM_UP]
    for batch, operation in (*steps, cascade(bench, DECODES, BLOCK_SIZE, KIB)):
        bench.warm_up(partial(operation, batch.layer()))
    for shape, sizes in MIXED.items():
        batch, operation = mixed(bench, *sizes)
        bench.time("paged_attention", shape, batch.work, batch.calls(operation))
    for shape, sizes in SHARED.items():
        batch, operation = cascade(bench, *sizes)
        bench.time("cascade_decode", shape, batch.work, batch.calls(operation))
        bench.time("paged_decode, same batch", shape, batch.work, batch.calls(plain(batch)))
