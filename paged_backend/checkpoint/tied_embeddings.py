"""Finds the stored tensors of an embedding and an output layer that config.json calls tied."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

import torch

from paged_backend.checkpoint.safetensors_files import open_tensors, read_headers
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.checkpoint.tensor_names import usual_name
from paged_backend.values.log import LOG

EMBEDDING, OUTPUT_LAYER = "model.embed_tokens.weight", "lm_head.weight"
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
    if EMBEDDING not in headers or OUTPUT_LAYER not in headers:
        return False
    (first_name, first), (second_name, second) = headers[EMBEDDING], headers[OUTPUT_LAYER]
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


def only_output_layer(names: Container[str]) -> bool:
    """Return whether tied weights are stored once, by the name of the output layer.

    transformers finds them by either name.

    Args:
        names: the usual names of the tensors in the files.
    """
    return OUTPUT_LAYER in names and EMBEDDING not in names


def as_output_layer(parameters: Mapping[str, Parameter]) -> Mapping[str, Parameter]:
    """Return the memory of a model's tensors, with the embedding's also by its second name."""
    return {OUTPUT_LAYER if name == EMBEDDING else name: parameters[name] for name in parameters}
