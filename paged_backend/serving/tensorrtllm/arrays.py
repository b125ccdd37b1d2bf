"""Splits batches into rows, and joins the answers to rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paged_backend.serving.contract import Array
from paged_backend.serving.fields import Tensors
from paged_backend.values.errors import InvalidRequest

Outputs = dict[str, Array]


def is_batched(args: dict[str, str]) -> bool:
    """Return whether the tensors of a model have a batch dimension."""
    return bool(json.loads(args["model_config"])["max_batch_size"] > 0)


def split_rows(tensors: Tensors, *, is_batched: bool) -> list[Tensors]:
    """Return the tensors of each row, without the batch dimension.

    Raises:
        InvalidRequest: there is no row, or the tensors have different numbers of them.
    """
    if not is_batched or not tensors:
        return [tensors]
    first, num_rows = next((name, len(tensor)) for name, tensor in tensors.items())
    if num_rows == 0:
        raise InvalidRequest(first, "must have at least one row")
    for name, tensor in tensors.items():
        if len(tensor) != num_rows:
            raise InvalidRequest(name, f"has {len(tensor)} rows, {first} has {num_rows}")
    return [{name: tensor[index] for name, tensor in tensors.items()} for index in range(num_rows)]


def merge(answers: list[Outputs], padding: Mapping[str, int] | None = None) -> Outputs:
    """Join answers along the first dimension, the outputs that all of them have.

    The other dimensions are padded to the longest, with 0 or the output's value in ``padding``.
    """
    if not answers:
        return {}
    # In the first one's order: some clients take the first output.
    names = [name for name in answers[0] if all(name in answer for answer in answers)]
    pads = padding or {}
    return {name: _join([answer[name] for answer in answers], pads.get(name, 0)) for name in names}


def _join(arrays: list[Array], pad: int) -> Array:
    longest = np.max([array.shape[1:] for array in arrays], axis=0)
    return np.concatenate([_extended(array, longest, pad) for array in arrays])


def _extended(array: Array, longest: Array, pad: int) -> Array:
    missing = [(0, 0), *((0, size) for size in longest - array.shape[1:])]
    return np.pad(array, missing, constant_values=pad) if array.ndim > 1 else array


def padded(rows: Sequence[Array], pad: int) -> Array:
    """Return arrays as one array [1, number of arrays, length of the longest]."""
    longest = max(map(len, rows))
    lengths = [longest - len(row) for row in rows]
    return np.array(
        [[np.pad(row, (0, n), constant_values=pad) for row, n in zip(rows, lengths, strict=True)]]
    )


def element(value: Any, data_type: Any = np.int32) -> Array:
    """Return one value as an array [1, 1]."""
    return np.array([[value]], data_type)
