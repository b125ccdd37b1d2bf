"""Finds out whether an output layer that config.json calls tied is stored with other numbers."""

from __future__ import annotations

from pathlib import Path

import torch

from paged_backend.checkpoint.safetensors_files import open_tensors, read_headers
from paged_backend.checkpoint.tensor_names import usual_name
from paged_backend.log import LOG

_NAMES = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 4096  # compared at a time, so that few numbers are in memory


def stored_untied(folder: Path) -> bool:
    """Return whether the files hold an output layer that differs from the embedding.

    A fine-tune can train the two apart and leave ``tie_word_embeddings`` true. As in transformers,
    both tensors count then, and a warning is logged.

    Args:
        folder: the checkpoint, in safetensors files.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    headers = {usual_name(name): (name, header) for name, header in read_headers(folder).items()}
    if any(name not in headers for name in _NAMES):
        return False
    (first_name, first), (second_name, second) = (headers[name] for name in _NAMES)
    if first.shape == second.shape:
        with open_tensors(first.file) as one, open_tensors(second.file) as other:
            tensors = one.get_slice(first_name), other.get_slice(second_name)
            starts = range(0, first.shape[0] if first.shape else 0, _ROWS)
            parts = ([tensor[at : at + _ROWS].float() for tensor in tensors] for at in starts)
            if all(torch.equal(*pair) for pair in parts):
                return False
    LOG.warning(
        "%s: config.json ties the output layer to the embedding, but the files hold another "
        "lm_head.weight, which is used: set tie_word_embeddings to false",
        folder,
    )
    return True
