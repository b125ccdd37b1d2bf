"""Makes the batches of a warm-up: each kind of step, on the null block, which no request has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paged_backend.core.scheduled_batch import (
    PoolSpec,
    PromptLogprobsSpec,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
)
from paged_backend.core.scheduler_output import TokenMasks
from paged_backend.core.sequence import PLACEHOLDER
from paged_backend.platforms.gpu.shared_prefix import MIN_SEQS
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class IdleBatches:
    """Batches of sequences with negative ids, which are to be released after their step.

    Attributes:
        limits: the limits of a step.
        max_model_len: the longest sequence.
        block_size: tokens in a block.
        num_groups: the KV cache groups.
        vocab_size: the number of tokens.
        makes_embeddings: whether the steps pool hidden states, and sample nothing.
    """

    limits: StepLimits
    max_model_len: int
    block_size: int
    num_groups: int
    vocab_size: int
    makes_embeddings: bool

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Yield the numbers of tokens and sequences of steps that need all kernels of layers.

        Products and experts have kernels for few rows, for more, and for many. The rows are tokens,
        and samples or tokens with prompt logprobs in the output layer. All powers of two are among
        them, because dense products of 32 rows may need a kernel that neither 16 nor 64 rows need.
        From 512 to 2,048 rows there are more, because cuBLAS has several kernels for them, and to
        load one takes longer than such a step.
        """
        most_tokens, most_seqs = self.limits.max_num_batched_tokens, self.limits.max_num_seqs
        for num_seqs in (*_powers_of_two(most_seqs), most_seqs):
            yield num_seqs, num_seqs
        for num_tokens in (2, most_seqs + 1):  # one prompt; the keys of a short one are split
            yield min(most_tokens, num_tokens), 1
        for power in _powers_of_two(most_tokens):
            quarters = range(power, 2 * power, power // 4) if power in (512, 1024) else [power]
            for num_tokens in quarters:
                if most_seqs < num_tokens <= most_tokens:
                    yield num_tokens, min(-(-num_tokens // self.max_model_len), most_seqs)

    def spread(self, num_tokens: int, num_seqs: int, adapter: str = "") -> ScheduledBatch:
        """Return tokens that are spread over sequences, each with all kinds of filters.

        Args:
            num_tokens: the tokens, fewer if the sequences cannot hold them.
            num_seqs: the sequences.
            adapter: the digest of the LoRA adapter of all sequences; empty without one.
        """
        params = SamplingParams(temperature=1.0, top_k=8, top_p=0.9, logprobs=1)
        lengths = np.diff(np.linspace(0, num_tokens, num_seqs + 1).astype(int)).tolist()
        scheduled = []
        for index, length in enumerate(lengths):
            length = min(length, self.max_model_len)
            seq_id, tokens, blocks = -1 - index, [0] * length, self._blocks(length)
            if self.makes_embeddings:
                pool = PoolSpec(seq_id, 0, length, True, length)
                scheduled.append(ScheduledSequence(seq_id, tokens, 0, blocks, (), pool=pool))
            else:
                spec = SampleSpec(seq_id, params, 0, length, length, tokens)
                scheduled.append(
                    ScheduledSequence(seq_id, tokens, 0, blocks, (spec,), adapter=adapter)
                )
        return ScheduledBatch.of(scheduled)

    def with_options(self, num_rows: int) -> ScheduledBatch:
        """Return a prompt with logprobs of `num_rows` tokens, and all options of sampling.

        Torch's kernels are loaded when they first run, which would delay the first such request.
        """
        length = min(num_rows + 1, self.limits.max_num_batched_tokens, self.max_model_len)
        params = SamplingParams(
            logprobs=1,
            prompt_logprobs=1,
            return_generation_logits=True,
            presence_penalty=1.0,
            logit_bias=((0, 1.0),),
            allowed_token_ids=(0, 1),
            bad_words_token_ids=((0,), (0, 0)),
        )
        tokens = [0] * length
        # The last token counts as output: bad words lie in the output.
        sample = SampleSpec(-1, params, 0, length, length - 1, tokens)
        # Logits of the whole prompt would keep much pinned memory; the sample's are enough.
        prompt = PromptLogprobsSpec(1, tokens[1:])
        item = ScheduledSequence(-1, tokens, 0, self._blocks(length), (sample,), prompt)
        return ScheduledBatch.of([item])

    def with_drafts_in_flight(self) -> ScheduledBatch:
        """Return a token with a draft that the device draws, as if there had been wrong drafts."""
        tokens = [0, PLACEHOLDER]
        specs = [SampleSpec(-1, SamplingParams(), 0, end, 1, tokens) for end in (1, 2)]
        item = ScheduledSequence(
            *(-1, tokens, 0, self._blocks(2), tuple(specs)), num_draft_tokens=1, max_move=1
        )
        return ScheduledBatch.of([item])

    def decodes_of_a_prefix(self) -> Iterator[ScheduledBatch]:
        """Yield decodes that share a block; each power of two may need other kernels."""
        most_seqs = self.limits.max_num_seqs
        sizes = {MIN_SEQS << shift for shift in range(12)} | {most_seqs}
        for size in sorted(size for size in sizes if MIN_SEQS <= size <= most_seqs):
            item = ScheduledSequence(-1, [0], self.block_size, [0, 0] * self.num_groups, ())
            yield ScheduledBatch.of([item] * size)

    def masks(self) -> TokenMasks:
        """Return a mask of the first sample of a step that allows all tokens."""
        return TokenMasks([0], b"\xff" * (-(-self.vocab_size // 32) * 4))

    def _blocks(self, length: int) -> list[int]:
        return [0] * (-(-length // self.block_size) * self.num_groups)


def _powers_of_two(largest: int) -> list[int]:
    """Return the powers of two below a number."""
    return [1 << exponent for exponent in range((largest - 1).bit_length())]
