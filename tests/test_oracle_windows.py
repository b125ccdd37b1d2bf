"""Tokens equal those of transformers although blocks before a window are freed and spoiled."""

from __future__ import annotations

import pytest
import torch
from effort import ALL
from oracle import Oracle, Work, make_engine, mixed_work, run, tokens_of

from paged_backend.core.block_pool import NULL_BLOCK
from paged_backend.core.sequence import Sequence
from paged_backend.engine.engine import Engine
from paged_backend.values.errors import ConfigError
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

FAMILIES = ("mistral", "qwen2-window", "qwen3-window", "llama4")
NUM_GROUPS = {"mistral": 1, "qwen2-window": 3, "qwen3-window": 3, "llama4": 4}


class Case:
    """A family's oracle and a mixed workload."""

    def __init__(self, family, folder):
        self.family = family
        self.oracle = Oracle(family, folder)
        self.work = mixed_work(32 if ALL else 12)

    def engine(self, **options) -> WatchedEngine:
        engine = make_engine(self.oracle.folder, block_size=8, **options)
        assert engine.scheduler.kv.num_groups == NUM_GROUPS[self.family]
        return WatchedEngine(engine)


class WatchedEngine:
    """Spoils what nobody may read before each step, and counts the blocks that windows leave."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.scheduler = engine.scheduler
        self.add_request = engine.add_request
        self.num_freed = 0
        self._free = engine.scheduler.kv.free_invisible_blocks
        engine.scheduler.kv.free_invisible_blocks = self._free_and_spoil

    @property
    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished

    def step(self):
        return self._engine.step()

    def _free_and_spoil(self, sequences):
        """NaN in every free block that is not cached, and in the null block."""
        pool = self.scheduler.kv.pool
        num_used = pool.num_used
        self._free(sequences)
        self.num_freed += num_used - pool.num_used
        spoiled = [*(set(pool._free) - set(pool.cached_block_ids())), NULL_BLOCK]
        attention = self._engine.executor.model_runner._attention
        for tensor in (attention._keys, attention._values):
            tensor.memory[:, spoiled] = torch.nan


# Its kinds of layers are those of "qwen2-window".
_THOROUGH = pytest.param("qwen3-window", marks=pytest.mark.thorough)


@pytest.fixture(
    scope="module", params=[_THOROUGH if name == "qwen3-window" else name for name in FAMILIES]
)
def case(request, tmp_path_factory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def check(case: Case, engine: WatchedEngine, work: Work) -> None:
    outputs = run(engine, work)
    case.oracle.confirm(work, tokens_of(outputs))
    assert engine.scheduler.kv.pool.num_used == 0
    assert engine.num_freed > 0


@pytest.mark.sampled
@pytest.mark.parametrize("caching", [True, False])
def test_one_continuous_batch_of_mixed_lengths(case, caching):
    check(case, case.engine(max_num_seqs=32, enable_prefix_caching=caching), case.work)


@pytest.mark.sampled
@pytest.mark.parametrize("caching", [True, False])
def test_every_prompt_in_chunks(case, caching):
    engine = case.engine(max_num_batched_tokens=7, max_num_seqs=4, enable_prefix_caching=caching)
    check(case, engine, [(prompt, 8) for prompt, _ in case.work[:16] if len(prompt) > 7])


def test_prefix_hits_without_the_blocks_before_the_window(case):
    engine = case.engine(max_num_batched_tokens=8, max_num_seqs=8)
    first = [(7 * i + 3) % 190 + 3 for i in range(64)]
    check(case, engine, [(first, 6)])
    kv = engine.scheduler.kv
    sequence = Sequence(0, Request("", first, SamplingParams()), 0, 0, frozenset(), 1000)
    keys = kv._keys_up_to(sequence, 24)
    unneeded = {
        key
        for place, key in enumerate(keys)
        if kv.layout.windows[place % kv.num_groups] is not None
    }
    taken = []
    while any(
        kv.pool.find(key) is not None for key in unneeded
    ):  # they are the least recently used
        taken.append(kv.pool.allocate())
    kv.pool.release(taken)
    later: Work = [(first, 6), (first[:56], 6), (first[:60] + [5, 6, 7], 6), (first + [9], 6)]
    outputs = run(engine, later)
    case.oracle.confirm(later, tokens_of(outputs))
    assert [outputs[str(i)][0].num_cached_tokens for i in range(4)] == [56, 48, 56, 64]


def test_preemption_in_the_smallest_pool(case):
    options = {"max_model_len": 128, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    layout = case.engine(**options)._engine.executor.info.kv_layout
    num_blocks = 1 + layout.max_blocks(0, 128)
    assert num_blocks < 1 + 16 * layout.num_groups
    info = case.engine(**options)._engine.executor.info
    assert "x 128 tokens (windows of KV cache groups: " in info.describe()
    block_bytes = 16 * 2**20 // info.num_blocks
    engine = case.engine(kv_cache_memory_bytes=num_blocks * block_bytes, **options)
    assert engine.scheduler.kv.pool.num_blocks == num_blocks
    check(case, engine, [(prompt, 24) for prompt, _ in case.work])
    assert engine.scheduler.stats().num_preemptions > 0
    with pytest.raises(ConfigError, match=f"needs {num_blocks}; .* or max_num_batched_tokens"):
        case.engine(kv_cache_memory_bytes=(num_blocks - 1) * block_bytes, **options)


def test_three_answers_of_a_prompt(case):
    """They share blocks, and copy those that they write to."""
    engine = case.engine(max_num_seqs=9, max_num_batched_tokens=16)
    work: Work = [(prompt, 24) for prompt, _ in case.work[:6]]
    for index, (prompt, max_tokens) in enumerate(work):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, n=3)
        engine.add_request(Request(str(index), prompt, params))
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished:
        for output in engine.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        engine.scheduler.check_invariants()
    for number in range(3):
        answers = [tokens[str(index), number] for index in range(len(work))]
        case.oracle.confirm(work, answers)
    assert engine.scheduler.kv.pool.num_used == 0
    assert engine.num_freed > 0
