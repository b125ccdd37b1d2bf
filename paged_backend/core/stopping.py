"""Decides when a sequence ends."""

from __future__ import annotations

from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.sequence import Sequence
from paged_backend.outputs import FinishReason


def cut_at_end(
    seq: Sequence, token_ids: list[int], config: SchedulerConfig
) -> tuple[list[int], FinishReason | None]:
    """Drop the new tokens of a sequence after the first one that ends it.

    Returns:
        The remaining tokens, and the finish reason; None if no token ends the sequence.
    """
    params, num_known = seq.request.params, seq.num_known_tokens
    for num_tokens, token_id in enumerate(token_ids, num_known + 1):
        reason = None
        if num_tokens - seq.num_prompt_tokens >= params.min_tokens and (
            token_id in params.stop_token_ids
            or (token_id in config.eos_token_ids and not params.ignore_eos)
        ):
            reason = FinishReason.STOP
        elif is_full(seq, num_tokens, config):
            reason = FinishReason.LENGTH
        if reason is not None:
            return token_ids[: num_tokens - num_known], reason
    return token_ids, None


def awaits_last_token(seq: Sequence, config: SchedulerConfig) -> bool:
    """Return True if a step in flight samples the last token that the limits allow.

    The step may also return the embedding of the whole prompt. The sequence must then not be
    scheduled again.
    """
    if seq.request.pooling is not None:  # the step returns an embedding in place of a token
        return seq.num_output_placeholders > 0
    return seq.num_output_placeholders > 0 and is_full(seq, seq.num_tokens, config)


def is_full(seq: Sequence, num_tokens: int, config: SchedulerConfig) -> bool:
    """Return True if a sequence is at ``max_tokens`` or ``max_model_len``.

    ``num_tokens`` is its length, prompt and output.
    """
    num_output_tokens = num_tokens - seq.num_prompt_tokens
    return num_output_tokens == seq.request.params.max_tokens or num_tokens >= config.max_model_len


def can_be_drafted(seq: Sequence) -> bool:
    """Return True if the sequence has an output token and no placeholders."""
    return seq.num_output_tokens > 0 and seq.num_output_placeholders == 0


def max_draft_tokens(seq: Sequence, config: SchedulerConfig) -> int:
    """Return the maximum number of drafts that a step may compute for a sequence.

    A step with n drafts samples up to n + 1 tokens, which must not exceed ``max_tokens`` or
    ``max_model_len``. The result is 0 if :func:`can_be_drafted` is False.
    """
    if not can_be_drafted(seq):
        return 0
    limit = config.max_model_len
    if seq.request.params.max_tokens is not None:
        limit = min(limit, seq.num_prompt_tokens + seq.request.params.max_tokens)
    return max(0, limit - seq.num_tokens - 1)
