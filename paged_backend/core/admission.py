"""Decides whether a waiting sequence can start."""

from __future__ import annotations

from collections.abc import Mapping

from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.sequence import Sequence


class Admission:
    """Compares what a waiting sequence needs with what the running ones leave.

    Args:
        config: the limits of a step.
        kv: the blocks.
        running: the running sequences, by ``seq_id``; read whenever a question is asked.
        siblings: the completions that will start with a sequence, by its ``seq_id``.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        running: Mapping[int, Sequence],
        siblings: Mapping[int, list[Sequence]],
    ) -> None:
        self._config = config
        self._kv = kv
        self._running = running
        self._siblings = siblings

    def can_start(self, seq: Sequence) -> bool:
        """Return True if a waiting sequence and its siblings can start now."""
        return self.num_seqs(seq) <= self.num_free_seqs() and self.has_room(
            seq, self.find_prefix(seq), self.num_reserved_blocks()
        )

    def num_seqs(self, seq: Sequence) -> int:
        """The number of sequences that run once this one and its siblings have started."""
        return 1 + len(self._siblings.get(seq.seq_id, ()))

    def num_free_seqs(self) -> int:
        """The number of sequences that may start; siblings of running ones are reserved."""
        num_reserved = sum(len(self._siblings.get(seq_id, ())) for seq_id in self._running)
        return self._config.max_num_seqs - len(self._running) - num_reserved

    def num_reserved_blocks(self) -> int:
        """The number of blocks that running prompts still need."""
        return sum(
            self._kv.num_missing_blocks(seq)
            for seq in self._running.values()
            if seq.num_uncomputed_tokens > 1
        )

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Cached blocks that the sequence may start with."""
        return [] if seq.wants_prompt_logprobs else self._kv.find_prefix(seq)

    def first_slice(self, seq: Sequence, hits: list[int], budget: int) -> int:
        """The number of tokens to compute first, after prefix hits; 0 if they do not fit."""
        remaining = seq.num_tokens - len(hits) * self._kv.block_size
        if remaining > budget and not self._config.enable_chunked_prefill:
            return 0
        return min(remaining, budget)

    def has_room(self, seq: Sequence, hits: list[int], num_reserved: int) -> bool:
        """Return True if the pool has enough free blocks for the sequence and the reserved blocks.

        A hundredth of the pool is kept free while others run. Otherwise a new sequence would take
        the blocks that running ones need for their next tokens, and one of them is preempted.
        """
        watermark = self._kv.pool.num_usable // 100 if self._running else 0
        needed = self._kv.num_blocks_to_admit(seq, hits) + num_reserved + watermark
        return needed <= self._kv.pool.num_free
