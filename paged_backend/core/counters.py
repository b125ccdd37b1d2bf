"""Counters and histograms of one engine since it started."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection

from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.sequence import Sequence
from paged_backend.values.histogram import RunningHistogram
from paged_backend.values.outputs import (
    ENGINE_HISTOGRAMS,
    DraftCounts,
    EngineStats,
    FinishReason,
)


class EngineCounters:
    """Cumulative counters and histograms. Only the engine's thread uses them."""

    def __init__(self) -> None:
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_generation_tokens = 0
        self.num_forced_tokens = 0  # generated tokens that were not sampled
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._num_accepted_at: list[int] = []  # see EngineStats
        self._num_prompt_tokens = 0
        self._num_cache_hits = 0
        self._finished: Counter[str] = Counter()  # by finish reason
        self._histograms = {
            name: RunningHistogram(bounds) for name, (_, bounds) in ENGINE_HISTOGRAMS.items()
        }

    @property
    def num_finished(self) -> int:
        """Number of sequences that have ended, for any reason."""
        return self._finished.total()

    def count_admission(self, seq: Sequence) -> None:
        """Count the prompt tokens and prefix hits of a sequence that starts for the first time."""
        self._num_prompt_tokens += seq.num_prompt_tokens
        self._num_cache_hits += seq.num_computed_tokens

    def count_drafts(self, counts: DraftCounts) -> None:
        """Count the draft of a sequence in a step, and how many of its first tokens were right."""
        num_accepted = counts.num_accepted
        self._num_drafts += 1
        self._num_draft_tokens += counts.num_tokens
        self._num_accepted_at += [0] * (num_accepted - len(self._num_accepted_at))
        for place in range(num_accepted):
            self._num_accepted_at[place] += 1

    def count_end(self, seq: Sequence, reason: FinishReason) -> None:
        """Count a sequence that ends.

        Its queue, prefill and decode times are recorded too, unless it was aborted, has no token,
        or continues after tokens of a previous engine process.
        """
        self._finished[reason] += 1
        if reason is FinishReason.ABORT or seq.admitted_s is None or seq.first_token_s is None:
            return
        now = time.monotonic()
        self._observe("request_queue_time_seconds", seq.admitted_s - seq.queued_s)
        self._observe("request_prefill_time_seconds", seq.first_token_s - seq.admitted_s)
        self._observe("request_decode_time_seconds", now - seq.first_token_s)
        self._observe("request_inference_time_seconds", now - seq.admitted_s)

    def observe_step(self, seconds: float, num_sequences: int, num_tokens: int) -> None:
        """Record the duration of a completed step, and its numbers of sequences and tokens."""
        self._observe("engine_step_seconds", seconds)
        self._observe("engine_step_sequences", num_sequences)
        self._observe("iteration_tokens_total", num_tokens)

    def snapshot(
        self, kv: KVCacheManager, num_waiting: int, running: Collection[Sequence]
    ) -> EngineStats:
        """Return all counters and histograms, and the current numbers of sequences and blocks."""
        pool, states = kv.pool, None if kv.states is None else kv.states.pool
        empty_slots = sum(kv.num_empty_slots(seq) for seq in running)
        return EngineStats(
            num_waiting=num_waiting,
            num_running=len(running),
            block_size=kv.block_size,
            num_blocks=pool.num_usable,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_used_slots=pool.num_used * kv.block_size - empty_slots,
            num_preemptions=self.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_forced_tokens=self.num_forced_tokens,
            num_cache_hits=self._num_cache_hits,
            num_steps=self.num_steps,
            num_drafts=self._num_drafts,
            num_draft_tokens=self._num_draft_tokens,
            num_accepted_at=tuple(self._num_accepted_at),
            num_state_slots=0 if states is None else states.num_usable,
            num_used_state_slots=0 if states is None else states.num_used,
            finished=dict(self._finished),
            histograms={name: histogram.counts() for name, histogram in self._histograms.items()},
        )

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)
