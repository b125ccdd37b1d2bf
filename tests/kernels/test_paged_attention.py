"""Paged attention of decodes, chunks of prompts and both against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import Batch, assert_close
from paged_kernels.device import Device, pretend
from paged_kernels.errors import ArgumentError
from paged_kernels.paged_attention import cascade_decode, paged_attention, plan_cascade
from paged_kernels.paged_decode import paged_decode, plan_decode
from paged_kernels.paged_prefill import paged_prefill, plan_prefill
from paged_kernels.splits import SplitPlan
from paged_kernels.windows import Chunks

DECODES = [(1, 300), (1, 1), (1, 16), (1, 129), (1, 0), (1, 64)]
MIXED = [(1, 130), (1, 7), (1, 64), (5, 17), (40, 40), (33, 130), (1, 40), (16, 32)]


def check(
    batch: Batch, num_decodes: int = 0, tolerance: float | None = None, **options: object
) -> None:
    """Compare the kernels with the reference; every cell of the output must be written.

    What is before the windows must not be read.
    """
    wanted, wanted_lse = batch.wanted(batch.params(**options))
    if "window" in options:
        batch = batch.without_tokens_before(options["window"])
    params = batch.params(**options)
    out, lse = batch.empty_out(), batch.empty_lse()
    got = paged_attention(
        batch.q,
        batch.kv_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        params,
        num_decodes=num_decodes,
        out=out,
        lse=lse,
    )
    assert got is out
    assert_close(out, wanted, batch.dtype, tolerance)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-5, rtol=2e-5)


def per_head(num_heads: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0.05, 1.5, num_heads, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_batch(device, dtype):
    check(Batch(MIXED, dtype=dtype, device=device), num_decodes=3)


@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_block_sizes(device, block_size):
    check(Batch(MIXED[:6], block_size=block_size, device=device), num_decodes=3)


@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256, 512])
def test_head_sizes(device, head_dim):
    lengths = [(1, 130), (9, 70)]
    check(Batch(lengths, head_dim=head_dim, device=device, dtype=torch.float16), num_decodes=1)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 1), (4, 2), (32, 1)])
def test_heads_of_512(device, dtype, heads, kv_heads):
    """With few heads of a group, and with as many as fit; a decode has several splits."""
    options = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 512, "device": device}
    batch = Batch([(1, 300), (1, 20), (37, 70)], dtype=dtype, **options)
    check(batch, num_decodes=2)
    check(batch, num_decodes=2, window=24)
    quantized = {"cache_dtype": torch.int8, "token_scales": True}
    check(Batch([(1, 40), (5, 30)], dtype=torch.float16, **quantized, **options), num_decodes=1)


def test_heads_that_are_too_large_or_too_many(device):
    large = Batch([(1, 20)], head_dim=520, device=device)
    with pytest.raises(ArgumentError, match="q must have heads of 16 to 512, got 520"):
        check(large, num_decodes=1)
    many = Batch([(1, 20)], num_heads=33, num_kv_heads=1, head_dim=512, device=device)
    with pytest.raises(ArgumentError, match="q must have at most 32 heads to one of .*, got 33"):
        check(many, num_decodes=1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (14, 2), (9, 3), (20, 1), (71, 1)])
def test_head_groups(device, heads, kv_heads):
    lengths = [(1, 70), (11, 30)]
    batch = Batch(lengths, num_heads=heads, num_kv_heads=kv_heads, head_dim=32, device=device)
    check(batch, num_decodes=1)


LENGTHS = [1, 17, 64, pytest.param(100, marks=pytest.mark.thorough), 1000]
"""Sizes of windows and chunks: within a tile, one tile, several tiles, and more than all keys."""


@pytest.mark.parametrize("window", LENGTHS)
def test_sliding_window(device, window):
    check(Batch(MIXED[:6], device=device), num_decodes=3, window=window)
    check(Batch(DECODES, device=device), num_decodes=len(DECODES), window=window)


@pytest.mark.parametrize("size", LENGTHS)
def test_chunks(device, size):
    """Prompts that begin within a chunk, cross one border or several, or end at one."""
    prompts = [(1, 130), (1, 7), (1, 64), (5, 17), (40, 40), (33, 130), (70, 201)]
    check(Batch(prompts, device=device), num_decodes=3, window=Chunks(size))
    decodes = [*DECODES, (1, 65), (1, 101)]  # the first tokens of chunks
    check(Batch(decodes, device=device), num_decodes=len(decodes), window=Chunks(size))


def test_chunks_with_every_option_of_scores(device):
    options = {"softcap": 3.0, "sinks": per_head(4, device) * 4 - 2}
    quantized = {"cache_dtype": torch.int8, "token_scales": True}
    for batch in (Batch(MIXED, device=device), Batch(MIXED, device=device, **quantized)):
        check(batch, num_decodes=3, window=Chunks(24), **options)


def test_a_window_of_the_same_size_is_not_a_chunk(device):
    batch = Batch([(1, 70), (9, 30)], device=device)
    window, chunks = (batch.wanted(batch.params(window=w))[0] for w in (24, Chunks(24)))
    assert (window - chunks).abs().max() > 0.1
    with pytest.raises(ArgumentError, match="window must be at least 1, got 0"):
        batch.params(window=Chunks(0)).check(batch.q, batch.kv_cache)
    plan = plan_decode(batch.q[:1], batch.kv_cache, batch.seq_lens[:1], window=24)
    params = batch.params(window=Chunks(24))
    table, lengths = batch.block_table[:1], batch.seq_lens[:1]
    with pytest.raises(ArgumentError, match="plan was made for a window of 24"):
        paged_decode(batch.q[:1], batch.kv_cache, table, lengths, params, plan=plan)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(device, softcap):
    batch = Batch(MIXED[:5], device=device)
    batch.qkv *= 20  # far into the flat parts of the curve
    check(batch, num_decodes=3, softcap=softcap, tolerance=1e-5)


def test_attention_sinks(device):
    sinks = per_head(4, device) * 4 - 2
    check(Batch(MIXED[:5], device=device), num_decodes=3, sinks=sinks)
    check(Batch(DECODES, device=device), num_decodes=len(DECODES), sinks=sinks)
    check(Batch(DECODES, device=device), num_decodes=len(DECODES), sinks=sinks, window=20)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantized_cache_with_a_scale_for_each_head(device, dtype, cache_dtype):
    batch = Batch(MIXED[:5], dtype=dtype, cache_dtype=cache_dtype, device=device)
    check(batch, num_decodes=3)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_quantized_cache_with_a_scale_for_each_token_and_head(device, dtype, cache_dtype):
    quantized = {"dtype": dtype, "cache_dtype": cache_dtype, "token_scales": True}
    check(Batch(MIXED[:5], device=device, **quantized), num_decodes=3)


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_queries_of_bfloat16_beyond_float16(device, size):
    """Products with float8 are made in float16, which has no numbers of this size."""
    quantized = {"dtype": torch.bfloat16, "cache_dtype": torch.float8_e4m3fn}
    batch = Batch(MIXED[:5], device=device, **quantized)
    batch.qkv *= size
    batch.q[0, 0] = 0.0
    check(batch, num_decodes=3, scale=batch.params().scale / size)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.int8])
def test_token_scales_with_every_option_of_scores(device, cache_dtype):
    quantized = {"cache_dtype": cache_dtype, "token_scales": True}
    sinks = per_head(4, device) * 4 - 2
    mixed = Batch([(1, 130), (5, 17), (33, 130)], device=device, **quantized)
    decodes = Batch(DECODES, device=device, **quantized)  # some of them in several splits
    check(mixed, num_decodes=1, window=17, softcap=3.0, sinks=sinks)
    check(decodes, num_decodes=len(DECODES), window=100, sinks=sinks)
    check(decodes, num_decodes=len(DECODES), softcap=3.0)


def test_small_values_keep_their_digits_in_float16(device):
    """Their scales are near the smallest normal number of the dtype."""
    quantized = {"dtype": torch.float16, "cache_dtype": torch.int8, "token_scales": True}
    batch = Batch([(1, 300), (33, 130)], device=device, **quantized)
    batch.kv_scales[:, 1] *= 2e-4
    got = paged_attention(
        batch.q,
        batch.kv_cache,
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        batch.params(),
        num_decodes=1,
    )
    wanted, _ = batch.wanted(batch.params())
    torch.testing.assert_close(got.double(), wanted, rtol=2e-3, atol=2e-7)


def test_decodes_in_splits_and_whole(device):
    check(Batch(DECODES, device=device), num_decodes=len(DECODES))
    many = [(1, 1 + 7 * i % 40) for i in range(9)] + [(1, 500)]
    check(Batch(many, num_heads=2, num_kv_heads=1, device=device), num_decodes=len(many))


def test_tables_that_name_a_block_more_than_once(device):
    batch = Batch(MIXED[:6], device=device)
    full = batch.block_table[0, 0]
    for seq, (_, keys) in enumerate(batch.lengths):
        batch.block_table[seq, : -(-keys // batch.block_size)] = full
    check(batch, num_decodes=3)


def test_only_prompts(device):
    check(Batch([(1, 1), (20, 20), (3, 90)], device=device))


def test_large_scores_do_not_overflow(device):
    batch = Batch(MIXED[:5], device=device)
    batch.qkv *= 1000  # scores in the thousands: their rounding shows in the weights
    check(batch, num_decodes=3, tolerance=1e-3)


def test_padded_sequences_change_nothing(device):
    batch = Batch([(1, 100), (1, 20), *[(1, 0)] * 6], device=device)
    params = batch.params()
    out = paged_decode(batch.q, batch.kv_cache, batch.block_table, batch.seq_lens, params)
    alone = paged_decode(
        batch.q[:2], batch.kv_cache, batch.block_table[:2], batch.seq_lens[:2], params
    )
    torch.testing.assert_close(out[:2], alone, atol=1e-6, rtol=1e-6)
    assert torch.all(out[2:] == 0)


def test_one_plan_serves_all_layers_and_splits_cover_every_key(device):
    batch = Batch(DECODES, device=device)
    plan = plan_decode(batch.q, batch.kv_cache, batch.seq_lens)
    covered = {seq: [] for seq in range(len(DECODES))}
    for seq, begin, end, alone in plan.splits.tolist():
        if seq >= 0:
            covered[seq].append((begin, end))
            assert alone == (plan.num_splits[seq] == 1)
    for seq, (_, length) in enumerate(DECODES):
        runs = sorted(covered[seq])
        assert len(runs) == plan.num_splits[seq]
        assert [begin for begin, _ in runs] == [0, *(end for _, end in runs)][: len(runs)]
        assert (runs[-1][1] if runs else 0) == length
    for _ in range(2):
        got = paged_decode(
            batch.q, batch.kv_cache, batch.block_table, batch.seq_lens, batch.params(), plan=plan
        )
        assert_close(got, batch.wanted(batch.params())[0], batch.dtype)


# Beside a decode: prompts after a prefix, one without, two that pad the step, and a long one.
LATE = [(1, 130), (5, 217), (40, 200), (9, 9), (0, 30), (0, 0), (2, 900)]
H200 = Device(arch=90, num_sms=132)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.thorough),
        {"dtype": torch.bfloat16, "num_heads": 14},
        {"head_dim": 80, "softcap": 3.0, "num_heads": 6},
        pytest.param({"sinks": True}, marks=pytest.mark.thorough),
        {"cache_dtype": torch.int8, "dtype": torch.float16},
        {"cache_dtype": torch.float8_e4m3fn, "token_scales": True, "sinks": True},
    ],
    ids=str,
)
def test_keys_of_few_queries_are_split(device, options):
    given = {name: options.pop(name) for name in ("sinks", "softcap") if name in options}
    batch = Batch(LATE, device=device, **options)
    heads = per_head(batch.num_heads, device)
    scores = {"softcap": given.get("softcap")}
    scores |= {"sinks": heads * 4 - 2} if "sinks" in given else {}
    step = batch.seq_lens, batch.query_start_loc
    with pretend(H200):
        plan = plan_prefill(batch.q, batch.kv_cache, *step, first_seq=1)
        assert int(plan.num_splits.max()) > 2
        results = []
        for _ in range(200 if device.type == "cuda" else 2):
            out, lse = batch.empty_out(), batch.empty_lse()
            paged_attention(
                batch.q,
                batch.kv_cache,
                batch.block_table,
                *step,
                batch.params(**scores),
                num_decodes=1,
                prompt_plan=plan,
                out=out,
                lse=lse,
            )
            assert not plan.arrivals.any()
            results.append(out)
    wanted, wanted_lse = batch.wanted(batch.params(**scores))
    assert_close(results[0], wanted, batch.dtype)
    torch.testing.assert_close(lse.double(), wanted_lse, atol=2e-5, rtol=2e-5)
    assert all(torch.equal(got, results[0]) for got in results)


def test_splits_of_prompts_cover_what_each_tile_of_queries_sees(device):
    batch = Batch(LATE, dtype=torch.bfloat16, device=device)
    with pretend(H200):
        plan = plan_prefill(batch.q, batch.kv_cache, batch.seq_lens, batch.query_start_loc)
    queries_of_tile = 128 * batch.num_kv_heads // batch.num_heads
    ends = [
        min(keys - queries + first + queries_of_tile, keys)
        for queries, keys in LATE
        for first in range(0, queries, queries_of_tile)
    ]
    found: dict[int, list[tuple[int, int]]] = {}
    for tile, begin, end, alone in plan.splits.tolist():
        if tile >= 0:
            found.setdefault(tile, []).append((begin, end))
            assert alone == (plan.num_splits[tile] == 1)
    for (_, runs), end in zip(sorted(found.items()), ends, strict=True):
        runs.sort()
        assert [begin for begin, _ in runs] == [0, *(stop for _, stop in runs[:-1])]
        assert runs[-1][1] == end


def test_keys_are_not_split_where_it_would_gain_nothing(device):
    """Many queries keep the device busy, and a window leaves few keys."""
    few, many = (Batch([(n, 5000)], dtype=torch.bfloat16, device=device) for n in (9, 5000))

    def planned(batch: Batch, **options: int) -> SplitPlan | None:
        step = batch.seq_lens, batch.query_start_loc
        return plan_prefill(batch.q, batch.kv_cache, *step, **options)

    with pretend(H200):
        plan = planned(few)
        assert plan is not None
        assert planned(few, window=100) is None
        assert planned(many) is None
        for batch, problem in (
            (many, "another shape"),
            (Batch(LATE[:3], device=device), "another"),
        ):
            step = batch.block_table, batch.seq_lens, batch.query_start_loc, batch.params()
            with pytest.raises(ArgumentError, match=f"^plan was made for {problem}"):
                paged_prefill(batch.q, batch.kv_cache, *step, plan=plan)


@pytest.mark.parametrize("shared_blocks", [0, 20])
def test_calls_with_one_plan_agree_to_the_last_bit(device, shared_blocks):
    """Whichever program of a sequence is the last, it merges all splits, and in their order."""
    lengths = [(1, 700), (1, 350), (1, 0), (1, 2000)] if not shared_blocks else [(1, 400)] * 3
    batch = Batch(lengths, shared_blocks=shared_blocks, device=device)
    step, params = (batch.block_table, batch.seq_lens), batch.params()
    if shared_blocks:
        cascade = plan_cascade(batch.q, batch.kv_cache, *step, num_shared_blocks=shared_blocks)
        plans = [cascade.shared, cascade.own]
    else:
        plans = [plan_decode(batch.q, batch.kv_cache, batch.seq_lens)]
    assert max(int(plan.num_splits.max()) for plan in plans) > 1
    results = []
    for _ in range(200 if device.type == "cuda" else 2):
        if shared_blocks:
            got = cascade_decode(batch.q, batch.kv_cache, params, cascade)
        else:
            got = paged_decode(batch.q, batch.kv_cache, *step, params, plan=plans[0])
        results.append(got)
        assert not any(plan.arrivals.any() for plan in plans)
    assert_close(results[0], batch.wanted(params)[0], batch.dtype)
    assert all(torch.equal(got, results[0]) for got in results)


def test_one_long_sequence_among_short_ones_is_cut(device):
    batch = Batch([(1, 16)] * 12 + [(1, 2000)], num_heads=1, num_kv_heads=1, device=device)
    plan = plan_decode(batch.q, batch.kv_cache, batch.seq_lens)
    assert plan.num_splits.tolist()[:12] == [1] * 12
    assert plan.num_splits[12] > 8
    assert plan.splits[0, 0] == 12  # what takes longest starts first


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_cascade_reads_shared_blocks_once(device, cache_dtype):
    batch = Batch(
        [(1, 300), (1, 97), (1, 101)],
        shared_blocks=6,
        cache_dtype=cache_dtype,
        token_scales=cache_dtype is not None,
        device=device,
    )
    params = batch.params(sinks=per_head(4, device))
    step = batch.block_table, batch.seq_lens
    plan = plan_cascade(batch.q, batch.kv_cache, *step, num_shared_blocks=6)
    got = cascade_decode(batch.q, batch.kv_cache, params, plan)
    assert_close(got, batch.wanted(params)[0], batch.dtype)


def test_a_cascade_and_the_chunk_of_a_prompt_in_one_batch(device):
    batch = Batch([(1, 40), (1, 33), (5, 37)], shared_blocks=2, device=device)
    step, params = (batch.kv_cache, batch.block_table, batch.seq_lens), batch.params()
    decodes = batch.kv_cache, batch.block_table[:2], batch.seq_lens[:2]
    got = paged_attention(
        batch.q,
        *step,
        batch.query_start_loc,
        params,
        num_decodes=2,
        plan=plan_cascade(batch.q[:2], *decodes, num_shared_blocks=2),
        out=batch.empty_out(),
    )
    assert_close(got, batch.wanted(params)[0], batch.dtype)


def test_offsets_past_32_bits(device):
    """Block ids whose offsets in the pool pass 2**31 elements; the pool is never filled."""
    batch = Batch([(1, 100), (20, 90)], dtype=torch.float16, device=device)
    used = batch.kv_cache
    shift = 2**31 // used[0].numel() + 1
    pool = torch.empty(shift + len(used), *used.shape[1:], dtype=used.dtype, device=device)
    pool[shift:] = used
    table = batch.block_table
    batch.kv_cache, batch.block_table = pool, torch.where(table < 2**30, table + shift, table)
    check(batch, num_decodes=1)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", {"q": lambda b: b.q.double()}),
        ("q", {"q": lambda b: b.q[0]}),
        ("q", {"q": lambda b: b.q.transpose(1, 2)}),
        ("kv_cache", {"kv_cache": lambda b: b.kv_cache.double()}),
        ("kv_cache", {"kv_cache": lambda b: b.kv_cache[:, :1]}),
        ("kv_cache", {"kv_cache": lambda b: b.kv_cache.transpose(2, 3)}),
        ("kv_cache", {"kv_cache": lambda b: b.kv_cache[:, :, :, :12].contiguous()}),
        ("kv_cache", {"kv_cache": lambda b: b.kv_cache[..., :32].contiguous()}),
        ("kv_cache", {"kv_cache": lambda b: torch.cat([b.kv_cache] * 3, dim=2)}),
        ("kv_cache", {"kv_cache": lambda b: b.kv_cache.to("meta")}),
        ("block_table", {"block_table": lambda b: b.block_table.long()}),
        ("block_table", {"block_table": lambda b: b.block_table[:2]}),
        ("block_table", {"block_table": lambda b: b.block_table[:, ::2]}),
        ("seq_lens", {"seq_lens": lambda b: b.seq_lens.float()}),
        ("query_start_loc", {"query_start_loc": lambda b: b.query_start_loc[:-1]}),
        ("num_decodes", {"num_decodes": lambda b: 99}),
        ("num_decodes", {"num_decodes": lambda b: -1}),
        ("out", {"out": lambda b: b.empty_out()[:-1]}),
        ("out", {"out": lambda b: b.empty_out().half()}),
        ("lse", {"lse": lambda b: b.empty_lse().T}),
        ("plan", {"plan": lambda b: plan_decode(b.q[:2], b.kv_cache, b.seq_lens[:2])}),
        ("plan", {"plan": lambda b: plan_decode(b.q[:3], b.kv_cache, b.seq_lens[:3], window=4)}),
    ],
)
def test_bad_calls_name_the_argument(device, name, change):
    batch = Batch(MIXED, device=device)
    arguments = {
        "q": batch.q,
        "kv_cache": batch.kv_cache,
        "block_table": batch.block_table,
        "seq_lens": batch.seq_lens,
        "query_start_loc": batch.query_start_loc,
        "num_decodes": 3,
    }
    arguments |= {key: make(batch) for key, make in change.items()}
    with pytest.raises(ArgumentError, match=f"^{name} "):
        paged_attention(params=batch.params(), **arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", 0),
        ("softcap", -1.0),
        ("scale", float("nan")),
        ("sinks", torch.zeros(3)),
    ],
)
def test_bad_scores_name_the_option(device, name, value):
    batch = Batch(MIXED, device=device)
    check_refused(batch, name, value)


def test_bad_scales_are_named(device):
    plain, scales = Batch(MIXED[:2], device=device), torch.zeros(2, device=device)
    for name, value in (("k_scale", scales), ("v_scale", scales), ("kv_scales", plain.kv_scales)):
        check_refused(plain, name, value)
    static = Batch(MIXED[:2], cache_dtype=torch.int8, device=device)
    strided = torch.zeros(4, device=device)[::2]  # a copy to the device would be contiguous
    for name, value in (("k_scale", scales[:1]), ("v_scale", strided)):
        check_refused(static, name, value)
    check_refused(static, "kv_scales", static.kv_scales)
    tokens = Batch(MIXED[:2], cache_dtype=torch.int8, token_scales=True, device=device)
    whole = tokens.kv_scales
    for value in (whole[1:], whole[:, :1], whole.double(), whole.transpose(2, 3), whole.to("meta")):
        check_refused(tokens, "kv_scales", value)


def check_refused(batch: Batch, name: str, value: object) -> None:
    if isinstance(value, torch.Tensor) and not value.is_meta:
        value = value.to(batch.device)
    params = replace(batch.params(), **{name: value})
    with pytest.raises(ArgumentError, match=f"^{name} "):
        paged_attention(
            batch.q,
            batch.kv_cache,
            batch.block_table,
            batch.seq_lens,
            batch.query_start_loc,
            params,
        )


def test_arguments_that_cascades_cannot_take_are_refused_by_name(device):
    batch = Batch([(1, 100), (1, 120)], shared_blocks=2, device=device)
    step = batch.q, batch.kv_cache, batch.block_table, batch.seq_lens
    plan = plan_cascade(*step, num_shared_blocks=2)
    with pytest.raises(ArgumentError, match=r"^window "):
        cascade_decode(batch.q, batch.kv_cache, batch.params(window=8), plan)
    with pytest.raises(ArgumentError, match=r"^num_shared_blocks "):
        plan_cascade(*step, num_shared_blocks=0)
    with pytest.raises(ArgumentError, match=r"^lse "):
        paged_attention(
            *step,
            batch.query_start_loc,
            batch.params(),
            num_decodes=2,
            plan=plan,
            lse=batch.empty_lse(),
        )
