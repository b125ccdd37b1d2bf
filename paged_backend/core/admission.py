"""Decides whether a waiting sequence can start."""

from __future__ import annotations

from collections.abc import Mapping

from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.sequence import Sequence


class Admission:
    """Checks whether a waiting sequence fits in the free blocks and in ``max_num_seqs``.

    ``running`` and ``held`` are the scheduler's dicts, not copies: each call reads them again.

    Args:
        config: the limits of a step.
        kv: the KV cache manager with the pool of blocks.
        running: the running sequences, by ``seq_id``.
        held: the sequences that wait for their masks, by ``seq_id``.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        running: Mapping[int, Sequence],
        held: Mapping[int, Sequence],
    ) -> None:
        self._config = config
        self._kv = kv
        self._running = running
        self._held = held

    def can_start(self, seq: Sequence) -> bool:
        """Return True if a waiting sequence can start now.

        It must fit in ``max_num_seqs`` and in the free blocks. Its siblings need not fit: those
        without room wait in the queue when the prompt is computed.
        """
        return (
            self.num_free_seqs() > 0
            and self.has_adapter_place(seq)
            and self.has_room(seq, self.find_prefix(seq), self.num_reserved_blocks())
        )

    def num_free_seqs(self) -> int:
        """Return the number of sequences that can start before ``max_num_seqs`` is reached.

        They also need slots for their states, if layers keep states. Sequences that wait for their
        masks count as running, unless their grammars take long.
        """
        num_held = sum(keeps_place(seq) for seq in self._held.values())
        free = self._config.max_num_seqs - len(self._running) - num_held
        if self._kv.states is None:
            return free
        return min(free, self._kv.states.num_places(len(self._running) + len(self._held)))

    def has_adapter_place(self, seq: Sequence) -> bool:
        """Return True if the sequences with blocks have at most ``max_loras`` adapters with it."""
        own = seq.request.adapter
        if not own:
            return True
        started = (*self._running.values(), *self._held.values())
        others = {other.request.adapter for other in started} - {"", own}
        return len(others) < self._config.max_loras

    def can_go_on(self, seq: Sequence) -> bool:
        """Return True if a sequence that waited for its mask can run again."""
        return keeps_place(seq) or self.num_free_seqs() > 0

    def num_reserved_blocks(self) -> int:
        """Return the number of blocks that running sequences still lack to finish their prefill."""
        return sum(
            self._kv.num_missing_blocks(seq)
            for seq in self._running.values()
            if seq.num_uncomputed_tokens > 1
        )

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Return the prefix hits of the sequence; none if it needs prompt logprobs.

        Prompt logprobs require that every prompt token is computed.
        """
        return [] if seq.wants_prompt_logprobs else self._kv.find_prefix(seq)

    def first_slice(self, seq: Sequence, hits: list[int], budget: int) -> int:
        """Return the number of tokens to compute in the first step, after the prefix hits.

        Without chunked prefill, the result is 0 if the remaining tokens exceed ``budget``.
        """
        start = self._kv.num_hit_tokens(hits)
        remaining = seq.num_tokens - start
        if remaining > budget and not self._config.enable_chunked_prefill:
            return 0
        return self._kv.cut_chunk(seq, start, min(remaining, budget))

    def has_room(self, seq: Sequence, hits: list[int], num_reserved: int) -> bool:
        """Return True if the pool has enough free blocks for the sequence and the reserved blocks.

        While other sequences run, 1% of the pool (the watermark) must stay free. Otherwise the new
        sequence could take the blocks that running sequences need for their next tokens, and the
        scheduler would have to preempt one of them.
        """
        watermark = self._kv.pool.num_usable // 100 if self._running else 0
        needed = self._kv.num_blocks_to_admit(seq, hits) + num_reserved + watermark
        return needed <= self._kv.pool.num_free


def keeps_place(seq: Sequence) -> bool:
    """Return True if a sequence keeps its place among the running ones while it is held."""
    return seq.grammar is None or not seq.grammar.account.is_large
