"""Decides, step by step, which tokens of which sequences are computed.

The techniques come from three papers:

- Iteration-level scheduling: Orca (Yu et al., OSDI 2022, section 3.2).
- One token budget for decodes and chunks of prompts: SARATHI (Agrawal et al., 2023, section 4).
- Preemption by recomputation: PagedAttention (Kwon et al., SOSP 2023, section 4.5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set

from paged_backend.core.admission import Admission, keeps_place
from paged_backend.core.compiling import Progress
from paged_backend.core.constraints import (
    GrammarGuide,
    hold_and_go_on,
    is_constrained,
    lacks_drafts,
    token_masks,
)
from paged_backend.core.counters import EngineCounters
from paged_backend.core.drafter import Draft, Drafter
from paged_backend.core.drafting import Drafting
from paged_backend.core.fairness.fair_queue import FairQueue
from paged_backend.core.grammar import Grammar
from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.scheduler_output import (
    DraftGuide,
    DrawnDrafts,
    ModelRunnerOutput,
    SchedulerOutput,
    TokenMasks,
)
from paged_backend.core.sequence import Sequence, SequenceStatus
from paged_backend.core.sequences import Sequences
from paged_backend.core.starting import Starting
from paged_backend.core.step import ScheduledStep, StepBuilder, can_be_continued
from paged_backend.core.step_results import StepResults
from paged_backend.core.stopping import EndConditions, must_wait
from paged_backend.values.outputs import (
    EngineStats,
    EngineView,
    FinishReason,
    QueueState,
    SequenceOutput,
)
from paged_backend.values.request import Request


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
        waiting: FairQueue,
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self.kv = kv
        self.counters = EngineCounters()
        self.sequences = Sequences(kv, waiting, self.counters)
        self._results = StepResults(kv, self.sequences, self.counters, config)
        self._admission = Admission(config, kv, self.sequences.running, self.sequences.held)
        self._starting = Starting(kv, self.sequences, self._admission)
        self._drafting = Drafting(config, kv, self.sequences, drafter)
        self._early: list[SequenceOutput] = []  # final outputs of requests that ended on arrival
        self._in_flight: deque[ScheduledStep] = deque()
        self._decodes: list[Sequence] = []  # decodes of the newest step; the next may continue them

    # --- requests -------------------------------------------------------------------------

    def add_request(
        self,
        request: Request,
        seed: int,
        progress: Progress = (),
        grammars: Mapping[int, Grammar] | None = None,
    ) -> None:
        """Queue a request, unless too little of its prompt is cached (``cache_hit_threshold``).

        Args:
            request: the request, which the front end has checked.
            seed: seed for sampling if the request has none.
            progress: the tokens that a previous engine process generated for each completion, None
                for a completion that has ended. The completions continue after these tokens.
            grammars: grammars by index of the completion, if the output is constrained. They are at
                the start of the output.

        Raises:
            ValueError: an unfinished request has the same id.
        """
        ends = EndConditions.of(request, self.config)
        self.sequences.add(request, seed, ends, progress, grammars)
        if request.cache_hit_threshold > 0 and not progress:
            self._end_if_not_cached(request)

    def stop_completion(self, request_id: str, index: int) -> None:
        """End a completion because its text reached a stop string.

        The call is ignored if the completion is unknown, has ended, or has no output token yet. A
        placeholder counts as an output token.
        """
        for seq in self.sequences.of(request_id):
            if index == seq.index and seq.num_output_tokens > 0:
                self.sequences.finish(seq, FinishReason.STOP)

    def cancel_request(self, request_id: str) -> list[SequenceOutput]:
        """End a request, and return a final output for each of its unfinished completions.

        There are none for an unknown id, because a request can end before this call arrives.
        """
        early = [output for output in self._early if output.request_id == request_id]
        self._early = [output for output in self._early if output.request_id != request_id]
        return early + self.sequences.abort(request_id)

    def is_open(self, request_id: str) -> bool:
        """Return True if a completion of the request has not had its final output yet."""
        is_early = any(output.request_id == request_id for output in self._early)
        return is_early or bool(self.sequences.of(request_id))

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is unfinished, or its final output was not taken yet."""
        return bool(self.sequences) or bool(self._early)

    # --- one step -------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Schedule a step: decodes, then prompts of running sequences, then waiting sequences.

        A waiting sequence starts before a running sequence continues its prompt if it has a higher
        priority. If the priorities are equal, it does so if its tenant received less service. After
        a preemption for lack of blocks, no waiting sequence starts in the rest of the step.

        The output is empty if nothing can be scheduled until a step in flight returns its tokens,
        or another thread a mask.

        Raises:
            RuntimeError: nothing can be scheduled, although requests are unfinished and no step is
                in flight.
        """
        if self.sequences.num_constrained:
            self.sequences.grammar_work.begin_step()
            hold_and_go_on(self.sequences, self._admission)
        step = StepBuilder(
            self.config.max_num_batched_tokens,
            self._decodes,
            sends_predictions=self._drafting.sends_predictions,
        )
        if self.kv.states is not None:
            self.kv.states.num_started = len(self.sequences.started)
        self.kv.free_invisible_blocks(self.sequences.running.values())
        self._preempt_for_fairness()
        preempted = self._schedule_running(step)
        step.register_blocks(self.kv)
        if not preempted:
            self._starting.admit_waiting(step)
        self._starting.queue_siblings(step)
        output = step.build(self.sequences.siblings, self.sequences.freed_seq_ids, self.kv)
        if output.num_sequences:
            self._decodes = step.decodes
            self.sequences.freed_seq_ids = []
            self.counters.num_steps += 1
            self._in_flight.append(self._results.expect(step))
        elif not self._in_flight and self._preempt_idle_beam():
            return self.schedule()
        elif self.sequences and not (self._in_flight or self.sequences.held):
            raise RuntimeError("sequences are unfinished but none can be scheduled")
        return output

    def update_from_output(self, result: ModelRunnerOutput) -> list[SequenceOutput]:
        """Apply the output of the earliest step in flight to the sequences of that step.

        Returns:
            The new tokens of each sequence that sampled and has not ended in the meantime, and the
            finish reason if they end it.
        """
        return self._results.apply(self._in_flight.popleft(), result)

    def draft_guide(self) -> DraftGuide | None:
        """Return what tells which drafts of the newest step grammars allow; None without any."""
        if not (self.sequences.num_constrained and self._in_flight and self._in_flight[-1].drafts):
            return None
        guide = GrammarGuide(self._in_flight[-1])
        return guide if guide.is_needed else None

    def take_drafts(self, drawn: DrawnDrafts) -> None:
        """Take the drafts of the newest step that the worker has drawn."""
        self._drafting.take(self._in_flight[-1], drawn)

    @property
    def masks_need_drafts(self) -> bool:
        """True if masks for the newest step depend on drafts that are not known yet."""
        return lacks_drafts(self._in_flight[-1])

    @property
    def is_constrained(self) -> bool:
        """True if a sequence in the newest step has a grammar, so that sampling needs masks."""
        if not (self.sequences.num_constrained and self._in_flight):
            return False
        return is_constrained(self._in_flight[-1])

    def token_masks(self, greedy_token_ids: Mapping[int, int]) -> TokenMasks | None:
        """Return the masks for the newest step, which must be the only one in flight.

        Args:
            greedy_token_ids: tokens from `LaunchedStep`. Samples with an allowed token get no
                mask.
        """
        step, work = self._in_flight[-1], self.sequences.grammar_work
        work.time.begin_masks()
        masks, unknown = token_masks(step, greedy_token_ids)
        work.time.begin_tokens()
        for seq in unknown:
            step.dropped_seq_ids.add(seq.seq_id)
            seq.drop_samples()
            self.kv.rewind(seq)
            self.sequences.hold(seq)
        return masks

    def end_early(self) -> list[SequenceOutput]:
        """Return final outputs of requests that end without a step.

        Their prompts were not cached, or their grammars take too much time or have failed.
        """
        outputs, self._early = self._early, []
        for account in self.sequences.grammar_work.take_failed():
            outputs += self.sequences.abort(account.request_id, FinishReason.ERROR, account.problem)
        return outputs

    def wait_for_mask(self, timeout_s: float) -> None:
        """Wait until another thread has computed a mask, if nothing else can be done."""
        self.sequences.grammar_work.thread.wait(timeout_s)

    def _end_if_not_cached(self, request: Request) -> None:
        """End a request that was just queued if too little of its prompt is cached."""
        completions = self.sequences.of(request.request_id)
        first = completions[0]
        num_cached = self.kv.num_hit_tokens(self._admission.find_prefix(first))
        if num_cached >= request.cache_hit_threshold * first.num_prompt_tokens:
            return
        for seq in completions:
            seq.num_cached_tokens = num_cached
        self._early += self.sequences.abort(request.request_id, FinishReason.CACHE_THRESHOLD)

    def _preempt_for_fairness(self) -> None:
        """Preempt a sequence for fairness, if the first waiting sequence cannot start otherwise.

        This must happen before anything is scheduled, because the blocks that a step fills are
        registered, and can be found, as soon as the step is scheduled. The victim does not start
        again in the same step, because there is no room for both sequences.
        """
        if not self.sequences.waiting:
            return
        head = self.sequences.waiting.first()
        victim = self.sequences.waiting.find_victim(head, self.sequences.started)
        if victim is None or not self._admission.has_adapter_place(head):
            return  # no victim, or one that would not make room for another adapter
        if not self._admission.can_start(head):
            self.sequences.preempt(victim)

    def _preempt_idle_beam(self) -> bool:
        """Preempt a beam that waits for other beams, for which there is no room beside it.

        Nothing else can be scheduled. Its candidates are known already, so the search goes on.
        """
        idle = [seq for seq in self.sequences.running.values() if seq.awaits_beams]
        if idle:
            self.sequences.preempt(max(idle, key=lambda seq: seq.preemption_key))
        return bool(idle)

    def _schedule_running(self, step: StepBuilder) -> bool:
        """Schedule running sequences; return True if one was preempted for lack of blocks."""
        num_preemptions = self.counters.num_preemptions
        awaiting = self._drafting.awaiting()
        drafts = self._drafting.drafts(awaiting)
        self._continue_decodes(step, drafts.keys() | awaiting)
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        continued = set(step.continued)
        if len(continued) < len(self.sequences.running):
            for seq in self.sequences.running.values():
                if seq in continued or must_wait(seq, self._drafting.may_follow_drafts(seq)):
                    continue
                if seq.seq_id in awaiting:
                    continue
                (decodes if seq.num_uncomputed_tokens == 1 else prefills).append(seq)
            # Continuable decodes come first, in the order of the previous step, because blocks are
            # freed, and evicted, in the order of the step.
            first = filter(can_be_continued, self._decodes)
            places = {seq: i for i, seq in enumerate(first)}
            decodes.sort(key=lambda seq: (not seq.can_continue, places.get(seq, len(places))))
        # Attention is faster if the sequences with one token each come first. The next step may
        # continue the first of them, as far as their positions are known.
        decodes.sort(key=lambda seq: (seq.seq_id in drafts, seq.num_draft_tokens > 0))
        for seq in decodes:
            if seq.seq_id not in drafts or not self._speculate(seq, step, drafts[seq.seq_id]):
                self._continue(seq, step)
        for seq in sorted(prefills, key=self.sequences.waiting.priority_key):
            if self.counters.num_preemptions == num_preemptions:
                self._starting.admit_waiting(step, before=seq)
            self._continue(seq, step)
        return self.counters.num_preemptions > num_preemptions

    def _continue_decodes(self, step: StepBuilder, others: Set[int]) -> None:
        """Continue the decodes of the previous step but for `others`, without a slice for each.

        The step is the same as with slices. It depends on the order of sequences only if there is
        too little room for a token of each, and then no decode is continued.
        """
        num_running = len(self.sequences.running)
        num_blocks = 2 * self.kv.num_groups * num_running  # copies included
        if step.budget < num_running or self.kv.pool.num_free < num_blocks:
            return
        continued: list[Sequence] = []
        entering: list[tuple[int, Sequence]] = []
        block_size = self.kv.block_size
        for seq in self._decodes:
            if can_be_continued(seq) and seq.seq_id not in others:
                if seq.num_computed_tokens % block_size == 0:
                    entering.append((len(continued), seq))
                continued.append(seq)
        for _, seq in entering:
            self.kv.allocate_slots(seq, 1)
        step.continue_decodes(continued, entering)

    def _speculate(self, seq: Sequence, step: StepBuilder, draft: Draft) -> bool:
        """Schedule the newest token of a sequence and a draft, if there are blocks for them."""
        if seq.status is not SequenceStatus.RUNNING:
            return False
        copies = self.kv.allocate_slots(seq, 1 + len(draft.token_ids))
        if copies is None:
            return False
        step.add(seq, 1, copies)
        step.add_draft(seq, draft)
        return True

    def _continue(self, seq: Sequence, step: StepBuilder) -> None:
        """Schedule as many tokens of a running sequence as the budget allows.

        If blocks run out, the sequence with the lowest priority is preempted, possibly this one.
        """
        num_tokens = min(seq.num_uncomputed_tokens, step.budget)
        num_tokens = self.kv.cut_chunk(seq, seq.num_computed_tokens, num_tokens)
        while num_tokens > 0 and seq.status is SequenceStatus.RUNNING:
            copies = self.kv.allocate_slots(seq, num_tokens)
            if copies is not None:
                step.add(seq, num_tokens, copies)
                break
            victim = max(self.sequences.started, key=lambda seq: seq.preemption_key)
            step.remove(victim)
            self.sequences.preempt(victim)

    # --- state ----------------------------------------------------------------------------

    def num_waiting_of(self, tenant: str) -> int:
        """Number of waiting requests of a tenant."""
        return self.sequences.waiting.num_waiting_of(tenant)

    def queue_state(self) -> QueueState:
        """Return the waiting sequences and tokens, and how many more sequences could run."""
        num_busy = len(self.sequences.running) + sum(map(keeps_place, self.sequences.held.values()))
        num_free_seqs = max(0, self.config.max_num_seqs - num_busy)
        return QueueState(
            self.sequences.waiting.num_requests, self.sequences.waiting.num_tokens, num_free_seqs
        )

    def stats(self) -> EngineStats:
        """Return the counters and gauges for the metrics."""
        return self.counters.snapshot(self.kv, len(self.sequences.waiting), self.sequences.started)

    def view(self) -> EngineView:
        """Return the unfinished sequences and cached blocks, in time that grows with the pool."""
        return self.sequences.view()

    def check_empty(self) -> None:
        """Check that no sequence and no used block is left; takes constant time.

        Call this only when all requests have ended.

        Raises:
            RuntimeError: a block leaked, or a sequence was lost.
        """
        self.sequences.check_empty()

    def check_invariants(self) -> None:
        """Check the queue, the pool and all block tables; takes time that grows with the pool.

        Raises:
            RuntimeError: a block leaked or belongs to the wrong sequence, or a sequence is lost.
        """
        self.sequences.check_invariants()
