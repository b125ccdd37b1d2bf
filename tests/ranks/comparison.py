"""Engines with several ranks compared with an engine that has one."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks_in_threads import make_ranks_engine
from requests_of_every_sort import Answers, answers_of

from paged_backend.executor.base import WorkerInfo

# Steps of few tokens, so that prompts come in chunks.
STEPS = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "max_model_len": 96}
POOL_BYTES = 2**24
EVEN = {"vocab_size": 200}  # two ranks divide it

TP2 = {"tensor_parallel_size": 2}
PP2 = {"pipeline_parallel_size": 2}
TP2_PP2 = TP2 | PP2
EP2 = TP2 | {"enable_expert_parallel": True}


def small_pool(info: WorkerInfo) -> tuple[int, int]:
    """Return the blocks for one and a half longest sequences, and the bytes of this pool.

    Args:
        info: an engine with the same options, `STEPS`, and a pool of `POOL_BYTES`.
    """
    num_blocks = info.kv_layout.max_blocks(0, STEPS["max_model_len"]) * 3 // 2 + 1
    block_bytes = POOL_BYTES // info.num_blocks
    if info.kv_layout.states is not None:  # half of the bytes are for states
        block_bytes = 2 * info.kv_layout.block_size * info.kv_bytes_per_token
    return num_blocks, num_blocks * block_bytes


def answers_with_preemption(folder: Path, **options: object) -> Answers:
    """Answer with room for one and a half longest sequences."""
    info = make_ranks_engine(folder, **STEPS, **options).executor.info
    num_blocks, num_bytes = small_pool(info)
    engine = make_ranks_engine(folder, **STEPS, **options, kv_cache_memory_bytes=num_bytes)
    assert engine.executor.info.num_blocks == num_blocks
    return answers_of(engine)


def assert_equal(
    one: Answers, several: Answers, tolerance: float = 1e-4, *, preempted: bool = True
) -> None:
    assert several.tokens == one.tokens
    assert several.logprobs.keys() == one.logprobs.keys()
    for name, expected in one.logprobs.items():
        for a, b in zip(several.logprobs[name], expected, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=tolerance)
            assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=tolerance)
    assert (several.num_preemptions > 0) is preempted
    assert several.num_hits > 0


def compare(
    folder: Path,
    layouts: list[dict[str, object]],
    *,
    tolerance: float = 1e-4,
    preempted: bool = True,
    **options: object,
) -> None:
    """Compare the answers of several ranks with those of one, in each layout.

    Args:
        folder: the checkpoint.
        layouts: the options that say how many ranks there are.
        tolerance: the largest difference of log-probabilities.
        preempted: the pool is so small that sequences are preempted.
        options: options of all engines.
    """

    def answer(**layout: object) -> Answers:
        if preempted:
            return answers_with_preemption(folder, **options, **layout)
        return answers_of(make_ranks_engine(folder, **STEPS, **options, **layout))

    one = answer()
    for layout in layouts:
        assert_equal(one, answer(**layout), tolerance, preempted=preempted)
