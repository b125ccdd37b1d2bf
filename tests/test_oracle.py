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

    def engine(self, **options) -> Engine:
        return make_engine(self.oracle.folder, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request, tmp_path_factory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def test_one_continuous_batch_of_mixed_lengths(case):
    engine = case.engine(max_num_seqs=32)
    answers = tokens_of(run(engine, case.work))
    case.oracle.confirm(case.work, answers)
    assert answers[:4] == [case.oracle.generate(*item) for item in case.work[:4]]
    assert engine.stats().num_used_blocks == 0


def test_every_prompt_in_chunks(case):
    engine = case.engine(max_num_seqs=4, max_num_batched_tokens=7)
    work: Work = [(prompt, 8) for prompt, _ in case.work if len(prompt) > 7]
    case.oracle.confirm(work, tokens_of(run(engine, work)))


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
    case.oracle.confirm(later, tokens_of(outputs))
    assert [outputs[str(i)][0].num_cached_tokens for i in range(4)] == [48, 32, 32, 64]


def test_preemption_in_a_small_pool(case):
    block_bytes = 16 * 2**20 // case.engine().executor.info.num_blocks
    engine = case.engine(max_model_len=128, kv_cache_memory_bytes=14 * block_bytes)
    work: Work = [(prompt, 24) for prompt, _ in case.work]
    case.oracle.confirm(work, tokens_of(run(engine, work)))
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_used_blocks == 0
