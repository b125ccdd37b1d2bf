"""Decides when a sequence ends."""

from __future__ import annotations

from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.sequence import Sequence
from paged_backend.outputs import FinishReason


def finish_reason(seq: Sequence, token_id: int, config: SchedulerConfig) -> FinishReason | None:
    """Return why a sequence ends with its newest known token; None if it goes on."""
    params = seq.request.params
    num_output_tokens = seq.num_known_tokens - seq.num_prompt_tokens
    if num_output_tokens >= params.min_tokens and (
        token_id in params.stop_token_ids
        or (token_id in config.eos_token_ids and not params.ignore_eos)
    ):
        return FinishReason.STOP
    if is_full(seq, seq.num_known_tokens, config):
        return FinishReason.LENGTH
    return None


def awaits_last_token(seq: Sequence, config: SchedulerConfig) -> bool:
    """Return whether a step in flight samples the last token that the sequence may have."""
    return seq.num_output_placeholders > 0 and is_full(seq, seq.num_tokens, config)


def is_full(seq: Sequence, num_tokens: int, config: SchedulerConfig) -> bool:
    """Return whether the sequence may not grow beyond ``num_tokens`` tokens."""
    num_output_tokens = num_tokens - seq.num_prompt_tokens
    return num_output_tokens == seq.request.params.max_tokens or num_tokens >= config.max_model_len
