"""Padding of a step reads no weights of experts: the tokens of transformers in padded steps."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from oracle import Oracle, make_engine, run, tokens_of
from padded_steps import PLAIN, use_shapes

from paged_backend.platforms.gpu import experts as experts_module

# The families have attention to heads, latent attention, and layers with states before it.
FAMILIES = ["mixtral", "deepseek-v3", "qwen3-next"]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_know_the_padding(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = Mock(side_effect=experts_module.experts)
    monkeypatch.setattr(experts_module, "experts", product)
    oracle = Oracle(family, tmp_path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**21}
    engine = make_engine(tmp_path, device=device, **sizes)
    shapes = use_shapes(engine.executor.model_runner, PLAIN)
    product.reset_mock()
    work = [([5 + 3 * place % 90 for place in range(number)], 4) for number in (3, 20, 40)]
    outputs = run(engine, work)
    oracle.confirm(work, tokens_of(outputs))
    assert set(shapes) == set(PLAIN)
    slots = [call.kwargs["slots"] for call in product.call_args_list]
    num_layers = len(slots) // len(shapes)
    for number in range(len(shapes)):
        *before, last = slots[num_layers * number : num_layers * (number + 1)]
        assert last is None, "only the rows that are sampled"
        assert all(each is not None and bool((each < 0).any()) for each in before), before


def test_slots_are_unknown_without_attention(tmp_path: Path) -> None:
    """No attention notices when the rows are cut, as in a stage that has states only."""
    Oracle("mamba2", tmp_path)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = make_engine(tmp_path, device=device, max_num_seqs=4, max_num_batched_tokens=64)
    run(engine, [([5, 6, 7], 2)])
    assert engine.executor.model_runner._rows.slots is None
