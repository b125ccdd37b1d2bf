"""Decides when a sequence ends."""

from __future__ import annotations

from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.sequence import Sequence
from paged_backend.outputs import FinishReason


def cut_at_end(
    seq: Sequence, token_ids: list[int], config: SchedulerConfig
) -> tuple[list[int], FinishReason | None]:
    """Cut the next tokens of a sequence after the one that ends it, if there is one.

    Returns:
        The tokens, and why the sequence ends with them; None if it goes on.
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
    """Return whether a step in flight samples the last token that the sequence may have."""
    return seq.num_output_placeholders > 0 and is_full(seq, seq.num_tokens, config)


def is_full(seq: Sequence, num_tokens: int, config: SchedulerConfig) -> bool:
    """Return whether the sequence may not grow beyond ``num_tokens`` tokens."""
    num_output_tokens = num_tokens - seq.num_prompt_tokens
    return num_output_tokens == seq.request.params.max_tokens or num_tokens >= config.max_model_len


def can_be_drafted(seq: Sequence) -> bool:
    """Return whether the sequence generates, and all its tokens are known."""
    return seq.num_output_tokens > 0 and seq.num_output_placeholders == 0


def max_draft_tokens(seq: Sequence, config: SchedulerConfig) -> int:
    """Return the number of drafts that a step may compute for a sequence.

    The token after them must fit as well. A sequence with unknown tokens can have none.
    """
    if not can_be_drafted(seq):
        return 0
    limit = config.max_model_len
    if seq.request.params.max_tokens is not None:
        limit = min(limit, seq.num_prompt_tokens + seq.request.params.max_tokens)
    return max(0, limit - seq.num_tokens - 1)
