"""Samples on the device, with state that stays there for each running sequence.

Each sequence has a row with its parameters, which are sent when it is first sampled, the counts of
its tokens, and the token that was sampled last, which is the input of the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from paged_kernels.penalties import Penalties, apply_penalties, count_tokens
from paged_kernels.sampling import SamplingState, sample
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.core.sequence import PLACEHOLDER
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.sampling.token_edits import edit_logits
from paged_backend.sampling_params import INT32_MAX, MAX_STOP_TOKEN_IDS


class DeviceSampler:
    """Samples on the device. Each running sequence has a row of state; the last row is padding."""

    def __init__(
        self, num_rows: int, vocab_size: int, eos_token_ids: frozenset[int], transfer: Transfer
    ) -> None:
        device = transfer.device

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_rows, dtype=dtype, device=device)

        self._transfer = transfer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._num_stops = MAX_STOP_TOKEN_IDS + len(eos_token_ids)
        self._state = SamplingState(
            temperature=column(torch.float32),
            top_k=column(torch.int32),
            top_p=column(torch.float32),
            min_p=column(torch.float32),
            seed=column(torch.int64),
        )
        self._penalties = Penalties(
            repetition=column(torch.float32),
            presence=column(torch.float32),
            frequency=column(torch.float32),
            min_position=column(torch.int32),
            stop_ids=torch.full((num_rows, self._num_stops), -1, dtype=torch.int32, device=device),
        )
        self._counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self.last_tokens = column(torch.int32)

    def admit(self, rows: Sequence[int], samples: Sequence[SampleSpec]) -> None:
        """Send the parameters of sequences that are sampled for the first time in these rows."""
        if not rows:
            return
        index = self._transfer.send(np.array(rows, np.int64))
        params = [spec.params for spec in samples]
        columns = (
            (self._state.temperature, [p.temperature for p in params], np.float32),
            (self._state.top_k, [max(0, p.top_k) for p in params], np.int32),
            (self._state.top_p, [p.top_p for p in params], np.float32),
            (self._state.min_p, [p.min_p for p in params], np.float32),
            (self._state.seed, [_signed(spec.seed) for spec in samples], np.int64),
            (self._penalties.repetition, [p.repetition_penalty for p in params], np.float32),
            (self._penalties.presence, [p.presence_penalty for p in params], np.float32),
            (self._penalties.frequency, [p.frequency_penalty for p in params], np.float32),
            (
                self._penalties.min_position,
                [_min_position(spec) for spec in samples],
                np.int32,
            ),
            (self._penalties.stop_ids, [self._stop_ids(spec) for spec in samples], np.int32),
        )
        for target, values, dtype in columns:
            target.index_copy_(0, index, self._transfer.send(np.array(values, dtype)))
        for row, spec in zip(rows, samples, strict=True):
            if spec.params.penalized:
                self._counts[row] = self._transfer.send(self._count(spec))

    def sample(
        self,
        logits: Tensor,
        samples: Sequence[SampleSpec],
        rows: Tensor,
        row_or_none: Tensor,
        positions: Tensor,
    ) -> Tensor:
        """Sample a token for each row of `logits`; returns [n] int32.

        Args:
            logits: [n, vocab] float32; overwritten.
            samples: the specs of the first rows of `logits`, if any of them changes or forbids
                the logits of single tokens; else none. The other rows are padding.
            rows: [n] int64 the sampler's row of each sequence; its last row for padding.
            row_or_none: [n] int32 like `rows`, but -1 for padding, which gets an arbitrary token.
            positions: [n] int32 the positions of the tokens to sample.

        Raises:
            ValueError: the vocabulary is too large for the kernels.
        """
        if samples:
            edit_logits(logits, samples, self._transfer.send, self._tokens_before(samples, rows))
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        apply_penalties(logits, row_or_none, positions, self._counts, self._penalties)
        sample(logits, row_or_none, positions, self._state, tokens)
        count_tokens(self._counts, row_or_none, tokens)
        self.last_tokens.index_copy_(0, rows, tokens)
        return tokens

    def _tokens_before(self, samples: Sequence[SampleSpec], rows: Tensor) -> Tensor:
        """Return the last token of each sequence, [n], which possibly only the device knows."""
        known = [spec.token_ids[spec.position - 1] for spec in samples]
        known += [PLACEHOLDER] * (len(rows) - len(known))
        on_device = self._transfer.send(np.array(known, np.int32))
        return torch.where(
            on_device == PLACEHOLDER, self.last_tokens.index_select(0, rows), on_device
        )

    def _stop_ids(self, spec: SampleSpec) -> list[int]:
        ids = [*self._eos_token_ids, *spec.params.stop_token_ids]
        return ids + [-1] * (self._num_stops - len(ids))

    def _count(self, spec: SampleSpec) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Count each token: twice its occurrences in the output, plus 1 if it is in the prompt."""
        context = np.array(spec.context, np.int64)
        prompt, output = np.split(context, [spec.num_prompt_tokens])
        counts = 2 * np.bincount(output, minlength=self._vocab_size).astype(np.int32)
        counts[prompt] |= 1
        return counts


def _min_position(spec: SampleSpec) -> int:
    """Return the first position at which a stop token is allowed, at most INT32_MAX."""
    return min(spec.num_prompt_tokens + spec.params.min_tokens, INT32_MAX)


def _signed(seed: int) -> int:
    """Return the 64 bits of a seed as a signed integer, as torch stores it."""
    return seed - 2**64 if seed >= 2**63 else seed
