"""The options of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step and of a sequence."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool
    eos_token_ids: frozenset[int]
    max_num_drafts: int = 0  # drafts of a step, over all sequences
    # Whether sequences with steps in flight get drafts, where the drafter asks so. The device draws
    # them, and moves slices back after wrong ones.
    draws_ahead: bool = False
    # Whether all decodes wait for steps in flight if one of them has to wait, or has drafts there
    # without `draws_ahead`. They would be divided among the steps in turn otherwise.
    waits_together: bool = False
    max_loras: int = 1  # different LoRA adapters of sequences with blocks
