"""The texts of sequences on the device, from which it draws drafts while steps are in flight.

A text is the prompt and the output of a sequence. Before it lies the prediction of its request, or
a reference, such as a part of an earlier answer that the host has found.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from paged_kernels.text_drafts import FIELDS, Texts, draw_drafts, keep_tokens
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.platforms.gpu.sampler import SampleRows
from paged_backend.platforms.gpu.transfer import Arrival, Transfer
from paged_backend.platforms.input_batch import Ints, Longs
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.options.speculation import MAX_DRAFTS

_WINDOW = 2**16  # tokens of a text that are kept, to look for matches in them
_SLOT, _START = FIELDS.index("slot"), FIELDS.index("start")
MAX_TOKENS = MAX_DRAFTS + 1
"""Tokens of a slice with drafts."""


class DeviceTexts:
    """Keeps the newest text of each row's sequence, and draws drafts from it.

    Args:
        limits: the limits of a step, and the lengths of matches. Without these, the texts have only
            the tokens that a draft model may lack.
        max_model_len: the longest sequence.
        last_tokens: [max_num_seqs + 1] int32, the token of each row that was sampled last; changed.
        num_wrong: [max_num_seqs + 1] int32, the wrong drafts of each row's last step; changed.
        transfer: the way to the device.
    """

    def __init__(
        self,
        limits: StepLimits,
        max_model_len: int,
        last_tokens: Tensor,
        num_wrong: Tensor,
        transfer: Transfer,
    ) -> None:
        self._transfer = transfer
        self._match_lengths = limits.match_lengths
        device, num_rows = transfer.device, len(last_tokens)
        kept = 2 * MAX_TOKENS if limits.match_lengths is None else _WINDOW
        self._width = 1 << (min(max_model_len, kept) - 1).bit_length()
        tokens = torch.zeros(num_rows, self._width, dtype=torch.int32, device=device)
        begins, num_predicted = torch.zeros_like(last_tokens), torch.zeros_like(last_tokens)
        self._texts = Texts(tokens, last_tokens, num_wrong, begins, num_predicted)
        self._num_before: Ints = np.zeros(num_rows, np.int32)  # tokens before each text
        self._best = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)

    def admit(self, rows: Sequence[int], samples: Sequence[SampleSpec]) -> None:
        """Send the texts of sequences that are sampled for the first time in these rows."""
        arrays: dict[int, Ints] = {}  # predictions, which completions of a request share
        for row, spec in zip(rows, samples, strict=True):
            start = max(spec.position - self._width, 0)
            newest = np.array(spec.token_ids[start : spec.position], np.int32)
            if len(newest) == self._width:  # the oldest token may be at any place
                newest = np.roll(newest, spec.position)
            self._texts.tokens[row, : len(newest)] = self._transfer.send(newest)
            token_ids = spec.predicted_token_ids
            if id(token_ids) not in arrays:
                arrays[id(token_ids)] = np.array(token_ids[-self._width :], np.int32)
            predicted, room = arrays[id(token_ids)], self._width - len(newest)
            self._put_before(row, predicted[max(len(predicted) - room, 0) :])

    def write(self, row: int, start: int, token_ids: Sequence[int]) -> None:
        """Send tokens of a text that the device has not sampled, from the position `start` on."""
        newest = token_ids[-self._width :]
        first = start + len(token_ids) - len(newest)
        places = (first + np.arange(len(newest))) & (self._width - 1)
        values = self._transfer.send(np.array(newest, np.int32))
        self._texts.tokens[row].index_copy_(0, self._transfer.send(places), values)

    def refer(self, row: int, token_ids: Sequence[int], end: int) -> None:
        """Send a reference in place of the one, or of the prediction, that a row has.

        Its first tokens are kept, as many as there is room for.

        Args:
            row: the row of the sequence.
            token_ids: the reference.
            end: number of tokens of the text and of the drafts in this step at most. Later tokens
                of the text take the places of the first ones of the reference.
        """
        room = max(self._width - end, 0)
        self._put_before(row, np.array(token_ids[:room], np.int32))

    def _put_before(self, row: int, kept: Ints) -> None:
        """Send tokens that are before a text."""
        if len(kept):
            self._texts.tokens[row, self._width - len(kept) :] = self._transfer.send(kept)
        if len(kept) != self._num_before[row]:
            self._num_before[row] = len(kept)
            self._texts.begins[row] = -len(kept)

    @property
    def draws(self) -> bool:
        """True if drafts are drawn from texts, and False if a draft model draws them."""
        return self._match_lengths is not None

    def draw(self, slices: Ints, sent: Tensor, input_ids: Tensor) -> None:
        """Draw the drafts of slices from texts.

        Args:
            slices: [num_slices, 10] int32, see `move_back`.
            sent: the same on the device.
            input_ids: [num_tokens] int64, tokens of the step; changed.
        """
        assert self._match_lengths is not None
        length = int((slices[:, _START] + 1 + self._num_before[slices[:, _SLOT]]).max())
        draw_drafts(
            *(sent, MAX_TOKENS, length, self._texts, self._best, input_ids),
            *self._match_lengths,
        )

    def receive_num_predicted(self, rows: Longs) -> Arrival:
        """Start to copy the numbers of drafts of the prediction that were drawn last in rows."""
        chosen = self._texts.num_predicted.index_select(0, self._transfer.send(rows))
        return self._transfer.receive(chosen)

    def read(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return tokens [n, m] int32 of the texts.

        Args:
            rows: [n] int64, the rows.
            positions: [n, m] int64, the positions of the tokens in their texts.
        """
        return self._texts.tokens[rows[:, None], positions & (self._width - 1)]

    def keep(self, rows: SampleRows, tokens: Tensor, inputs: Tensor) -> None:
        """Add the tokens of a step to the texts, without those after wrong drafts.

        Args:
            rows: the row of each sample, and its position.
            tokens: [n] int32, the sampled tokens.
            inputs: [n] int64, the tokens before them.
        """
        keep_tokens(self._texts, rows.row_or_none, rows.positions, tokens, inputs)
