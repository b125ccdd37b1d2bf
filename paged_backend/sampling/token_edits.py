"""Applies logit_bias, allowed_token_ids and bad_words to rows of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.sampling.bad_words import BadWords
from paged_backend.sampling.recent import Recent
from paged_backend.values.sampling_params import SamplingParams

Send = Callable[[NDArray[Any]], Tensor]


class _Edits(NamedTuple):
    """The changes of one request's logits, made once for all its sequences and steps."""

    forbidden: Tensor | None  # [vocab] bool, true for the tokens that are not allowed
    # Distinct tokens and the amounts to add to their logits; None if there are none.
    amounts: tuple[Tensor, Tensor] | None
    bad_words: BadWords | None  # words of two or more tokens


class TokenEdits:
    """Applies ``allowed_token_ids``, ``logit_bias`` and ``bad_words_token_ids`` to logits.

    Args:
        send: copies an array to the logits' device.
    """

    def __init__(self, send: Send = torch.from_numpy) -> None:
        self._send = send
        self._edits: Recent[SamplingParams, _Edits] = Recent()

    def apply(
        self, logits: Tensor, samples: Sequence[SampleSpec], last_tokens: Tensor | None = None
    ) -> None:
        """Change the logits in place.

        Args:
            logits: [R, vocab] float32; row ``i`` belongs to ``samples[i]``, further rows are
                padding. ``vocab`` is the same in all calls.
            samples: the specs of the first rows.
            last_tokens: [R] on the logits' device: the last token of each row's sequence. None if
                the host knows these tokens; they are then read from ``samples``.
        """
        self._edits.begin_step()
        rows = [(row, spec) for row, spec in enumerate(samples) if spec.params.adjusts_tokens]
        endings: list[tuple[int, NDArray[np.int64]]] = []
        for row, spec in rows:
            edits = self._edits_of(spec.params, logits.shape[1])
            if edits.forbidden is not None:
                logits[row].masked_fill_(edits.forbidden, -torch.inf)
            if edits.amounts is not None:
                logits[row].index_add_(0, *edits.amounts)
            if edits.bad_words is not None:
                found = edits.bad_words.endings(
                    spec.token_ids, spec.num_prompt_tokens, spec.position - 1
                )
                endings.append((row, found))
        if any(len(pairs) for _, pairs in endings):
            if last_tokens is None:
                last_tokens = torch.tensor([spec.token_ids[spec.position - 1] for spec in samples])
            self._forbid(logits, endings, last_tokens)

    def _edits_of(self, params: SamplingParams, vocab_size: int) -> _Edits:
        return self._edits.of(params, lambda: self._make(params, vocab_size))

    def _make(self, params: SamplingParams, vocab_size: int) -> _Edits:
        forbidden = None
        if params.allowed_token_ids:
            mask = np.ones(vocab_size, np.bool_)
            mask[np.array(params.allowed_token_ids)] = False
            forbidden = self._send(mask)
        added = dict(params.logit_bias)
        words = params.bad_words_token_ids
        added |= {word[0]: -np.inf for word in words if len(word) == 1}
        amounts = None
        if added:
            tokens = np.fromiter(added.keys(), np.int64)
            amounts = self._send(tokens), self._send(np.fromiter(added.values(), np.float32))
        longer = [word for word in words if len(word) > 1]
        return _Edits(forbidden, amounts, BadWords(longer) if longer else None)

    def _forbid(
        self, logits: Tensor, endings: list[tuple[int, NDArray[np.int64]]], last_tokens: Tensor
    ) -> None:
        """Forbid the second token of each pair in rows that end with the first."""
        pairs = np.concatenate([pairs for _, pairs in endings])
        owners = np.repeat([row for row, _ in endings], [len(pairs) for _, pairs in endings])
        row_ids, needed, token_ids = (
            self._send(np.ascontiguousarray(array)) for array in (owners, pairs[:, 0], pairs[:, 1])
        )
        amounts = torch.where(needed == last_tokens[row_ids], -torch.inf, 0.0)
        # Pairs of one row may have the same second token, so amounts are added.
        logits.index_put_((row_ids, token_ids), amounts, accumulate=True)
