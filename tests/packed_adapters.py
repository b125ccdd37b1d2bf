"""Adapters from PEFT's folders in the tensors of TensorRT-LLM's clients."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import load_file

KINDS = {
    **{"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4},
    **{"gate_proj": 5, "down_proj": 6, "up_proj": 7},
}
_NAME = re.compile(r".*layers\.(\d+)\.\w+\.(\w+)\.lora_A\.weight")


def pack(folder: Path, dtype: Any = np.float16) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Return ``lora_weights`` and ``lora_config`` of a folder without patterns."""
    values = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    rows, config = [], []
    for name, a in tensors.items():
        if (match := _NAME.fullmatch(name)) is not None:
            rank = len(a)
            scale = values["lora_alpha"] / (rank**0.5 if values.get("use_rslora") else rank)
            b = tensors[name.replace("lora_A", "lora_B")] * scale
            rows.append(np.concatenate([a.flatten().numpy(), b.flatten().numpy()]))
            config.append([KINDS[match[2]], int(match[1]), rank])
    longest = max(map(len, rows))
    weights = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
    return weights.astype(dtype), np.array(config, np.int32)


def write_packed(folder: Path, weights: NDArray[Any], config: NDArray[np.int32]) -> Path:
    """Write these arrays as the front end does; returns the folder."""
    folder.mkdir()
    arrays = {"lora_weights": np.ascontiguousarray(weights), "lora_config": config}
    save_file(arrays, folder / "packed_adapter.safetensors")
    return folder
