"""Adds what a step has computed to the sequences of that step."""

from __future__ import annotations

import time
from itertools import islice

from paged_backend.core.beam_groups import BeamGroups
from paged_backend.core.constraints import accept_tokens, can_be_forced
from paged_backend.core.counters import EngineCounters
from paged_backend.core.drafter import NO_DRAFT, Draft
from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.scheduler_output import ModelRunnerOutput
from paged_backend.core.sequence import PLACEHOLDER, Sequence, SequenceStatus
from paged_backend.core.sequences import Sequences
from paged_backend.core.step import ScheduledStep, StepBuilder
from paged_backend.core.stopping import cut_at_end
from paged_backend.values.outputs import (
    DraftCounts,
    FinishReason,
    SequenceOutput,
    TokenLogprobs,
)
from paged_backend.values.request import Request

# Forced tokens of all outputs in a step; more of them would make the step long for the others.
MAX_FORCED_TOKENS = 64


class StepResults:
    """Adds sampled tokens to sequences, and ends those whose last token it is.

    Args:
        kv: registers the blocks that the tokens fill.
        sequences: the unfinished sequences.
        counters: counts forced tokens and drafts.
        config: the end tokens of the model, and the largest number of running sequences.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        sequences: Sequences,
        counters: EngineCounters,
        config: SchedulerConfig,
    ) -> None:
        self._kv = kv
        self._sequences = sequences
        self._counters = counters
        self._eos_token_ids = config.eos_token_ids
        self._beams = BeamGroups(sequences, config.max_num_seqs)
        self._num_constrained = 0  # sequences of the step that have a grammar

    def expect(self, step: StepBuilder) -> ScheduledStep:
        """Count the tokens of a step as computed, and add placeholders for those it samples."""
        for seq in step.continued:
            seq.num_computed_tokens += 1
            seq.token_ids.append(PLACEHOLDER)
            seq.num_output_placeholders += 1
        sampled = list(step.continued)
        prompts: list[tuple[Sequence, int]] = []
        for seq, num_tokens in step.slices():
            if seq.wants_prompt_logprobs:
                prompts.append((seq, seq.num_computed_tokens))
            if seq.num_charged_tokens < seq.num_prompt_tokens:
                self._sequences.charge_prompt(seq, num_tokens)
            seq.num_computed_tokens += num_tokens
            if seq.num_uncomputed_tokens == 0:
                for completion in (seq, *self._sequences.fork(seq)):
                    completion.add_placeholder()
                    sampled.append(completion)
                if seq.seq_id in step.drafts:
                    seq.add_drafts(len(step.drafts[seq.seq_id].token_ids))
        return ScheduledStep(sampled, len(step.continued), prompts, step.drafts, set())

    def apply(self, step: ScheduledStep, result: ModelRunnerOutput) -> list[SequenceOutput]:
        """Apply the output of the earliest step in flight.

        Returns:
            The new tokens of each sequence that sampled and has not ended in the meantime, and the
            finish reason if they end it.
        """
        for (seq, start), logprobs in zip(step.prompts, result.prompt_logprobs, strict=True):
            if seq.prompt_logprobs is not None:
                seq.prompt_logprobs[start:] = logprobs
        if result.pooled:
            pooled = zip(step.sampled, result.pooled, strict=True)
            return [self._end_prompt(seq, part) for seq, part in pooled if not seq.is_finished]
        if self._sequences.num_constrained:
            self._num_constrained = sum(seq.grammar is not None for seq in step.sampled)
        outputs = self._take_continued(step, result)
        for place in range(step.num_continued, len(step.sampled)):
            seq = step.sampled[place]
            if seq.num_candidates > 0 and not seq.is_finished:
                outputs += self._beams.take(seq, result.logprobs[place][0])
            elif not (seq.is_finished or seq.seq_id in step.dropped_seq_ids):
                tokens, start = result.token_ids[place], seq.num_known_tokens
                draft = step.drafts.get(seq.seq_id, NO_DRAFT)
                num_drafts = len(draft.token_ids)
                output = self._take(seq, tokens, result.logprobs.get(place), num_drafts)
                outputs.append(output)
                if draft.token_ids:
                    # Right drafts after the end of the sequence are not part of it.
                    num_accepted = min(len(tokens) - 1, seq.num_known_tokens - start)
                    num_predicted = result.num_predicted.get(seq.seq_id, 0)
                    output.drafts = _counts(draft, num_predicted, num_accepted)
                    self._counters.count_drafts(output.drafts)
        return outputs

    def _take_continued(
        self, step: ScheduledStep, result: ModelRunnerOutput
    ) -> list[SequenceOutput]:
        """Add the tokens of a step to its continued decodes, as :meth:`_take` does.

        A continued decode has one new token, which is not its first, and nothing else. Few of these
        tokens end their sequence or fill a block.
        """
        outputs: list[SequenceOutput] = []
        charged: list[Request] = []  # one for each token
        finished, block_size = SequenceStatus.FINISHED, self._kv.block_size
        eos_token_ids, dropped = self._eos_token_ids, step.dropped_seq_ids
        continued = islice(step.sampled, step.num_continued)
        for seq, token_ids in zip(continued, result.token_ids, strict=False):
            if seq.status is finished or dropped and seq.seq_id in dropped:
                continue
            token_id, grammar = token_ids[0], seq.grammar
            # The number of known tokens, this one included.
            end = len(seq.token_ids) - seq.num_output_placeholders + 1
            is_last = token_id in seq.end_token_ids or end >= seq.max_num_tokens
            if not is_last and grammar is not None:
                is_last = token_id in eos_token_ids or not grammar.accept(token_ids)
            if is_last:
                outputs.append(self._take(seq, token_ids, None))
                continue
            seq.token_ids[end - 1] = token_id
            seq.num_output_placeholders -= 1
            if end % block_size == 0 and seq.num_computed_tokens >= end:
                self._kv.register_full_blocks(seq, end - 1, end)
            reason = None
            if grammar is None:
                charged.append(seq.request)
            else:
                self._sequences.charge_output(seq, 1)
                forced, reason = self._force(seq)
                token_ids = token_ids + forced if forced else token_ids
                if reason is not None:
                    self._sequences.finish(seq, reason)
            num_cached = seq.num_cached_tokens or 0
            outputs.append(
                SequenceOutput(seq.request.request_id, seq.index, token_ids, reason, num_cached)
            )
        self._sequences.charge_decodes(charged)
        return outputs

    def _take(
        self,
        seq: Sequence,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        num_drafts: int = 0,
    ) -> SequenceOutput:
        """Add the tokens of a step to a sequence, without those after the token that ends it."""
        start = seq.num_known_tokens
        is_first = seq.first_token_s is None
        token_ids, reason = cut_at_end(seq, token_ids)
        token_ids, reason = accept_tokens(seq, token_ids, reason, self._eos_token_ids)
        if token_ids:
            self._sequences.take_tokens(seq, token_ids, num_drafts)
        self._sequences.charge_output(seq, len(token_ids))
        # Drafts that were right are computed, and so are the tokens of which the next step is in
        # flight already; both may fill a block. The last token of a sequence is never computed.
        end = min(seq.num_computed_tokens, start + len(token_ids) - (reason is not None))
        if end > start:
            self._kv.register_full_blocks(seq, start, end)
        if reason is None:
            forced, reason = self._force(seq)
            token_ids = token_ids + forced
        if reason is not None:
            self._sequences.finish(seq, reason)
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
        return SequenceOutput(
            seq.request.request_id,
            seq.index,
            token_ids,
            reason,
            seq.num_cached_tokens or 0,
            None if logprobs is None else logprobs[: len(token_ids)],
            prompt_logprobs,
            seq.times if is_first else None,
        )

    def _end_prompt(self, seq: Sequence, pooled: bytes) -> SequenceOutput:
        """End a sequence that asks for an embedding, as its prompt is computed."""
        seq.first_token_s = time.monotonic()
        self._sequences.finish(seq, FinishReason.STOP)
        return SequenceOutput(
            seq.request.request_id,
            seq.index,
            [],
            FinishReason.STOP,
            seq.num_cached_tokens or 0,
            times=seq.times,
            pooled=pooled,
        )

    def _force(self, seq: Sequence) -> tuple[list[int], FinishReason | None]:
        """Append the tokens that a grammar forces, so that one step can compute all of them.

        Returns:
            The tokens, and the finish reason if they end the sequence.
        """
        if seq.grammar is None or not can_be_forced(seq):
            return [], None
        share = max(1, MAX_FORCED_TOKENS // self._num_constrained)
        forced = seq.grammar.forced_token_ids()[:share]
        if not forced:
            return [], None
        token_ids, reason = cut_at_end(seq, forced)
        token_ids, reason = accept_tokens(seq, token_ids, reason, self._eos_token_ids)
        seq.add_tokens(token_ids)
        self._counters.num_forced_tokens += len(token_ids)
        self._sequences.charge_output(seq, len(token_ids))
        return token_ids, reason


def _counts(draft: Draft, num_predicted: int, num_accepted: int) -> DraftCounts:
    """Return the counts of a draft.

    Args:
        draft: the draft.
        num_predicted: number of its first tokens that the device has drawn from a prediction.
        num_accepted: number of its first tokens that are part of the output.
    """
    number = len(draft.token_ids)
    num_predicted = number if draft.is_predicted else num_predicted
    return DraftCounts(number, num_accepted, num_predicted, min(num_predicted, num_accepted))
