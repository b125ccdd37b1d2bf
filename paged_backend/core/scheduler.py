"""Decides, step by step, which tokens of which sequences are computed.

The techniques come from three papers:

- Iteration-level scheduling: Orca (Yu et al., OSDI 2022, section 3.2).
- One token budget for decodes and chunks of prompts: SARATHI (Agrawal et al., 2023, section 4).
- Preemption by recomputation: PagedAttention (Kwon et al., SOSP 2023, section 4.5).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import islice

from paged_backend.core.admission import Admission
from paged_backend.core.block_pool import NULL_BLOCK
from paged_backend.core.compiling import Progress
from paged_backend.core.constraints import (
    accept_tokens,
    can_be_forced,
    is_constrained,
    token_masks,
)
from paged_backend.core.counters import EngineCounters
from paged_backend.core.drafter import Drafter
from paged_backend.core.fairness.policy import QueuePolicy
from paged_backend.core.fairness.tenant_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from paged_backend.core.grammar import Grammar
from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenMasks
from paged_backend.core.sequence import PLACEHOLDER, Sequence, SequenceStatus
from paged_backend.core.step import ScheduledStep, StepBuilder
from paged_backend.core.stopping import (
    EndConditions,
    awaits_last_token,
    can_be_drafted,
    cut_at_end,
    max_draft_tokens,
)
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


class Scheduler:
    """Holds the waiting and running sequences, and schedules each step.

    Only the engine's thread uses it. As soon as a step is scheduled, its tokens count as computed,
    and placeholders stand for the tokens that it samples. The scheduler can therefore schedule the
    next step while this one is in flight. The time to schedule a step grows with the number of
    running sequences, not with the size of the pool or the length of the queue.

    Args:
        config: the limits of a step and of a sequence.
        kv: the KV cache manager with the pool of blocks.
        waiting: the queue of waiting sequences.
        drafter: guesses the next tokens of running sequences; no drafts by default.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        waiting: QueuePolicy,
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.counters = EngineCounters()
        self._waiting = waiting
        self._drafter = drafter
        self._running: dict[int, Sequence] = {}  # by seq_id, in the order of admission
        self._by_request: dict[str, list[Sequence]] = {}  # request_id -> unfinished sequences
        # Completions 2..n of a request wait beside the first one until its prompt is computed.
        self._siblings: dict[int, list[Sequence]] = {}  # seq_id of the first -> the others
        self._admission = Admission(config, kv, self._running, self._siblings)
        self._in_flight: deque[ScheduledStep] = deque()
        self._decodes: list[Sequence] = []  # of the newest step, which the next one may continue
        self._freed_seq_ids: list[int] = []  # since the last step
        self._num_constrained = 0  # unfinished sequences with a grammar
        self._next_seq_id = 0

    # --- requests -------------------------------------------------------------------------

    def add_request(
        self,
        request: Request,
        seed: int,
        progress: Progress = (),
        grammars: Mapping[int, Grammar] | None = None,
    ) -> None:
        """Queue a request.

        Args:
            request: the request, which the front end has checked.
            seed: seed for sampling if the request has none.
            progress: the tokens that a previous engine process generated for each completion, None
                for a completion that has ended. The completions continue after these tokens.
            grammars: by index of the completion, if the output is constrained. They have accepted
                the tokens so far.

        Raises:
            ValueError: an unfinished request has the same id.
        """
        if request.request_id in self._by_request:
            raise ValueError(f"request id {request.request_id} is already in use")
        if request.params.seed is not None:
            seed = request.params.seed
        resumed = any(tokens is None or tokens for tokens in progress)
        of = (grammars or {}).get
        ends = EndConditions.of(request, self.config)
        completions = [
            Sequence(self._next_seq_id + index, request, index, seed, *ends, tokens, of(index))
            for index, tokens in enumerate(progress if resumed else [()] * request.params.n)
            if tokens is not None
        ]
        self._next_seq_id += request.params.n
        self._num_constrained += sum(seq.grammar is not None for seq in completions)
        self._by_request[request.request_id] = completions
        self._waiting.open(request)
        if resumed:  # each completion has its own tokens already
            for completion in completions:
                self._waiting.add(completion)
            return
        first, *siblings = completions
        if siblings:
            self._siblings[first.seq_id] = siblings
        self._waiting.add(first)

    def abort_request(self, request_id: str) -> None:
        """End a request without outputs, and free its blocks.

        Unknown ids are ignored, because a request can end before its abort message arrives.
        """
        for seq in list(self._by_request.get(request_id, ())):
            self._finish(seq, FinishReason.ABORT)

    def stop_completion(self, request_id: str, index: int) -> None:
        """End a completion because its text reached a stop string.

        The call is ignored if the completion is unknown, has ended, or has no output token yet. A
        placeholder counts as an output token.
        """
        for seq in list(self._by_request.get(request_id, ())):
            if index == seq.index and seq.num_output_tokens > 0:
                self._finish(seq, FinishReason.STOP)

    def cancel_request(self, request_id: str) -> list[SequenceOutput]:
        """End a request, and return a final output for each of its unfinished completions."""
        outputs = [
            SequenceOutput(
                request_id, seq.index, [], FinishReason.ABORT, seq.num_cached_tokens or 0
            )
            for seq in self._by_request.get(request_id, ())
        ]
        self.abort_request(request_id)
        return outputs

    def is_open(self, request_id: str) -> bool:
        """Return True if the request has an unfinished completion."""
        return request_id in self._by_request

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._by_request)

    # --- one step -------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Schedule a step: decodes, then prompts of running sequences, then waiting sequences.

        A waiting sequence starts before a running sequence continues its prompt if it has a higher
        priority. If the priorities are equal, it does so if its tenant received less service. After
        a preemption for lack of blocks, no waiting sequence starts in the rest of the step.

        The output is empty if nothing can be scheduled until a step in flight returns its tokens.

        Raises:
            RuntimeError: nothing can be scheduled, although requests are unfinished and no step is
                in flight.
        """
        step = StepBuilder(self.config.max_num_batched_tokens, self._decodes)
        self.kv.free_invisible_blocks(self._running.values())
        self._preempt_for_fairness()
        preempted = self._schedule_running(step)
        self._register_scheduled(step)
        if not preempted:
            self._admit_waiting(step)
        output = step.build(self.kv.layout, self._siblings, self._freed_seq_ids)
        if output.num_sequences:
            self._decodes = step.decodes
            self._freed_seq_ids = []
            self.counters.num_steps += 1
            self._in_flight.append(self._advance(step))
        elif self.has_unfinished and not self._in_flight:
            raise RuntimeError("sequences are unfinished but none can be scheduled")
        return output

    def update_from_output(self, result: ModelRunnerOutput) -> list[SequenceOutput]:
        """Apply the output of the earliest step in flight to the sequences of that step.

        Returns:
            The new tokens of each sequence that sampled and has not ended in the meantime, and the
            finish reason if they end it.
        """
        step = self._in_flight.popleft()
        for (seq, start), logprobs in zip(step.prompts, result.prompt_logprobs, strict=True):
            if seq.prompt_logprobs is not None:
                seq.prompt_logprobs[start:] = logprobs
        if result.pooled:
            pooled = zip(step.sampled, result.pooled, strict=True)
            return [self._end_prompt(seq, part) for seq, part in pooled if not seq.is_finished]
        outputs = self._take_continued(step, result)
        for place in range(step.num_continued, len(step.sampled)):
            seq = step.sampled[place]
            if not seq.is_finished:
                tokens = result.token_ids[place]
                outputs.append(self._take(seq, tokens, result.logprobs.get(place)))
        return outputs

    @property
    def is_constrained(self) -> bool:
        """True if a sequence in the newest step has a grammar, so that sampling needs masks."""
        if not (self._num_constrained and self._in_flight):
            return False
        return is_constrained(self._in_flight[-1])

    def token_masks(self) -> TokenMasks | None:
        """Return the masks for the newest step. It must be the only step in flight."""
        return token_masks(self._in_flight[-1])

    def _preempt_for_fairness(self) -> None:
        """Preempt a sequence for fairness, if the first waiting sequence cannot start otherwise.

        This must happen before anything is scheduled, because the blocks that a step fills are
        registered, and can be found, as soon as the step is scheduled. The victim does not start
        again in the same step, because there is no room for both sequences.
        """
        if not self._waiting:
            return
        head = self._waiting.first()
        victim = self._waiting.find_victim(head, self._running.values())
        if victim is not None and not self._admission.can_start(head):
            self._preempt(victim)

    def _schedule_running(self, step: StepBuilder) -> bool:
        """Schedule running sequences; return True if one was preempted for lack of blocks."""
        num_preemptions = self.counters.num_preemptions
        self._continue_decodes(step)
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        continued = set(step.continued)
        if len(continued) < len(self._running):
            for seq in self._running.values():
                if seq in continued or seq.num_draft_tokens > 0 or awaits_last_token(seq):
                    continue
                (decodes if seq.num_uncomputed_tokens == 1 else prefills).append(seq)
            # Those first that could be continued, in their order: blocks are freed, and evicted, in
            # the order of the step.
            first = filter(_can_be_continued, self._decodes)
            places = {seq: i for i, seq in enumerate(first)}
            decodes.sort(key=lambda seq: (not seq.can_continue, places.get(seq, len(places))))
        drafts = self._drafts(decodes, max(0, step.budget - len(decodes)))
        for seq in decodes:
            if seq.seq_id not in drafts or not self._speculate(seq, step, drafts[seq.seq_id]):
                self._continue(seq, step)
        for seq in sorted(prefills, key=self._waiting.priority_key):
            if self.counters.num_preemptions == num_preemptions:
                self._admit_waiting(step, before=seq)
            self._continue(seq, step)
        return self.counters.num_preemptions > num_preemptions

    def _continue_decodes(self, step: StepBuilder) -> None:
        """Continue the decodes of the previous step, without a slice for each of them.

        The step is the same as with slices. It depends on the order of sequences only if there is
        too little room for a token of each, and then no decode is continued.
        """
        num_running = len(self._running)
        num_blocks = 2 * self.kv.num_groups * num_running  # copies included
        has_room = step.budget >= num_running and self.kv.pool.num_free >= num_blocks
        if not has_room or self._drafter is not None:
            return
        continued: list[Sequence] = []
        entering: list[tuple[int, Sequence]] = []
        block_size = self.kv.block_size
        for seq in self._decodes:
            if _can_be_continued(seq):
                if seq.num_computed_tokens % block_size == 0:
                    entering.append((len(continued), seq))
                continued.append(seq)
        for _, seq in entering:
            self.kv.allocate_slots(seq, 1)
        step.continue_decodes(continued, entering)

    def _drafts(self, decodes: list[Sequence], budget: int) -> dict[int, list[int]]:
        """Return drafts by ``seq_id``, at most ``budget`` tokens over all sequences."""
        drafts: dict[int, list[int]] = {}
        if self._drafter is None:
            return drafts
        proposed = self._drafter.propose(filter(can_be_drafted, decodes), budget)
        for seq in decodes:
            num_useful = min(budget, max_draft_tokens(seq))
            draft = proposed.get(seq.seq_id, [])[:num_useful]
            if draft:
                drafts[seq.seq_id] = draft
                budget -= len(draft)
        # Attention is faster if the sequences with one token each come first.
        decodes.sort(key=lambda seq: seq.seq_id in drafts)
        return drafts

    def _speculate(self, seq: Sequence, step: StepBuilder, draft_token_ids: list[int]) -> bool:
        """Schedule the newest token of a sequence and drafts, if there are blocks for them."""
        if seq.status is not SequenceStatus.RUNNING:
            return False
        copies = self.kv.allocate_slots(seq, 1 + len(draft_token_ids))
        if copies is None:
            return False
        step.add(seq, 1, copies)
        step.add_drafts(seq, draft_token_ids)
        return True

    def _continue(self, seq: Sequence, step: StepBuilder) -> None:
        """Schedule as many tokens of a running sequence as the budget allows.

        If blocks run out, the sequence with the lowest priority is preempted, possibly this one.
        """
        num_tokens = min(seq.num_uncomputed_tokens, step.budget)
        while num_tokens > 0 and seq.status is SequenceStatus.RUNNING:
            copies = self.kv.allocate_slots(seq, num_tokens)
            if copies is not None:
                step.add(seq, num_tokens, copies)
                break
            victim = max(self._running.values(), key=lambda seq: seq.preemption_key)
            step.remove(victim)
            self._preempt(victim)

    def _admit_waiting(self, step: StepBuilder, before: Sequence | None = None) -> None:
        """Start waiting sequences; only those that come before ``before``, if it is given."""
        if not self._waiting:
            return
        admission = self._admission
        num_free_seqs, num_reserved = admission.num_free_seqs(), admission.num_reserved_blocks()
        while self._waiting and step.budget > 0:
            seq = self._waiting.first()
            key = self._waiting.priority_key
            if before is not None and key(seq) >= key(before):
                break
            if seq.num_output_placeholders > 0:  # preempted in this step: its last token is unknown
                break
            num_free_seqs -= admission.num_seqs(seq)
            if num_free_seqs < 0:
                break
            hits = admission.find_prefix(seq)
            num_tokens = admission.first_slice(seq, hits, step.budget)
            if num_tokens == 0 or not admission.has_room(seq, hits, num_reserved):
                break
            self._start(seq, hits)
            copies = self.kv.allocate_slots(seq, num_tokens)
            if copies is None:
                raise RuntimeError(f"sequence {seq.seq_id} was admitted without room")
            step.add(seq, num_tokens, copies)
            # Charged at once, because the next sequence may then be another tenant's.
            self._charge_prompt(seq, num_tokens)
            if before is None:  # no sequence of this step can be preempted any more
                # Later sequences of the same step may use the blocks that this one fills: every
                # layer writes the K and V of all its tokens before any of them attends.
                self._register(seq, num_tokens)

    def _start(self, seq: Sequence, hits: list[int]) -> None:
        """Move a sequence from the queue to the running ones; it starts after its prefix hits."""
        self._waiting.discard(seq)
        self.kv.take_prefix(seq, hits)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            seq.admitted_s = time.monotonic()
            self.counters.count_admission(seq)
        seq.status = SequenceStatus.RUNNING
        self._running[seq.seq_id] = seq

    def _charge_prompt(self, seq: Sequence, num_tokens: int) -> None:
        """Charge the prompt tokens in the next ``num_tokens`` tokens that were not yet charged."""
        end = min(seq.num_computed_tokens + num_tokens, seq.num_prompt_tokens)
        start = max(seq.num_computed_tokens, seq.num_charged_tokens)
        if end > start:
            self._waiting.charge(seq.request, PROMPT_TOKEN_COST * (end - start))
            seq.num_charged_tokens = end

    def _register_scheduled(self, step: StepBuilder) -> None:
        """Register the blocks that the decodes and prompts of running sequences fill."""
        last_place = self.kv.block_size - 1
        for seq in step.continued:
            if seq.num_computed_tokens % self.kv.block_size == last_place:
                self._register(seq, 1)
        for seq, num_tokens in step.slices():
            self._register(seq, num_tokens)

    def _register(self, seq: Sequence, num_tokens: int) -> None:
        """Register the blocks that the step fills, unless they contain a placeholder."""
        start = seq.num_computed_tokens
        if (start + num_tokens) // self.kv.block_size == start // self.kv.block_size:
            return
        end = min(start + num_tokens, seq.num_known_tokens)
        if end > start:
            self.kv.register_full_blocks(seq, start, end)

    def _preempt(self, seq: Sequence) -> None:
        """Return a running sequence to the queue; it recomputes its tokens when it starts again."""
        del self._running[seq.seq_id]
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        self._waiting.add(seq)
        self.counters.num_preemptions += 1

    # --- after a step was scheduled -------------------------------------------------------

    def _advance(self, step: StepBuilder) -> ScheduledStep:
        """Count the tokens of a step as computed, and add placeholders for those it samples."""
        for seq in step.continued:
            seq.num_computed_tokens += 1
            seq.token_ids.append(PLACEHOLDER)
            seq.num_output_placeholders += 1
        sampled = list(step.continued)
        prompts: list[tuple[Sequence, int]] = []
        for seq, num_tokens in step.slices():
            if seq.wants_prompt_logprobs:
                prompts.append((seq, seq.num_computed_tokens))
            if seq.num_charged_tokens < seq.num_prompt_tokens:
                self._charge_prompt(seq, num_tokens)
            seq.num_computed_tokens += num_tokens
            if seq.num_uncomputed_tokens == 0:
                seq.add_placeholder()
                sampled.append(seq)
                if seq.seq_id in self._siblings:
                    sampled += self._fork(seq)
                if seq.seq_id in step.drafts:
                    seq.add_drafts(len(step.drafts[seq.seq_id]))
        return ScheduledStep(sampled, len(step.continued), prompts, step.drafts)

    def _fork(self, seq: Sequence) -> list[Sequence]:
        """Start the other completions of a request whose prompt is computed."""
        siblings = self._siblings.pop(seq.seq_id)
        for sibling in siblings:
            self.kv.fork(seq, sibling)
            sibling.num_cached_tokens = seq.num_cached_tokens
            sibling.admitted_s = seq.admitted_s
            sibling.status = SequenceStatus.RUNNING
            self._running[sibling.seq_id] = sibling
            sibling.add_placeholder()
        return siblings

    # --- after a step ended ---------------------------------------------------------------

    def _take_continued(
        self, step: ScheduledStep, result: ModelRunnerOutput
    ) -> list[SequenceOutput]:
        """Add the tokens of a step to its continued decodes, as :meth:`_take` does.

        A continued decode has one new token, which is not its first, and nothing else. Few of these
        tokens end their sequence or fill a block.
        """
        outputs: list[SequenceOutput] = []
        finished, block_size = SequenceStatus.FINISHED, self.kv.block_size
        eos_token_ids = self.config.eos_token_ids
        num_tokens = 0
        continued = islice(step.sampled, step.num_continued)
        for seq, token_ids in zip(continued, result.token_ids, strict=False):
            if seq.status is finished:
                continue
            token_id, grammar = token_ids[0], seq.grammar
            end = len(seq.token_ids) - seq.num_output_placeholders + 1  # of the known tokens
            is_last = token_id in seq.end_token_ids or end >= seq.max_num_tokens
            if not is_last and grammar is not None:
                is_last = token_id in eos_token_ids or not grammar.accept(token_ids)
            if is_last:
                outputs.append(self._take(seq, token_ids, None))
                continue
            request = seq.request
            seq.token_ids[end - 1] = token_id
            seq.num_output_placeholders -= 1
            if end % block_size == 0 and seq.num_computed_tokens >= end:
                self.kv.register_full_blocks(seq, end - 1, end)
            self._waiting.charge(request, OUTPUT_TOKEN_COST)
            num_tokens += 1
            reason = None
            if grammar is not None:
                forced, reason = self._force(seq)
                token_ids = token_ids + forced if forced else token_ids
                if reason is not None:
                    self._finish(seq, reason)
            num_cached = seq.num_cached_tokens or 0
            outputs.append(
                SequenceOutput(request.request_id, seq.index, token_ids, reason, num_cached)
            )
        self.counters.num_generation_tokens += num_tokens
        return outputs

    def _take(
        self, seq: Sequence, token_ids: list[int], logprobs: list[TokenLogprobs] | None
    ) -> SequenceOutput:
        """Add the tokens of a step to a sequence, without those after the token that ends it."""
        start = seq.num_known_tokens
        is_first = seq.first_token_s is None
        token_ids, reason = cut_at_end(seq, token_ids)
        token_ids, reason = accept_tokens(seq, token_ids, reason, self.config.eos_token_ids)
        if token_ids:
            self._replace_placeholders(seq, token_ids)
        self.counters.num_generation_tokens += len(token_ids)
        self._waiting.charge(seq.request, OUTPUT_TOKEN_COST * len(token_ids))
        # Drafts that were right are computed, and so are the tokens of which the next step is in
        # flight already; both may fill a block. The last token of a sequence is never computed.
        end = min(seq.num_computed_tokens, start + len(token_ids) - (reason is not None))
        if end > start:
            self.kv.register_full_blocks(seq, start, end)
        if reason is None:
            forced, reason = self._force(seq)
            token_ids = token_ids + forced
        if reason is not None:
            self._finish(seq, reason)
        prompt_logprobs, seq.prompt_logprobs = seq.prompt_logprobs, None
        return SequenceOutput(
            seq.request.request_id,
            seq.index,
            token_ids,
            reason,
            seq.num_cached_tokens or 0,
            None if logprobs is None else logprobs[: len(token_ids)],
            prompt_logprobs,
            seq.times if is_first else None,
        )

    def _end_prompt(self, seq: Sequence, pooled: bytes) -> SequenceOutput:
        """End a sequence that asks for an embedding, as its prompt is computed."""
        seq.first_token_s = time.monotonic()
        self._finish(seq, FinishReason.STOP)
        return SequenceOutput(
            seq.request.request_id,
            seq.index,
            [],
            FinishReason.STOP,
            seq.num_cached_tokens or 0,
            times=seq.times,
            pooled=pooled,
        )

    def _replace_placeholders(self, seq: Sequence, token_ids: list[int]) -> None:
        # The queue counts the tokens of a waiting sequence. Wrong drafts change their number if the
        # sequence was preempted while their step was in flight.
        recount = seq.num_draft_tokens > 0 and seq.status is SequenceStatus.WAITING
        if recount:
            self._waiting.discard(seq)
        seq.take_tokens(token_ids)
        if recount:
            self._waiting.add(seq)

    def _force(self, seq: Sequence) -> tuple[list[int], FinishReason | None]:
        """Append the tokens that a grammar forces, so that one step can compute all of them.

        Returns:
            The tokens, and the finish reason if they end the sequence.
        """
        if seq.grammar is None or not can_be_forced(seq):
            return [], None
        forced = seq.grammar.forced_token_ids()
        if not forced:
            return [], None
        token_ids, reason = cut_at_end(seq, forced)
        token_ids, reason = accept_tokens(seq, token_ids, reason, self.config.eos_token_ids)
        seq.add_tokens(token_ids)
        self.counters.num_forced_tokens += len(token_ids)
        self.counters.num_generation_tokens += len(token_ids)
        self._waiting.charge(seq.request, OUTPUT_TOKEN_COST * len(token_ids))
        return token_ids, reason

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        self._waiting.discard(seq)
        self._running.pop(seq.seq_id, None)
        self._siblings.pop(seq.seq_id, None)
        self._release(seq)
        seq.status = SequenceStatus.FINISHED
        self._num_constrained -= seq.grammar is not None
        self.counters.count_end(seq, reason)
        unfinished = self._by_request[seq.request.request_id]
        unfinished.remove(seq)
        if not unfinished:
            del self._by_request[seq.request.request_id]
            self._waiting.close(seq.request)

    def _release(self, seq: Sequence) -> None:
        # A step in flight may still write to these blocks; their next owner writes later.
        self.kv.release(seq)
        seq.num_sent_tokens = 0
        self._freed_seq_ids.append(seq.seq_id)

    # --- state ----------------------------------------------------------------------------

    def num_waiting_of(self, tenant: str) -> int:
        """Number of waiting sequences of a tenant."""
        return self._waiting.num_waiting_of(tenant)

    def queue_state(self) -> QueueState:
        """Return the waiting sequences and tokens, and how many more sequences could run."""
        num_free_seqs = max(0, self.config.max_num_seqs - len(self._running))
        return QueueState(len(self._waiting), self._waiting.num_tokens, num_free_seqs)

    def stats(self) -> EngineStats:
        """Return the counters and gauges for the metrics."""
        return self.counters.snapshot(self.kv, len(self._waiting), self._running.values())

    def view(self) -> EngineView:
        """Return the unfinished sequences and cached blocks, in time that grows with the pool."""
        return EngineView(
            block_size=self.kv.block_size,
            num_blocks=self.kv.pool.num_blocks,
            sequences=[_view(seq) for seqs in self._by_request.values() for seq in seqs],
            cached_block_ids=self.kv.pool.cached_block_ids(),
        )

    def check_empty(self) -> None:
        """Check that no sequence and no used block is left; takes constant time.

        Call this only when all requests have ended.

        Raises:
            RuntimeError: a block leaked, or a sequence was lost.
        """
        left = {
            "blocks": self.kv.pool.num_used,
            "running sequences": len(self._running),
            "waiting sequences": len(self._waiting),
            "siblings": len(self._siblings),
        }
        if any(left.values()):
            raise RuntimeError(f"no request is open, but there are still {left}")

    def check_invariants(self) -> None:
        """Check the queue, the pool and all block tables; takes time that grows with the pool.

        Raises:
            RuntimeError: a block leaked or belongs to the wrong sequence, or a sequence is lost.
        """
        for seq in self._waiting:
            if seq.block_ids:
                raise RuntimeError(f"waiting sequence {seq.seq_id} owns blocks")
        self._waiting.check_invariants()
        if not all(id_ in self._waiting or id_ in self._running for id_ in self._siblings):
            raise RuntimeError("siblings wait for a sequence that has ended")
        self.kv.check_invariants(self._running.values())


def _can_be_continued(seq: Sequence) -> bool:
    """Return True if a decode of the previous step computes a token that the worker lacks."""
    num_tokens, num_placeholders = len(seq.token_ids), seq.num_output_placeholders
    return (
        seq.status is SequenceStatus.RUNNING
        and num_tokens == seq.num_computed_tokens + 1
        and num_tokens == seq.num_sent_tokens + num_placeholders + 1
        and (num_placeholders == 0 or num_tokens < seq.max_num_tokens)
    )


def _view(seq: Sequence) -> SequenceView:
    return SequenceView(
        request_id=seq.request.request_id,
        index=seq.index,
        status=seq.status.name.lower(),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_tokens=seq.num_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        block_ids=[block_id for block_id in seq.block_ids if block_id != NULL_BLOCK],
    )
