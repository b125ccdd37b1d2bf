"""LoRA adapters of the demo model, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from paged_backend.checkpoint.bundled import MODEL_DIR


def make_adapter(folder: Path, seed: int, *, rank: int = 4, **config: Any) -> str:
    """Write an adapter for the queries and the down projections of the demo model.

    Args:
        folder: the folder to make.
        seed: seed of the weights.
        rank: the rank that the weights have.
        config: values of ``adapter_config.json`` in place of the usual ones.
    """
    weights = load_file(MODEL_DIR / "model.safetensors")
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(("q_proj", "down_proj")):
            for part, shape in ("A", (rank, weight.shape[1])), ("B", (weight.shape[0], rank)):
                values = torch.randn(shape, generator=random) * 0.2
                tensors[f"base_model.model.{module}.lora_{part}.weight"] = values
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **config}
    values.setdefault("target_modules", ["q_proj", "down_proj"])
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return str(folder)
