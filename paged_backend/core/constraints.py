"""Applies grammars to sequences: masks before a step samples, and its tokens afterwards."""

from __future__ import annotations

from collections.abc import Mapping

from paged_backend.core.admission import Admission
from paged_backend.core.drafter import NO_DRAFT, Draft
from paged_backend.core.scheduler_output import DraftGuide, TokenMasks
from paged_backend.core.sequence import PLACEHOLDER, Sequence, SequenceStatus
from paged_backend.core.sequences import Sequences
from paged_backend.core.step import ScheduledStep
from paged_backend.values.outputs import FinishReason


def is_constrained(step: ScheduledStep) -> bool:
    """Return True if a sequence that the step samples for has a grammar."""
    return any(seq.grammar is not None for seq in step.sampled)


def lacks_drafts(step: ScheduledStep) -> bool:
    """Return True if a sequence with a grammar has drafts that only the device knows."""
    drafts = (step.drafts.get(seq.seq_id) for seq in step.sampled if seq.grammar is not None)
    return any(draft is not None and PLACEHOLDER in draft.token_ids[:1] for draft in drafts)


def token_masks(
    step: ScheduledStep, greedy_token_ids: Mapping[int, int]
) -> tuple[TokenMasks | None, list[Sequence]]:
    """Return the masks that change a sample of a step, and the sequences without a known mask.

    The tokens of all steps before it must be known, and so must drafts of sequences with grammars.

    Args:
        step: the step.
        greedy_token_ids: tokens of samples without a mask, by index of the sample.
    """
    indices: list[int] = []
    masks: list[bytes] = []
    unknown: list[Sequence] = []
    first_row = 0
    for seq in step.sampled:
        drafts = step.drafts.get(seq.seq_id, NO_DRAFT).token_ids
        if seq.grammar is not None and not seq.is_finished:
            of_sequence = seq.grammar.masks(drafts, greedy_token_ids.get(first_row))
            if of_sequence is None:
                unknown.append(seq)
            else:
                indices += range(first_row, first_row + len(of_sequence))
                masks += of_sequence
        first_row += 1 + len(drafts)
    return TokenMasks(indices, b"".join(masks)) if masks else None, unknown


class GrammarGuide(DraftGuide):
    """See :class:`DraftGuide`.

    Args:
        step: the step with the sequences that are drafted for.
    """

    def __init__(self, step: ScheduledStep) -> None:
        self._grammars = {
            seq.seq_id: seq.grammar
            for seq in step.sampled
            if seq.grammar is not None and seq.seq_id in step.drafts
        }

    def mask(self, seq_id: int, draft_token_ids: list[int]) -> bytes | None:
        """Return the mask of the token after some drafts of a sequence."""
        grammar = self._grammars.get(seq_id)
        return None if grammar is None else grammar.mask_after(draft_token_ids)

    @property
    def is_needed(self) -> bool:
        """True if a sequence with drafts has a grammar."""
        return bool(self._grammars)


def allowed_drafts(seq: Sequence, draft: Draft) -> Draft:
    """Return a draft up to the first token that the grammar of its sequence forbids."""
    if seq.grammar is None or not draft.token_ids or draft.token_ids[0] == PLACEHOLDER:
        return draft
    return draft.first(seq.grammar.num_allowed(draft.token_ids))


def hold_and_go_on(sequences: Sequences, admission: Admission) -> None:
    """Hold the sequences that wait for another thread to compute their next mask."""
    for seq in list(sequences.running.values()):
        grammar = seq.grammar
        if grammar is not None and grammar.goes_aside and seq.num_uncomputed_tokens == 1:
            if not grammar.is_ready:
                sequences.hold(seq)
    for seq in list(sequences.held.values()):
        # The token of a placeholder is not known yet.
        if seq.grammar is not None and seq.num_output_placeholders == 0:
            seq.grammar.start_aside()
            if seq.grammar.is_ready and admission.can_go_on(seq):
                sequences.unhold(seq)


def accept_tokens(
    seq: Sequence, token_ids: list[int], reason: FinishReason | None, eos_token_ids: frozenset[int]
) -> tuple[list[int], FinishReason | None]:
    """Add the new tokens of a sequence to its grammar.

    Args:
        seq: the sequence; its own tokens are not changed.
        token_ids: the new tokens, up to one that ends the sequence.
        reason: why the last token ends it, or None.
        eos_token_ids: tokens that end the output of a grammar, even under ``ignore_eos``.

    Returns:
        The tokens up to the one that ends the output, and the finish reason. It is ERROR if a token
        is not allowed: then the other parameters forbid every token that the grammar allows.
    """
    if seq.grammar is None:
        return token_ids, reason
    # A token that stops the sequence is not part of the output.
    content = token_ids[:-1] if reason is FinishReason.STOP else token_ids
    for number, token_id in enumerate(content):
        if not seq.grammar.accept([token_id]):
            return token_ids[:number], FinishReason.ERROR
        if token_id in eos_token_ids:
            return token_ids[: number + 1], FinishReason.STOP
    return token_ids, reason


def can_be_forced(seq: Sequence) -> bool:
    """Return True if forced tokens may be appended without sampling.

    They are sampled if their logprobs are needed, or if other parameters may forbid them, or allow
    another end. The queue counts the tokens of a waiting sequence, so their number must not change.
    """
    params = seq.request.params
    return (
        seq.status is SequenceStatus.RUNNING
        and seq.num_output_placeholders == 0
        and params.logprobs is None
        and not params.adjusts_tokens
        and not params.stop_token_ids
        and params.min_tokens <= seq.num_output_tokens
    )
