"""The engine with cascade attention gives the tokens that it gives without."""

from __future__ import annotations

import pytest
import torch
from oracle import Oracle, Work, make_engine, run, tokens_of

from paged_backend.engine.engine import Engine
from paged_backend.platforms.gpu import attention, idle_batches, model_runner, shared_prefix

PREFIX = [(7 * i + 3) % 190 + 3 for i in range(17)]


@pytest.fixture
def cascades(monkeypatch) -> list[int]:
    """The numbers of shared blocks of the cascades; two sequences and two blocks are worth one."""
    monkeypatch.setattr(shared_prefix, "MIN_SAVED_OF_GRAPH", 0)
    monkeypatch.setattr(shared_prefix, "MIN_SEQS", 2)
    monkeypatch.setattr(idle_batches, "MIN_SEQS", 2)
    monkeypatch.setattr(shared_prefix, "MIN_TOKENS", 16)
    plan, noted = attention.plan_cascade, []

    def note(*args, num_shared_blocks):
        noted.append(num_shared_blocks)
        return plan(*args, num_shared_blocks=num_shared_blocks)

    monkeypatch.setattr(attention, "plan_cascade", note)
    return noted


def test_tokens_are_the_same_with_and_without_cascades(cascades, tmp_path):
    oracle = Oracle("smollm", tmp_path, num_hidden_layers=1, intermediate_size=40)

    def engine(**options: object) -> Engine:
        return make_engine(
            oracle.folder,
            device="cuda" if torch.cuda.is_available() else "cpu",
            kv_cache_memory_bytes=2**20,
            block_size=8,
            max_num_seqs=3,
            max_num_batched_tokens=16,
            **options,
        )

    # The last prompt runs in one step with the decodes of earlier ones and shares their blocks.
    work: Work = [(PREFIX + [5], 6), (PREFIX + [9, 8], 5), (PREFIX + [4] * 20, 4)]
    answers = []
    for disabled in (True, False):
        there = engine(disable_cascade_attn=disabled)
        run(there, [(PREFIX, 1)])
        cascades.clear()  # those of a warm-up
        answers.append(tokens_of(run(there, work)))
        assert bool(cascades) is not disabled
    assert answers[0] == answers[1]
    assert set(cascades) == {2}


def test_only_layers_without_a_window_share_blocks(cascades, tmp_path):
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    oracle = Oracle("qwen3-window", tmp_path, intermediate_size=40, **layers)
    engine = make_engine(
        oracle.folder,
        device="cuda" if torch.cuda.is_available() else "cpu",
        kv_cache_memory_bytes=2**20,
        block_size=8,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        disable_cascade_attn=False,
    )
    run(engine, [(PREFIX, 1)])
    cascades.clear()
    work: Work = [(PREFIX + [5], 3), (PREFIX + [9, 8], 3)]
    oracle.confirm(work, tokens_of(run(engine, work)))
    assert set(cascades) == {2}


def test_warming_up_runs_each_size(cascades, tmp_path):
    oracle = Oracle("smollm", tmp_path, num_hidden_layers=1, intermediate_size=40)
    engine = make_engine(
        oracle.folder,
        device="cuda" if torch.cuda.is_available() else "cpu",
        kv_cache_memory_bytes=2**20,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        disable_cascade_attn=False,
    )
    cascades.clear()
    engine.executor.model_runner.warm_up()
    assert cascades == [1, 1]  # for 2 and 3 sequences
    work: Work = [([5, 6, 7], 3)]
    oracle.confirm(work, tokens_of(run(engine, work)))


@pytest.mark.parametrize(("family", "has_attention"), [("smollm", True), ("mamba", False)])
def test_only_models_with_attention_look_for_shared_blocks(
    family, has_attention, monkeypatch, tmp_path
):
    """A cascade runs without a graph, and would save nothing."""
    counted: list[int] = []

    def count(decodes, *others):
        counted.append(len(decodes))
        return 0

    monkeypatch.setattr(model_runner, "count_shared_blocks", count)
    oracle = Oracle(family, tmp_path, num_hidden_layers=1, intermediate_size=40)
    engine = make_engine(
        oracle.folder,
        device="cuda" if torch.cuda.is_available() else "cpu",
        block_size=8,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        disable_cascade_attn=False,
    )
    work: Work = [(PREFIX + [5], 3), (PREFIX + [9, 8], 3)]
    oracle.confirm(work, tokens_of(run(engine, work)))
    assert bool(counted) is has_attention
