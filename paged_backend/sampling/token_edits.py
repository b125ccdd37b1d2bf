"""Applies logit_bias, allowed_token_ids and bad_words to rows of logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec

_WHATEVER_CAME_LAST = -1
Send = Callable[[NDArray[Any]], Tensor]


class _Edit(NamedTuple):
    """An amount to add to one logit if the row's last token is a certain token."""

    row: int
    token: int
    amount: float
    last_token: int


def edit_logits(
    logits: Tensor,
    samples: Sequence[SampleSpec],
    send: Send = torch.from_numpy,
    last_tokens: Tensor | None = None,
) -> None:
    """Apply ``allowed_token_ids``, ``logit_bias`` and ``bad_words_token_ids`` in place.

    Args:
        logits: [R, vocab] float32; row ``i`` belongs to ``samples[i]``, further rows are padding.
        samples: the specs of the first rows.
        send: copies an array to the logits' device.
        last_tokens: [R] int32 on the logits' device: the last token of each row's sequence. None
            if the host knows these tokens; they are then read from ``samples``.
    """
    rows = [(row, spec) for row, spec in enumerate(samples) if spec.params.adjusts_tokens]
    if not rows:
        return
    _keep_allowed(logits, rows, send)
    edits = [edit for row, spec in rows for edit in _edits(row, spec)]
    if not edits:
        return
    if last_tokens is None:
        last_tokens = torch.tensor([spec.token_ids[spec.position - 1] for spec in samples])
    row_ids, token_ids, needed = (
        send(np.array([edit[field] for edit in edits], np.int64)) for field in (0, 1, 3)
    )
    amounts = send(np.array([edit.amount for edit in edits], np.float32))
    applies = (needed == _WHATEVER_CAME_LAST) | (needed == last_tokens[row_ids])
    # A token may be named twice, so amounts are added.
    logits.index_put_((row_ids, token_ids), torch.where(applies, amounts, 0.0), accumulate=True)


def _keep_allowed(logits: Tensor, rows: list[tuple[int, SampleSpec]], send: Send) -> None:
    rows = [(row, spec) for row, spec in rows if spec.params.allowed_token_ids]
    if not rows:
        return
    allowed = [spec.params.allowed_token_ids for _, spec in rows]
    owners = np.repeat([row for row, _ in rows], [len(ids) for ids in allowed])
    row_ids = send(owners.astype(np.int64))
    token_ids = send(np.concatenate(allowed).astype(np.int64))
    kept = logits[row_ids, token_ids]
    logits.index_fill_(0, send(np.unique(owners).astype(np.int64)), -torch.inf)
    logits[row_ids, token_ids] = kept


def _edits(row: int, spec: SampleSpec) -> Iterator[_Edit]:
    for token, bias in spec.params.logit_bias:
        yield _Edit(row, token, bias, _WHATEVER_CAME_LAST)
    for *before, token in spec.params.bad_words_token_ids:
        if not before:
            yield _Edit(row, token, -torch.inf, _WHATEVER_CAME_LAST)
        elif _precede(before[:-1], spec):
            yield _Edit(row, token, -torch.inf, before[-1])


def _precede(tokens: list[int], spec: SampleSpec) -> bool:
    """Return whether these tokens precede the row's last token, within its output."""
    end = spec.position - 1
    start = end - len(tokens)
    return start >= spec.num_prompt_tokens and spec.token_ids[start:end] == tokens
