"""The texts of sequences on the device, from which it draws drafts while steps are in flight."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from paged_kernels.text_drafts import FIELDS, Texts, draw_drafts, keep_tokens, move_back
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.platforms.gpu.batch import BlockTables
from paged_backend.platforms.gpu.sampler import SampleRows
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.platforms.input_batch import Ints
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.options.speculation import MAX_DRAFTS

_WINDOW = 2**16  # tokens of a text that are kept
_MAX_TOKENS = MAX_DRAFTS + 1  # tokens of a slice with drafts
_MOVES, _DRAWS = FIELDS.index("moves"), FIELDS.index("draws")


class DeviceTexts:
    """Keeps the newest text of each row's sequence, and prepares slices that depend on it.

    Args:
        limits: the limits of a step, and the lengths of matches.
        max_model_len: the longest sequence.
        last_tokens: [max_num_seqs + 1] int32, the token of each row that was sampled last; changed.
        transfer: the way to the device.
    """

    def __init__(
        self, limits: StepLimits, max_model_len: int, last_tokens: Tensor, transfer: Transfer
    ) -> None:
        self._transfer = transfer
        self._min_match, self._max_match = limits.match_lengths
        device, num_rows = transfer.device, len(last_tokens)
        self._width = 1 << (min(max_model_len, _WINDOW) - 1).bit_length()
        tokens = torch.zeros(num_rows, self._width, dtype=torch.int32, device=device)
        self._texts = Texts(tokens, last_tokens, torch.zeros_like(last_tokens))
        self._best = torch.zeros(limits.max_num_seqs, dtype=torch.int64, device=device)

    def admit(self, rows: Sequence[int], samples: Sequence[SampleSpec]) -> None:
        """Send the texts of sequences that are sampled for the first time in these rows."""
        for row, spec in zip(rows, samples, strict=True):
            start = max(spec.position - self._width, 0)
            newest = np.array(spec.token_ids[start : spec.position], np.int32)
            if len(newest) == self._width:  # the oldest token may be at any place
                newest = np.roll(newest, spec.position)
            self._texts.tokens[row, : len(newest)] = self._transfer.send(newest)

    def prepare(
        self,
        slices: Ints,
        input_ids: Tensor,
        positions: Tensor,
        seq_lens: Tensor,
        sample_positions: Tensor,
        slot_mappings: Sequence[Tensor],
        tables: BlockTables,
        block_size: int,
    ) -> None:
        """Move slices back to the ends of their texts, and draw drafts.

        Args:
            slices: [num_slices, 8] int32, the fields of `FIELDS`.
            input_ids: [num_tokens] int64, tokens of the step; changed.
            positions: [num_tokens] int32, positions of the tokens; changed.
            seq_lens: [num_seqs] int32, lengths of the sequences after the step; changed.
            sample_positions: [num_samples] int32, positions of the tokens to sample; changed.
            slot_mappings: [num_tokens] int64 for each group, places in the cache; changed.
            tables: the block tables of all rows.
            block_size: tokens in a block.
        """
        sent = self._transfer.send(slices)
        if slices[:, _MOVES].any():
            for group, slot_mapping in enumerate(slot_mappings):
                move_back(
                    *(sent, _MAX_TOKENS, self._texts, positions, seq_lens, sample_positions),
                    *(slot_mapping, tables.tensor, group, len(slot_mappings), block_size),
                )
        if slices[:, _DRAWS].any():
            length = int(slices[:, FIELDS.index("start")].max()) + 1
            draw_drafts(
                *(sent, _MAX_TOKENS, length, self._texts, self._best, input_ids),
                *(self._min_match, self._max_match),
            )

    def keep(self, rows: SampleRows, tokens: Tensor, inputs: Tensor) -> None:
        """Add the tokens of a step to the texts, without those after wrong drafts.

        Args:
            rows: the row of each sample, and its position.
            tokens: [n] int32, the sampled tokens.
            inputs: [n] int64, the tokens before them.
        """
        keep_tokens(self._texts, rows.row_or_none, rows.positions, tokens, inputs)
