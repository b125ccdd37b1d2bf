"""An engine with dense products of ours: its warm-up runs each of their kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle, make_engine
from paged_kernels.tuning.products import MatmulConfig, dense_matmul_config, gated_matmul_config
from torch import Tensor

from paged_backend.platforms.gpu import linear
from paged_backend.platforms.gpu.model_runner import GpuModelRunner


@pytest.mark.parametrize("max_num_seqs", [3, 40])
def test_each_kernel_of_dense_products_is_warmed_up(
    max_num_seqs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 32 rows are ours here, so 64 do not run the kernels for more than 16.

    With 3 sequences, only steps with prompts reach this number of rows, and not in the last layer.
    """
    layers = 2 if max_num_seqs == 3 else 1
    Oracle("smollm", tmp_path, num_hidden_layers=layers, intermediate_size=40)
    monkeypatch.setattr(linear, "max_rows", lambda *_, **__: 32)
    tiles: defaultdict[tuple[str, torch.Size], set[int]] = defaultdict(set)  # rows, by weight

    def note(name: str, config: Callable[[int], MatmulConfig]) -> None:
        product = getattr(linear, name)

        def noted(x: Tensor, w: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            tiles[name, w.shape].add(config(len(x)).rows)
            return product(x, w, *args, **kwargs)

        monkeypatch.setattr(linear, name, noted)

    note("dense_matmul", dense_matmul_config)
    note("dense_matmul_silu_and_mul", gated_matmul_config)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 40, "enforce_eager": True}
    engine = make_engine(tmp_path, dtype="bfloat16", device=device, **limits)
    runner = engine.executor.model_runner
    assert isinstance(runner, GpuModelRunner)
    runner.warm_up()
    assert len(tiles) == 5  # the products of a layer, and the output layer
    assert all(rows == {16, 64} for rows in tiles.values()), tiles
