"""Samples on the device, with state that stays there for each running sequence.

Each sequence has a row with its parameters, which are sent when it is first sampled, the counts of
its tokens, and the token that was sampled last, which is the input of the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from paged_kernels.penalties import Penalties, apply_penalties, count_tokens
from paged_kernels.sampling import SamplingState, sample
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.core.sequence import PLACEHOLDER
from paged_backend.platforms.gpu.given_answers import GivenAnswers
from paged_backend.platforms.gpu.packed_rows import PackedRows
from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.sampling.token_edits import TokenEdits
from paged_backend.values.sampling_params import INT32_MAX, MAX_STOP_TOKEN_IDS


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The sequence and the position of each row of logits that is sampled.

    A sequence with drafts has several rows, one after the other.
    """

    rows: Tensor  # [n] int64 the sampler's row of each sequence; its last row for padding
    row_or_none: Tensor  # [n] int32 like `rows`, but -1 for padding, which gets an arbitrary token
    positions: Tensor  # [n] int32 the positions of the tokens to sample


class DeviceSampler:
    """Samples on the device. Each running sequence has a row of state; the last row is padding.

    Args:
        last_tokens: [num_rows] int32, receives the token of each row that was sampled last. Those
            of the padding row and of rows with drafts are arbitrary, and never read.
        vocab_size: number of token ids.
        eos_token_ids: end tokens of the model.
        transfer: the way to the device.

    Attributes:
        answers: what takes the place of the tokens that `sample` samples; None outside benchmarks.
    """

    def __init__(
        self,
        last_tokens: Tensor,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        transfer: Transfer,
    ) -> None:
        num_rows = len(last_tokens)
        self.answers: GivenAnswers | None = None
        self._transfer = transfer
        self._edits = TokenEdits(transfer.send)
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._num_stops = MAX_STOP_TOKEN_IDS + len(eos_token_ids)
        self._record = np.dtype(
            [
                ("temperature", "<f4"),
                ("top_k", "<i4"),
                ("top_p", "<f4"),
                ("min_p", "<f4"),
                ("seed", "<i8"),
                ("repetition", "<f4"),
                ("presence", "<f4"),
                ("frequency", "<f4"),
                ("min_position", "<i4"),
                ("stop_ids", "<i4", (self._num_stops,)),
            ]
        )
        self._rows = PackedRows(self._record, num_rows, transfer)
        array = self._rows.array
        self._state = SamplingState(
            temperature=array("temperature"),
            top_k=array("top_k"),
            top_p=array("top_p"),
            min_p=array("min_p"),
            seed=array("seed"),
        )
        self._penalties = Penalties(
            repetition=array("repetition"),
            presence=array("presence"),
            frequency=array("frequency"),
            min_position=array("min_position"),
            stop_ids=array("stop_ids").fill_(-1),
        )
        device = transfer.device
        # Counts of a sequence with penalties are set when it is admitted. Other rows keep what an
        # earlier sequence left, which is never read. The padding row stays zero: padded samples
        # have -1 in `SampleRows.row_or_none`, so no kernel reads or changes counts for them.
        self._counts = torch.zeros(num_rows, vocab_size, dtype=torch.int32, device=device)
        self.last_tokens = last_tokens

    def admit(self, rows: Sequence[int], samples: Sequence[SampleSpec]) -> None:
        """Send the parameters of sequences that are sampled for the first time in these rows.

        Tokens are not counted if some are not known; `follow` copies the counts then.
        """
        if not rows:
            return
        self._rows.replace(rows, np.array([self._packed(spec) for spec in samples], self._record))
        for row, spec in zip(rows, samples, strict=True):
            if spec.params.penalized and _is_known(spec):
                self._counts[row] = self._transfer.send(self._count(spec))

    def follow(self, main: DeviceSampler, of_main: Tensor, rows: Tensor) -> None:
        """Copy the counts of tokens.

        Args:
            main: the sampler of the model.
            of_main: [n] int64, the rows of sequences there.
            rows: [n] int64, their rows here.
        """
        self._counts.index_copy_(0, rows, main._counts.index_select(0, of_main))

    def sample(self, logits: Tensor, to: SampleRows, tokens: Tensor) -> None:
        """Sample a token for each row of logits that no request changes.

        Args:
            logits: [n, vocab] of any dtype of models; only read.
            to: the sequence and the position of each row.
            tokens: [n] int32, receives the tokens.

        Raises:
            ArgumentError: the vocabulary is too large for the kernels.
        """
        sample(logits, to.row_or_none, to.positions, self._state, tokens)
        if self.answers is not None:
            tokens.copy_(self.answers.tokens(self._state.seed[to.rows], to.positions))
        self.last_tokens.index_copy_(0, to.rows, tokens)

    def change_and_sample(
        self,
        logits: Tensor,
        samples: Sequence[SampleSpec],
        last_inputs: Tensor,
        to: SampleRows,
        tokens: Tensor,
    ) -> None:
        """Apply token edits and penalties to the logits, then sample from them.

        It may follow a call of `sample` for the same step; it replaces those tokens.

        Args:
            logits: [n, vocab] float32; overwritten.
            samples: the specs of the first rows of `logits`, if any of them changes or forbids
                the logits of single tokens; else none. The other rows are padding.
            last_inputs: [n] int64 the token before the one to sample.
            to: the sequence and the position of each row.
            tokens: [n] int32, receives the tokens.
        """
        if samples:
            self._edits.apply(logits, samples, last_inputs)
        rows, counts = to.row_or_none, self._counts
        apply_penalties(logits, rows, to.positions, last_inputs, counts, self._penalties)
        self.sample(logits, to, tokens)
        count_tokens(counts, rows, tokens, last_inputs)

    def _packed(self, spec: SampleSpec) -> tuple[object, ...]:
        """Return the record of a sequence."""
        params = spec.params
        stop_ids = [*self._eos_token_ids, *params.stop_token_ids]
        return (
            params.temperature,
            max(0, params.top_k),
            params.top_p,
            params.min_p,
            _signed(spec.seed),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            _min_position(spec),
            stop_ids + [-1] * (self._num_stops - len(stop_ids)),
        )

    def _count(self, spec: SampleSpec) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        """Count each token: twice its occurrences in the output, plus 1 if it is in the prompt."""
        context = np.array(spec.context, np.int64)
        prompt, output = np.split(context, [spec.num_prompt_tokens])
        counts = 2 * np.bincount(output, minlength=self._vocab_size).astype(np.int32)
        counts[prompt] |= 1
        return counts


def _is_known(spec: SampleSpec) -> bool:
    """Return True if no token before a sample is a placeholder; the last one usually tells."""
    return spec.token_ids[spec.position - 1] != PLACEHOLDER and PLACEHOLDER not in spec.context


def _min_position(spec: SampleSpec) -> int:
    """Return the first position at which a stop token is allowed, at most INT32_MAX."""
    return min(spec.num_prompt_tokens + spec.params.min_tokens, INT32_MAX)


def _signed(seed: int) -> int:
    """Return the 64 bits of a seed as a signed integer, as torch stores it."""
    return seed - 2**64 if seed >= 2**63 else seed
