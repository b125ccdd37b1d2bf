"""Workloads that every model must answer with the tokens of transformers, whatever the schedule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from effort import ALL
from oracle import Oracle, Work, make_engine, mixed_work, run, tokens_of

from paged_backend.core.block_pool import BlockPool
from paged_backend.engine.engine import Engine


class Case:
    """The oracle of a family, options of the engine, and a mixed workload."""

    def __init__(self, family: str, folder: Path, **options: object) -> None:
        self.oracle = Oracle(family, folder)
        self.work = mixed_work(32 if ALL else 12)
        self._options = options

    def engine(self, **options: object) -> Engine:
        """Create an engine."""
        return make_engine(self.oracle.folder, **{**self._options, **options})


def one_batch(case: Case) -> None:
    """All mixed requests at once."""
    engine = case.engine(max_num_seqs=32)
    work = case.work if ALL else case.work[:8]
    case.oracle.confirm(work, tokens_of(run(engine, work)))
    assert engine.stats().num_used_blocks == 0


def chunked_prompts(case: Case) -> None:
    """A budget that cuts every prompt into chunks."""
    engine = case.engine(max_num_seqs=4, max_num_batched_tokens=7)
    work: Work = [(prompt, 6) for prompt, _ in case.work[: 12 if ALL else 6] if len(prompt) > 7]
    case.oracle.confirm(work, tokens_of(run(engine, work)))


def prefix_hits(case: Case) -> None:
    """Prompts that share full and partial blocks with an earlier one."""
    engine = case.engine(mamba_block_size=16)
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


def preemption(case: Case) -> None:
    """A pool too small for all running sequences."""
    limits = {"max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 16}
    info = case.engine(**limits).executor.info
    block_bytes = 16 * 2**20 // info.num_blocks
    num_blocks = 1 + info.kv_layout.max_blocks(0, 128) + 2
    if info.kv_layout.states is None:
        engine = case.engine(kv_cache_memory_bytes=num_blocks * block_bytes, **limits)
    else:  # states have a part of the memory
        engine = case.engine(**limits)
        engine.scheduler.kv.pool = BlockPool(num_blocks)
    work: Work = [(prompt, 24 if ALL else 16) for prompt, _ in case.work[:20]]
    case.oracle.confirm(work, tokens_of(run(engine, work)))
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_used_blocks == 0


SCENARIOS: tuple[Callable[[Case], None], ...] = (
    one_batch,
    chunked_prompts,
    prefix_hits,
    preemption,
)
