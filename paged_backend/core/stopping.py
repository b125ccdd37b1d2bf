"""Decides when a sequence ends."""

from __future__ import annotations

from typing import NamedTuple

from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.sequence import Sequence
from paged_backend.values.options.speculation import MAX_DRAFTS
from paged_backend.values.outputs import FinishReason
from paged_backend.values.request import Request


class EndConditions(NamedTuple):
    """What ends the completions of a request."""

    token_ids: frozenset[int]  # that end a completion of at least ``min_tokens`` tokens
    max_num_tokens: int  # prompt and output

    @classmethod
    def of(cls, request: Request, config: SchedulerConfig) -> EndConditions:
        """Return the conditions of a request on a model."""
        params = request.params
        eos_token_ids = frozenset() if params.ignore_eos else config.eos_token_ids
        max_num_tokens = config.max_model_len
        if params.max_tokens is not None:
            length = len(request.prompt_token_ids) + params.max_tokens
            max_num_tokens = min(max_num_tokens, length)
        return cls(eos_token_ids.union(params.stop_token_ids), max_num_tokens)


def cut_at_end(seq: Sequence, token_ids: list[int]) -> tuple[list[int], FinishReason | None]:
    """Drop the new tokens of a sequence after the first one that ends it.

    Returns:
        The remaining tokens, and the finish reason; None if no token ends the sequence.
    """
    num_known = seq.num_known_tokens
    num_before_stop = seq.num_prompt_tokens + seq.request.params.min_tokens
    for num_tokens, token_id in enumerate(token_ids, num_known + 1):
        reason = None
        if token_id in seq.end_token_ids and num_tokens >= num_before_stop:
            reason = FinishReason.STOP
        elif num_tokens >= seq.max_num_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            return token_ids[: num_tokens - num_known], reason
    return token_ids, None


def must_wait(seq: Sequence, goes_ahead: bool) -> bool:
    """Return True if a running sequence must not be scheduled now.

    A step in flight may verify drafts, sample the last token that the limits allow, or return the
    embedding of the whole prompt. A beam also waits for the candidates of the other beams.

    Args:
        seq: the sequence.
        goes_ahead: its next slice may follow drafts in flight.
    """
    if seq.num_output_placeholders == 0:
        return False
    if seq.num_draft_tokens > 0 and not goes_ahead or seq.awaits_beams:
        return True
    # The step returns an embedding in place of a token.
    return seq.request.pooling is not None or seq.num_tokens >= seq.max_num_tokens


def can_be_drafted_ahead(seq: Sequence) -> bool:
    """Return True if the parameters of a sequence allow drafts after tokens in flight.

    The host must not have to read these tokens before it launches a step. It reads them before it
    computes masks, while the device computes a step. The device counts tokens for penalties.
    """
    request = seq.request
    has_to_read = request.params.reads_tokens or request.params.beam_width > 1
    has_masks = seq.grammar is None or not seq.grammar.goes_aside
    return not has_to_read and has_masks and request.pooling is None


def may_go_ahead(seq: Sequence) -> bool:
    """Return True if drafts of a sequence may follow a token, or drafts, in flight.

    The device draws these drafts. If drafts in flight are wrong, it moves the next slice of the
    sequence back, to the token after the last right one.
    """
    return (
        can_be_drafted_ahead(seq)
        and seq.num_uncomputed_tokens == 1
        and seq.num_output_placeholders > 0
        and seq.num_tokens < seq.max_num_tokens
    )


def can_be_drafted(seq: Sequence) -> bool:
    """Return True if the sequence has an output token and no placeholders.

    Another thread computes the mask of one token only, without drafts. Beams have no drafts.
    """
    if seq.num_candidates > 0:
        return False
    has_masks = seq.grammar is None or not seq.grammar.goes_aside
    return has_masks and seq.num_output_tokens > 0 and seq.num_output_placeholders == 0


def may_await_token(seq: Sequence) -> bool:
    """Return True if a step in flight samples the newest token of a sequence, which has no drafts.

    Once this token is known, the sequence can be drafted for. Beams have no drafts.
    """
    if seq.num_candidates > 0:
        return False
    has_masks = seq.grammar is None or not seq.grammar.goes_aside
    return (
        has_masks
        and seq.num_output_placeholders == seq.num_uncomputed_tokens == 1
        and seq.num_draft_tokens == 0
        and seq.num_tokens + 1 < seq.max_num_tokens
    )


def max_draft_tokens(seq: Sequence) -> int:
    """Return the maximum number of drafts that a step may compute for a sequence.

    A step with n drafts samples up to n + 1 tokens, which must not exceed ``max_tokens`` or
    ``max_model_len``.
    """
    return min(max(0, seq.max_num_tokens - seq.num_tokens - 1), MAX_DRAFTS)
