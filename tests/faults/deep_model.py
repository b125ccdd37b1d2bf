"""A model that answers as the demo model does, and takes longer: one to draft for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from paged_backend.checkpoint.bundled import MODEL_DIR

NUM_LAYERS = 36


def make_deep_model(folder: Path) -> None:
    """The demo model with more layers, which add nothing: it takes longer for the same tokens."""
    shutil.copytree(MODEL_DIR, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    added: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith("model.layers.0."):
            rest = name.removeprefix("model.layers.0.")
            adds = rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
            for index in range(config["num_hidden_layers"], NUM_LAYERS):
                copy = torch.zeros_like(tensor) if adds else tensor.clone()
                added[f"model.layers.{index}.{rest}"] = copy
    save_file({**tensors, **added}, folder / "model.safetensors", {"format": "pt"})
    config["num_hidden_layers"] = NUM_LAYERS
    (folder / "config.json").write_text(json.dumps(config))
