"""Applies token edits, penalties and ``min_tokens`` to logits, on the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.sampling.token_edits import edit_logits


def needs_adjustment(spec: SampleSpec) -> bool:
    """Return True if :func:`adjust_logits` may change the logits of a sample."""
    params = spec.params
    return params.adjusts_tokens or params.penalized or spec.num_output_tokens < params.min_tokens


def adjust_logits(
    logits: Tensor, samples: Sequence[SampleSpec], eos_token_ids: Iterable[int]
) -> None:
    """Apply token edits, penalties and ``min_tokens`` in place, in this order.

    ``logits`` [R, vocab] has one row per sample. Rows that need no adjustment are not written.
    """
    edit_logits(logits, samples)
    penalized = [(row, spec) for row, spec in enumerate(samples) if spec.params.penalized]
    if penalized:
        _penalize_repetition(logits, penalized)
        _penalize_output_tokens(logits, penalized)
    early = [
        (row, spec)
        for row, spec in enumerate(samples)
        if spec.num_output_tokens < spec.params.min_tokens
    ]
    if early:
        _forbid_stops(logits, early, eos_token_ids)


def _penalize_repetition(logits: Tensor, rows: list[tuple[int, SampleSpec]]) -> None:
    rows = [(row, spec) for row, spec in rows if spec.params.repetition_penalty != 1]
    if not rows:
        return
    counts = [spec.position for _, spec in rows]
    row_ids, token_ids, penalty = _on_device(
        logits,
        np.repeat([row for row, _ in rows], counts),
        _joined(spec.context for _, spec in rows),
        np.repeat([spec.params.repetition_penalty for _, spec in rows], counts).astype(np.float32),
    )
    # A token that occurs twice is read twice before anything is written: both write one value.
    old = logits[row_ids, token_ids]
    logits[row_ids, token_ids] = torch.where(old > 0, old / penalty, old * penalty)


def _penalize_output_tokens(logits: Tensor, rows: list[tuple[int, SampleSpec]]) -> None:
    rows = [
        (row, spec)
        for row, spec in rows
        if spec.params.presence_penalty != 0 or spec.params.frequency_penalty != 0
    ]
    outputs = [spec.context[spec.num_prompt_tokens :] for _, spec in rows]
    owners = np.repeat(np.arange(len(rows)), [len(output) for output in outputs])
    if not owners.size:
        return
    vocab_size = logits.shape[1]
    keys, occurrences = np.unique(owners * vocab_size + _joined(outputs), return_counts=True)
    owners, token_ids = np.divmod(keys, vocab_size)
    frequency = np.array([spec.params.frequency_penalty for _, spec in rows])[owners]
    presence = np.array([spec.params.presence_penalty for _, spec in rows])[owners]
    row_ids, columns, amount = _on_device(
        logits,
        np.array([row for row, _ in rows])[owners],
        token_ids,
        (frequency * occurrences + presence).astype(np.float32),
    )
    logits[row_ids, columns] -= amount


def _forbid_stops(
    logits: Tensor, rows: list[tuple[int, SampleSpec]], eos_token_ids: Iterable[int]
) -> None:
    vocab_size = logits.shape[1]
    cells = [
        (row, token_id)
        for row, spec in rows
        for token_id in itertools.chain(eos_token_ids, spec.params.stop_token_ids)
        if token_id < vocab_size  # stop ids are the user's: any number may come
    ]
    if cells:
        row_ids, token_ids = _on_device(logits, *np.array(cells).T)
        logits[row_ids, token_ids] = -torch.inf


def _joined(lists: Iterable[Sequence[int]]) -> NDArray[np.int64]:
    return np.fromiter(itertools.chain.from_iterable(lists), dtype=np.int64)


def _on_device(logits: Tensor, *arrays: NDArray[Any]) -> tuple[Tensor, ...]:
    return tuple(
        torch.from_numpy(np.ascontiguousarray(array)).to(logits.device) for array in arrays
    )
