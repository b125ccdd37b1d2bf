"""Greedy tokens equal transformers' own, token for token, in float32, whatever the schedule."""

from __future__ import annotations

import pytest
from checkpoints import FAMILIES
from oracle import Oracle, Work, make_engine, mixed_work, run, tokens_of

from paged_backend.engine import Engine


class Case:
    """A family's oracle and its answers to one mixed workload."""

    def __init__(self, family, folder):
        self.oracle = Oracle(family, folder)
        self.work = mixed_work(32)
        self.expected = [self.oracle.answer(*item) for item in self.work]

    def engine(self, **options) -> Engine:
        return make_engine(self.oracle.folder, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_one_continuous_batch_of_mixed_lengths(case):
    engine = case.engine(max_num_seqs=32)
    assert tokens_of(run(engine, case.work)) == case.expected
    assert engine.stats().num_used_blocks == 0


def test_every_prompt_in_chunks(case):
    engine = case.engine(max_num_seqs=4, max_num_batched_tokens=7)
    work = [(prompt * 8)[:8] if len(prompt) < 8 else prompt for prompt, _ in case.work[:12]]
    items: Work = [(prompt, 8) for prompt in work]
    assert tokens_of(run(engine, items)) == [case.oracle.answer(*item) for item in items]


def test_prefix_hits_at_full_and_partial_blocks(case):
    engine = case.engine()
    first = [(7 * i + 3) % 190 + 3 for i in range(64)]
    later: Work = [
        (first, 6),  # all its blocks are cached, the last of them is computed again
        (first[:48], 6),  # ends at a block's border
        (first[:40] + [5, 6, 7], 6),  # leaves the cached prefix within a block
        (first + [9], 6),
    ]
    run(engine, [(first, 6)])
    outputs = run(engine, later)
    assert tokens_of(outputs) == [case.oracle.answer(*item) for item in later]
    assert [outputs[str(i)][0].num_cached_tokens for i in range(4)] == [48, 32, 32, 64]


def test_preemption_in_a_small_pool(case):
    block_bytes = 16 * 2**20 // case.engine().runner.num_blocks
    engine = case.engine(max_model_len=128, kv_cache_memory_bytes=14 * block_bytes)
    items = [(prompt, 24) for prompt, _ in case.work]
    expected = [case.oracle.answer(*item) for item in items]
    assert tokens_of(run(engine, items)) == expected
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_used_blocks == 0
