"""Checkpoints that make embeddings, and the embeddings that transformers' models make of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_MODES = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}


def write_modules(
    folder: Path, pooling: dict[str, Any], *, normalize: bool = True, more: tuple[str, ...] = ()
) -> None:
    """Write the files of sentence-transformers beside a checkpoint.

    Args:
        folder: the checkpoint.
        pooling: the config.json of the pooling.
        normalize: embeddings are normalized.
        more: names of modules between pooling and normalization.
    """
    names = ["Transformer", "Pooling", *more, *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{name}" if index else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for index, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def older_pooling(kind: str, hidden_size: int) -> dict[str, Any]:
    """The pooling's config.json as versions of sentence-transformers before 5.2 wrote it."""
    modes = {f"pooling_mode_{mode}": name == kind for name, mode in _MODES.items()}
    return {"word_embedding_dimension": hidden_size, "pooling_mode_max_tokens": False, **modes}


def layers_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model without its output layer; Llama 4's `base_model` is the whole model."""
    base: PreTrainedModel = model.base_model
    return model.model if base is model and hasattr(model, "lm_head") else base


@torch.inference_mode()
def expected(
    model: PreTrainedModel,
    prompt: list[int],
    kind: str,
    *,
    normalize: bool = True,
    dimensions: int | None = None,
) -> Tensor:
    """The embedding by transformers' own float32 model [dimensions]."""
    hidden = layers_of(model)(torch.tensor([prompt])).last_hidden_state[0]
    pooled = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[kind][:dimensions]
    return torch.nn.functional.normalize(pooled, dim=0) if normalize else pooled
