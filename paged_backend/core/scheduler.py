"""Decides, step by step, which tokens of which sequences are computed.

Iteration-level scheduling is Orca's (Yu et al., OSDI 2022, section 3.2); one token budget shared
by decodes and chunks of prompts is SARATHI's (Agrawal et al., 2023, section 4); preemption by
recompute is PagedAttention's (Kwon et al., SOSP 2023, section 4.5).
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.measurements import Measurements
from paged_backend.core.scheduler_output import (
    ModelRunnerOutput,
    SchedulerOutput,
)
from paged_backend.core.sequence import Sequence, SequenceStatus
from paged_backend.core.step import Step, UnderWay
from paged_backend.core.tenants import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from paged_backend.core.waiting_queue import WaitingQueue
from paged_backend.outputs import (
    EngineStats,
    EngineView,
    FinishReason,
    QueueState,
    SequenceOutput,
    SequenceView,
    TokenLogprobs,
)
from paged_backend.request import Request

Progress = Collection[Collection[int] | None]
"""The tokens of each answer of a request so far; None for one that has ended."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's share of the engine's options."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool
    eos_token_ids: frozenset[int]
    fair: bool  # among tenants of equal priority
    tenant_weights: Mapping[str, float]


class Scheduler:
    """Waiting and running sequences over one pool of blocks; used by the engine's thread only.

    A plan is booked as if it were computed already, with placeholders for the tokens it will
    sample, so that the next one can be made while it is under way. The work of a step grows with
    the sequences that run, never with the pool or the queue.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.kv = kv
        self.measurements = Measurements()
        self._waiting = WaitingQueue(config.tenant_weights, fair=config.fair)
        self._running: dict[int, Sequence] = {}  # seq_id -> sequence, in the order of admission
        self._by_request: dict[str, list[Sequence]] = {}  # request_id -> unfinished sequences
        # Answers 2..n of a request wait beside the first one until its prompt is computed.
        self._unforked: dict[int, list[Sequence]] = {}  # seq_id of the first -> the others
        self._under_way: deque[UnderWay] = deque()  # plans without a result yet
        self._released: list[int] = []  # seq_ids, since the last plan
        self._next_seq_id = 0
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    # --- requests -------------------------------------------------------------------------

    def add_request(self, request: Request, seed: int, progress: Progress = ()) -> None:
        """Queue a request; ``seed`` stands in where the request brings none.

        With ``progress`` its answers go on where an engine that has ended left them.

        Raises:
            ValueError: a request of that id is still open.
        """
        if request.request_id in self._by_request:
            raise ValueError(f"request id {request.request_id} is already in use")
        if request.params.seed is not None:
            seed = request.params.seed
        begun = any(tokens is None or tokens for tokens in progress)
        answers = [
            Sequence(self._next_seq_id + index, request, index, seed, tokens)
            for index, tokens in enumerate(progress if begun else [()] * request.params.n)
            if tokens is not None
        ]
        self._next_seq_id += request.params.n
        self._by_request[request.request_id] = answers
        self._waiting.open(request)
        if begun:  # all have tokens of their own by now
            for answer in answers:
                self._waiting.add(answer)
            return
        first, *others = answers
        if others:
            self._unforked[first.seq_id] = others
        self._waiting.add(first)

    def abort_request(self, request_id: str) -> None:
        """End a request and free the blocks; unknown ids are ignored.

        A request may end by itself while its caller's abort is under way.
        """
        for seq in list(self._by_request.get(request_id, ())):
            self._finish(seq, FinishReason.ABORT)

    def stop_answer(self, request_id: str, index: int) -> None:
        """End an answer whose text has come to a stop string; unknown ones are ignored.

        It can be ended once it has begun, that is, after its first token.
        """
        for seq in list(self._by_request.get(request_id, ())):
            if index == seq.index and seq.num_output_tokens > 0:
                self._finish(seq, FinishReason.STOP)

    def cancel_request(self, request_id: str) -> list[SequenceOutput]:
        """End a request with an output for each of its answers; none for unknown ids."""
        outputs = [
            SequenceOutput(
                request_id, seq.index, [], FinishReason.ABORT, seq.num_cached_tokens or 0
            )
            for seq in self._by_request.get(request_id, ())
        ]
        self.abort_request(request_id)
        return outputs

    def is_open(self, request_id: str) -> bool:
        """Whether any answer of the request has yet to end."""
        return request_id in self._by_request

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to schedule."""
        return bool(self._by_request)

    # --- one step -------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Plan a step: decodes first, then chunks of prompts, then new sequences.

        A new one that is more urgent than a prompt under way, or of a tenant that was served less,
        comes before that. The plan is empty while all sequences wait for their last tokens.
        """
        step = Step(self.config.max_num_batched_tokens)
        self._make_way()
        preempted = self._schedule_running(step)
        for seq, num_tokens in step.slices():
            self._register(seq, num_tokens)
        if not preempted:
            self._admit_waiting(step)
        plan = step.output(self._unforked, self._released)
        if plan.scheduled:
            self._released = []
            self._counts["steps"] += 1
            self._under_way.append(self._book(step))
        elif self.has_unfinished and not self._under_way:
            raise RuntimeError("sequences are unfinished but none can be scheduled")
        return plan

    def update_from_output(self, result: ModelRunnerOutput) -> list[SequenceOutput]:
        """Take the tokens of the earliest plan under way, finish, and say what is new."""
        under_way = self._under_way.popleft()
        for (seq, start), logprobs in zip(under_way.prompts, result.prompt_logprobs, strict=True):
            if seq.prompt_logprobs is not None:
                seq.prompt_logprobs[start:] = logprobs
        pairs = zip(under_way.sampled, result.token_ids, strict=True)
        return [
            self._take(seq, token, result.logprobs.get(place))
            for place, (seq, token) in enumerate(pairs)
            if not seq.is_finished
        ]

    def _make_way(self) -> None:
        """Preempt a sequence of a tenant that holds too much, if the next in turn finds no place.

        This comes first of all, as the blocks that a plan fills can be found from then on. There
        is never a place for both, so the one that is preempted does not return in the same plan.
        """
        if not self._waiting:
            return
        seq = self._waiting.first()
        if not self._waiting.has_rivals(seq) or self._finds_place(seq):
            return
        displaced = self._waiting.displaced_by(seq, self._running.values())
        if displaced is not None:
            self._preempt(displaced)

    def _schedule_running(self, step: Step) -> bool:
        """Plan what runs already; returns whether a sequence had to give up its blocks."""
        num_preempted = self._counts["preemptions"]
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self._running.values():
            if not self._awaits_last_token(seq):
                (decodes if seq.num_uncomputed_tokens == 1 else prefills).append(seq)
        for seq in decodes:
            self._continue(seq, step)
        for seq in sorted(prefills, key=self._waiting.turn):
            if self._counts["preemptions"] == num_preempted:
                self._admit_waiting(step, before=seq)
            self._continue(seq, step)
        return self._counts["preemptions"] > num_preempted

    def _continue(self, seq: Sequence, step: Step) -> None:
        """Plan as much of a running sequence as there is budget for, at the cost of the last."""
        num_tokens = min(seq.num_uncomputed_tokens, step.budget)
        while num_tokens > 0 and seq.status is SequenceStatus.RUNNING:
            copies = self.kv.allocate_slots(seq, num_tokens)
            if copies is not None:
                step.add(seq, num_tokens, copies)
                break
            last = max(self._running.values(), key=lambda seq: seq.admission_order)
            step.remove(last)
            self._preempt(last)

    def _admit_waiting(self, step: Step, before: Sequence | None = None) -> None:
        """Let new sequences begin; only those that go before a prompt under way, if it is named."""
        if not self._waiting:
            return
        num_seats, reserved = self._num_free_seats(), self._num_reserved_blocks()
        while self._waiting and step.budget > 0:
            seq = self._waiting.first()
            if before is not None and self._waiting.turn(seq) >= self._waiting.turn(before):
                break
            if seq.num_pending > 0:  # it gave up its blocks in this plan: its last token is unknown
                break
            num_seats -= self._num_seats(seq)
            hits = self._prefix_hits(seq)
            num_tokens = self._first_slice(seq, hits, step.budget)
            if num_seats < 0 or num_tokens == 0 or not self._has_room(seq, hits, reserved):
                break
            self._admit(seq, hits)
            copies = self.kv.allocate_slots(seq, num_tokens)
            if copies is None:
                raise RuntimeError(f"sequence {seq.seq_id} was admitted without room")
            step.add(seq, num_tokens, copies)
            self._charge_prompt(seq, num_tokens)  # at once: it may be another tenant's turn now
            if before is None:  # nobody who is in the plan can be preempted any more
                # Blocks computed in this step are found by later sequences of the same step:
                # every layer writes the K and V of all its tokens before any of them attends.
                self._register(seq, num_tokens)

    def _finds_place(self, seq: Sequence) -> bool:
        """Whether there is a seat and room for a waiting sequence."""
        return self._num_seats(seq) <= self._num_free_seats() and self._has_room(
            seq, self._prefix_hits(seq), self._num_reserved_blocks()
        )

    def _num_seats(self, seq: Sequence) -> int:
        """Those of a sequence and of the answers that wait beside it."""
        return 1 + len(self._unforked.get(seq.seq_id, ()))

    def _num_free_seats(self) -> int:
        num_promised = sum(len(self._unforked.get(seq_id, ())) for seq_id in self._running)
        return self.config.max_num_seqs - len(self._running) - num_promised

    def _num_reserved_blocks(self) -> int:
        """Blocks that are promised to prompts under way."""
        return sum(
            self.kv.num_missing_blocks(seq)
            for seq in self._running.values()
            if seq.num_uncomputed_tokens > 1
        )

    def _prefix_hits(self, seq: Sequence) -> list[int]:
        return [] if seq.wants_prompt_logprobs else self.kv.find_prefix(seq)

    def _first_slice(self, seq: Sequence, hits: list[int], budget: int) -> int:
        remaining = seq.num_tokens - len(hits) * self.kv.block_size
        if remaining > budget and not self.config.enable_chunked_prefill:
            return 0
        return min(remaining, budget)

    def _has_room(self, seq: Sequence, hits: list[int], reserved: int) -> bool:
        """Whether the whole sequence fits beside what is promised to prompts under way.

        A hundredth of the pool is kept back while others run, so that a newcomer does not at
        once drive out, or is driven out by, what they are about to decode.
        """
        watermark = self.kv.pool.num_usable // 100 if self._running else 0
        needed = self.kv.num_blocks_to_admit(seq, hits) + reserved + watermark
        return needed <= self.kv.pool.num_free

    def _admit(self, seq: Sequence, hits: list[int]) -> None:
        self._waiting.discard(seq)
        self.kv.take_prefix(seq, hits)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            self._counts["prompt_tokens"] += seq.num_prompt_tokens
            self._counts["cache_hits"] += seq.num_computed_tokens
            seq.admitted_s = time.monotonic()
        seq.status = SequenceStatus.RUNNING
        self._running[seq.seq_id] = seq

    def _charge_prompt(self, seq: Sequence, num_tokens: int) -> None:
        """Charge what is computed of a prompt for the first time."""
        end = min(seq.num_computed_tokens + num_tokens, seq.num_prompt_tokens)
        start = max(seq.num_computed_tokens, seq.num_charged_tokens)
        if end > start:
            self._waiting.charge(seq.request, PROMPT_TOKEN_COST * (end - start))
            seq.num_charged_tokens = end

    def _register(self, seq: Sequence, num_tokens: int) -> None:
        """Make blocks findable that the step fills; one with a pending token has to wait."""
        start = seq.num_computed_tokens
        end = min(start + num_tokens, seq.num_known_tokens)
        if end > start:
            self.kv.register_full_blocks(seq, start, end)

    def _preempt(self, seq: Sequence) -> None:
        """Send a running sequence back to the queue, to be recomputed."""
        del self._running[seq.seq_id]
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self._waiting.add(seq)
        self._counts["preemptions"] += 1

    # --- after a plan ---------------------------------------------------------------------

    def _book(self, step: Step) -> UnderWay:
        """Advance what the step computes."""
        sampled: list[Sequence] = []
        prompts: list[tuple[Sequence, int]] = []
        for seq, num_tokens in step.slices():
            if seq.wants_prompt_logprobs:
                prompts.append((seq, seq.num_computed_tokens))
            self._charge_prompt(seq, num_tokens)
            seq.num_computed_tokens += num_tokens
            if seq.num_uncomputed_tokens == 0:
                branches = [seq, *self._fork(seq)]
                for branch in branches:
                    branch.expect_token()
                sampled += branches
        return UnderWay(sampled, prompts)

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """Start the other answers of a request whose prompt is computed by now."""
        others = self._unforked.pop(seq.seq_id, [])
        for other in others:
            self.kv.fork(seq, other)
            other.num_cached_tokens = seq.num_cached_tokens
            other.admitted_s = seq.admitted_s
            other.status = SequenceStatus.RUNNING
            self._running[other.seq_id] = other
        return others

    # --- after a step ---------------------------------------------------------------------

    def _take(self, seq: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> SequenceOutput:
        seq.take_token(token_id)
        self._counts["generation_tokens"] += 1
        self._waiting.charge(seq.request, OUTPUT_TOKEN_COST)
        reason = self._finish_reason(seq, token_id)
        if reason is not None:
            self._finish(seq, reason)
        elif seq.num_computed_tokens >= seq.num_known_tokens:
            # The next step, under way already, writes this token and may have filled a block.
            self.kv.register_full_blocks(seq, seq.num_known_tokens - 1, seq.num_known_tokens)
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
        return SequenceOutput(
            seq.request.request_id,
            seq.index,
            [token_id],
            reason,
            seq.num_cached_tokens or 0,
            None if logprobs is None else [logprobs],
            prompt_logprobs,
        )

    def _finish_reason(self, seq: Sequence, token_id: int) -> FinishReason | None:
        params = seq.request.params
        num_output_tokens = seq.num_known_tokens - seq.num_prompt_tokens
        if num_output_tokens >= params.min_tokens and (
            token_id in params.stop_token_ids
            or (token_id in self.config.eos_token_ids and not params.ignore_eos)
        ):
            return FinishReason.STOP
        if self._is_full(seq, seq.num_known_tokens):
            return FinishReason.LENGTH
        return None

    def _is_full(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens may not grow."""
        num_output_tokens = num_tokens - seq.num_prompt_tokens
        return (
            num_output_tokens == seq.request.params.max_tokens
            or num_tokens >= self.config.max_model_len
        )

    def _awaits_last_token(self, seq: Sequence) -> bool:
        return seq.num_pending > 0 and self._is_full(seq, seq.num_tokens)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self._waiting.discard(seq)
        self._running.pop(seq.seq_id, None)
        self._unforked.pop(seq.seq_id, None)
        self._release(seq)
        seq.status = SequenceStatus.FINISHED
        self._finished[reason] += 1
        if reason is not FinishReason.ABORT:
            self.measurements.finished(seq)
        siblings = self._by_request[seq.request.request_id]
        siblings.remove(seq)
        if not siblings:
            del self._by_request[seq.request.request_id]
            self._waiting.close(seq.request)

    def _release(self, seq: Sequence) -> None:
        # A step under way may still write to these blocks; whoever gets them next writes later.
        self.kv.release(seq)
        self._released.append(seq.seq_id)

    # --- looking at it --------------------------------------------------------------------

    @property
    def num_finished(self) -> int:
        """Sequences that have ended since the start, for whatever reason."""
        return self._finished.total()

    def num_waiting_of(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
        return self._waiting.num_waiting_of(tenant)

    def queue_state(self) -> QueueState:
        """How much waits now."""
        num_free_seats = max(0, self.config.max_num_seqs - len(self._running))
        return QueueState(len(self._waiting), self._waiting.num_tokens, num_free_seats)

    def stats(self) -> EngineStats:
        """Counts and gauges for metrics."""
        pool, counts = self.kv.pool, self._counts
        empty_slots = sum(
            len(seq.block_ids) * self.kv.block_size - seq.num_computed_tokens
            for seq in self._running.values()
        )
        return EngineStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            block_size=self.kv.block_size,
            num_blocks=pool.num_usable,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_used_slots=pool.num_used * self.kv.block_size - empty_slots,
            num_preemptions=counts["preemptions"],
            num_prompt_tokens=counts["prompt_tokens"],
            num_generation_tokens=counts["generation_tokens"],
            num_cache_hits=counts["cache_hits"],
            num_steps=counts["steps"],
            finished=dict(self._finished),
            histograms=self.measurements.counts(),
        )

    def view(self) -> EngineView:
        """All unfinished sequences with their blocks; costs as much as there are blocks."""
        return EngineView(
            block_size=self.kv.block_size,
            num_blocks=self.kv.pool.num_blocks,
            sequences=[_view(seq) for seqs in self._by_request.values() for seq in seqs],
            cached_block_ids=self.kv.pool.cached_block_ids(),
        )

    def check_invariants(self) -> None:
        """Check the books, at a cost that grows with the pool.

        Raises:
            RuntimeError: a block leaked or belongs to the wrong sequence, or an answer is stranded.
        """
        for seq in self._waiting:
            if seq.block_ids:
                raise RuntimeError(f"waiting sequence {seq.seq_id} owns blocks")
        self._waiting.check_invariants()
        if not all(id_ in self._waiting or id_ in self._running for id_ in self._unforked):
            raise RuntimeError("answers wait for a sequence that has ended")
        self.kv.check_invariants(self._running.values())


def _view(seq: Sequence) -> SequenceView:
    return SequenceView(
        request_id=seq.request.request_id,
        index=seq.index,
        status=seq.status.name.lower(),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_tokens=seq.num_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        block_ids=list(seq.block_ids),
    )
