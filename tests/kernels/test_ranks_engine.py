"""Two ranks with the kernels of a GPU: in the interpreter, or on two GPUs if there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from oracle import make_engine, run, tokens_of


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama3", {"tensor_parallel_size": 2}),
        ("llama3", {"pipeline_parallel_size": 2}),
        pytest.param("qwen3-moe", {"tensor_parallel_size": 2}, marks=pytest.mark.thorough),
        ("qwen3-moe", {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    ],
)
def test_tokens_are_those_of_one_rank(
    family: str, layout: dict[str, object], tmp_path: Path
) -> None:
    """Steps are launched ahead, and samples are drawn on the device of each rank."""
    num_gpus = torch.cuda.device_count()
    if num_gpus == 1:
        pytest.skip("one GPU is not enough for two ranks")
    layers = 2 if "pipeline_parallel_size" in layout else 1
    make_checkpoint(family, tmp_path, vocab_size=200, num_hidden_layers=layers)
    work = [([5, 6, 7, 8], 4), (list(range(3, 24)), 2)]
    options = {
        "device": "cuda" if num_gpus else "cpu",
        "enforce_eager": True,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 16,
    }
    one, two = make_engine(tmp_path, **options), make_engine(tmp_path, **options, **layout)
    assert two.executor.info.step_limits.async_scheduling
    assert tokens_of(run(two, work)) == tokens_of(run(one, work))
