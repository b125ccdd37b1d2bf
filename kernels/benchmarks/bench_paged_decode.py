"""Benchmark of decode attention with Llama-3-8B's heads: split and merge, planned beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import paged_kernels.paged_decode as kernel
import torch
from attention import DTYPE, KIB, AttentionBatch, Heads, Layer, Operation, search, time_peers
from measure import Bench, Row, Target, Work
from paged_kernels.device import device_of
from paged_kernels.paged_decode import paged_decode, plan_decode
from paged_kernels.tuning.decode import FEW_PROGRAMS, decode_config


def log_normal(count: int) -> list[int]:
    """Return lengths like those of chats: half below 700 keys, a few of many thousands."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.exp(torch.randn(count, generator=generator)) * 700
    return [int(length) for length in lengths.clamp(16, 16 * KIB)]


def evened(lengths: Sequence[int]) -> list[int]:
    """Return nearly equal lengths with the same total number of keys."""
    each, rest = divmod(sum(lengths), len(lengths))
    return [each + (seq < rest) for seq in range(len(lengths))]


UNIFORM = {
    "1x1k": [KIB],
    "1x8k": [8 * KIB],
    "1x32k": [32 * KIB],
    "8x1k": [KIB] * 8,
    "8x8k": [8 * KIB] * 8,
    "32x1k": [KIB] * 32,
    "32x8k": [8 * KIB] * 32,
    "64x1k": [KIB] * 64,
    "128x4k": [4 * KIB] * 128,
    "256x1k": [KIB] * 256,
}
TARGETS = {
    "1x1k": Target("microseconds", 11.0, aim=7.0),
    "1x32k": Target("ratio", 0.65, aim=0.80),
}
STREAMING = Target("ratio", 0.85, aim=0.95)  # for batches that read at least:
STREAMING_BYTES = 256 << 20
RAGGED_LENGTHS = {
    "255x1k+1x32k": [KIB] * 255 + [32 * KIB],
    "256 log-normal": log_normal(256),
}
RAGGED = Target("ratio", 1 / 1.1, aim=1.0)
# Query heads, KV heads and dimension: few KV heads need many splits, and wide ones large merges.
OTHER_HEADS = {
    "Qwen2.5-1.5B": Heads(12, 2, 128),
    "Qwen3-Next": Heads(16, 2, 256),
    "Gemma 4, global": Heads(32, 4, 512),
}
PEERS = ("1x32k", "64x1k", "32x8k")
QUANTIZED = torch.float8_e4m3fn
CHOICES = {
    "tile": (32, 64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "max_registers": (128, 168, 200, 255),
    "programs_per_sm": (1, 2, 3, 4, 6, 8),
}


def decode(batch: AttentionBatch, layer: Layer) -> Operation:
    """Return the decode attention of any layer, with a plan made for `layer`."""
    plan = plan_decode(layer.q, layer.kv_cache, batch.seq_lens)
    step = batch.block_table, batch.seq_lens
    return lambda layer: paged_decode(
        layer.q, layer.kv_cache, *step, batch.params_of(layer), plan=plan
    )


def time_decode(shape: str, batch: AttentionBatch, target: Target | None = None) -> Row:
    """Measure one layer of a step."""
    make = batch.calls(decode(batch, batch.layer()))
    return batch.bench.time(
        "paged_decode", shape, batch.work, make, dtype=batch.cache_dtype, target=target
    )


def time_ragged(bench: Bench, shape: str, lengths: Sequence[int]) -> None:
    """Compare with the same number of keys in sequences of equal length."""
    even = time_decode(f"{shape}, evened", AttentionBatch(bench, evened(lengths)))
    ragged = time_decode(shape, AttentionBatch(bench, lengths))
    compared = replace(
        ragged,
        name="paged_decode, ragged",
        ceiling="even lengths",
        ceiling_microseconds=even.microseconds,
    )
    bench.report(compared, RAGGED)


def time_plan(shape: str, batch: AttentionBatch) -> None:
    """Measure the plan of a step, made once for all its layers."""
    work = Work(bytes=batch.seq_lens.nbytes)
    layer = batch.layer()
    plan = partial(plan_decode, layer.q, layer.kv_cache, batch.seq_lens)
    batch.bench.time("plan_decode", shape, work, lambda: plan, dtype=torch.int32)


def time_launches(shape: str, batch: AttentionBatch) -> None:
    """Measure a layer that is not captured in a CUDA graph, for information."""
    make = batch.calls(decode(batch, batch.layer()))
    batch.bench.time("paged_decode, not captured", shape, batch.work, make, captured=False)


def run(bench: Bench) -> None:
    stored = [(DTYPE, False), (QUANTIZED, False), (QUANTIZED, True), (torch.int8, True)]
    for dtype, token_scales in stored:
        for count in (1, 64):  # the merge kernel has two versions, for few and many rows
            batch = AttentionBatch(
                bench, [KIB] * count, cache_dtype=dtype, token_scales=token_scales
            )
            layer = batch.layer()
            bench.warm_up(partial(decode(batch, layer), layer))
    for shape, lengths in UNIFORM.items():
        batch = AttentionBatch(bench, lengths)
        streams = batch.work.bytes >= STREAMING_BYTES
        time_decode(shape, batch, STREAMING if streams else TARGETS.get(shape))
    for shape, lengths in RAGGED_LENGTHS.items():
        time_ragged(bench, shape, lengths)
    for shape in ("32x8k", "256x1k"):
        time_decode(shape, AttentionBatch(bench, UNIFORM[shape], cache_dtype=QUANTIZED))
    for dtype in (QUANTIZED, torch.int8):
        batch = AttentionBatch(bench, UNIFORM["256x1k"], cache_dtype=dtype, token_scales=True)
        time_decode("256x1k, scales per token", batch)
    for shape in ("1x1k", "64x1k", "256x1k"):
        time_plan(shape, AttentionBatch(bench, UNIFORM[shape]))
    for model, heads in OTHER_HEADS.items():
        for shape in ("1x8k", "8x1k", "32x8k"):
            other = AttentionBatch(bench, UNIFORM[shape], heads=heads)
            bench.warm_up(partial(decode(other, other.layer()), other.layer()))
            time_decode(f"{shape}, {model}", other)
    time_launches("1x1k", AttentionBatch(bench, UNIFORM["1x1k"]))
    for shape in PEERS:
        time_peers(shape, AttentionBatch(bench, UNIFORM[shape]))


def sweep(bench: Bench) -> None:
    for shape in ("1x1k", "1x32k", "8x1k", "64x1k", "32x8k"):
        batch = AttentionBatch(bench, UNIFORM[shape])
        q = batch.layer().q
        arch = device_of("q", q).arch
        few = len(batch.keys) * batch.heads.keys <= FEW_PROGRAMS
        start = decode_config(arch, q.shape[2], q.element_size(), 16, quantized=False, few=few)
        search(shape, batch, (kernel, "decode_config"), start, CHOICES, decode)
