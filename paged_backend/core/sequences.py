"""The unfinished sequences of an engine, and what becomes of them: they wait, run and end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from paged_backend.core.beams import BeamSearch
from paged_backend.core.block_pool import NULL_BLOCK
from paged_backend.core.compiling import Progress
from paged_backend.core.counters import EngineCounters
from paged_backend.core.fairness.fair_queue import FairQueue
from paged_backend.core.fairness.tenant_queue import OUTPUT_TOKEN_COST, PROMPT_TOKEN_COST
from paged_backend.core.grammar import Grammar
from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.sequence import Sequence, SequenceStatus
from paged_backend.core.sequence_grammar import GrammarWork, SequenceGrammar
from paged_backend.core.stopping import EndConditions
from paged_backend.values.outputs import (
    EngineView,
    FinishReason,
    SequenceOutput,
    SequenceView,
    TokenLogprobs,
)
from paged_backend.values.request import Request


@dataclass(slots=True)
class BeamGroup:
    """The beams of a request.

    All but the ``live`` ones own no block and are in no queue, until a live beam has several
    continuations.
    """

    search: BeamSearch
    sequences: list[Sequence]  # as many as the width
    num_sent: int  # output tokens that the client has
    live: list[Sequence] = field(init=False)  # in the order of the search's beams
    candidates: dict[int, TokenLogprobs] = field(default_factory=dict)  # by seq_id, of live beams

    def __post_init__(self) -> None:
        self.live = self.sequences[:1]


class Sequences:
    """The waiting and running sequences. Only the engine's thread uses them.

    Args:
        kv: the KV cache manager with the pool of blocks.
        waiting: the queue of waiting sequences.
        counters: counts admissions, preemptions, generated tokens and ends.

    Attributes:
        waiting: the queue of waiting sequences.
        running: running sequences by ``seq_id``, in the order of admission.
        held: started sequences, by ``seq_id``, whose next mask another thread computes. They keep
            their blocks, and are in no step meanwhile.
        grammar_work: the work on grammars.
        siblings: completions 2..n of a request, by the ``seq_id`` of the first one. They wait
            for its prompt to be computed. Those without room then wait in the queue.
        freed_seq_ids: the sequences that have lost their blocks since the scheduler took this list.
        num_constrained: number of unfinished sequences with a grammar.
        beam_groups: the beams of requests with beam search, by the id of the request.
    """

    def __init__(self, kv: KVCacheManager, waiting: FairQueue, counters: EngineCounters) -> None:
        self._kv = kv
        self._counters = counters
        self.waiting = waiting
        self.running: dict[int, Sequence] = {}
        self.held: dict[int, Sequence] = {}
        self.grammar_work = GrammarWork()
        self.siblings: dict[int, list[Sequence]] = {}
        self.freed_seq_ids: list[int] = []
        self.num_constrained = 0
        self.beam_groups: dict[str, BeamGroup] = {}
        self._by_request: dict[str, list[Sequence]] = {}  # request_id -> unfinished sequences
        self._next_seq_id = 0

    def __bool__(self) -> bool:
        return bool(self._by_request)

    def of(self, request_id: str) -> list[Sequence]:
        """Return the unfinished sequences of a request; none for an unknown id."""
        return list(self._by_request.get(request_id, ()))

    @property
    def adapters(self) -> set[str]:
        """The digests of the LoRA adapters that unfinished sequences have."""
        return {seq.request.adapter for seqs in self._by_request.values() for seq in seqs} - {""}

    def adapter_names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the LoRA adapters of started sequences, and of waiting ones."""
        running, waiting = (
            {seq.request.lora.lora_name for seq in seqs if seq.request.lora is not None}
            for seqs in (self.started, self.waiting)
        )
        return tuple(sorted(running)), tuple(sorted(waiting))

    # --- from the queue to the end --------------------------------------------------------

    def add(
        self,
        request: Request,
        seed: int,
        ends: EndConditions,
        progress: Progress = (),
        grammars: Mapping[int, Grammar] | None = None,
    ) -> None:
        """Queue the completions of a request; see :meth:`Scheduler.add_request`.

        Raises:
            ValueError: an unfinished request has the same id.
        """
        if request.request_id in self._by_request:
            raise ValueError(f"request id {request.request_id} is already in use")
        if request.params.beam_width > 1:
            self._add_beams(request, seed, ends, progress)
            return
        if request.params.seed is not None:
            seed = request.params.seed
        resumed = any(tokens is None or tokens for tokens in progress)
        account = self.grammar_work.account(request.request_id)

        def constraint(index: int, tokens: Iterable[int]) -> SequenceGrammar | None:
            if grammars is None:
                return None
            return SequenceGrammar(grammars[index], account, self.grammar_work, tokens)

        completions = [
            Sequence(
                *(self._next_seq_id + index, request, index, seed, *ends),
                *(tokens, constraint(index, tokens)),
            )
            for index, tokens in enumerate(progress if resumed else [()] * request.params.n)
            if tokens is not None
        ]
        self._next_seq_id += request.params.n
        self.num_constrained += sum(seq.grammar is not None for seq in completions)
        self._by_request[request.request_id] = completions
        self.waiting.open(request)
        if resumed:  # each completion has its own tokens already
            for completion in completions:
                self.waiting.add(completion)
            return
        first, *siblings = completions
        if siblings:
            self.siblings[first.seq_id] = siblings
        self.waiting.add(first)

    def _add_beams(
        self, request: Request, seed: int, ends: EndConditions, progress: Progress
    ) -> None:
        """Queue the first beam of a request.

        A search that a previous engine process began starts again from the prompt. It finds the
        same beams, so that it ends with the tokens that were sent already.
        """
        width = request.params.beam_width
        beams = [
            Sequence(self._next_seq_id + index, request, index, seed, *ends)
            for index in range(width)
        ]
        self._next_seq_id += width
        max_tokens = ends.max_num_tokens - len(request.prompt_token_ids)
        search = BeamSearch(request.params, ends.token_ids, max_tokens)
        for beam in beams:
            beam.num_candidates = search.num_candidates
        num_sent = max((len(list(tokens or ())) for tokens in progress), default=0)
        self.beam_groups[request.request_id] = BeamGroup(search, beams, num_sent)
        self._by_request[request.request_id] = beams.copy()
        self.waiting.open(request)
        self.waiting.add(beams[0])

    def start(self, seq: Sequence, hits: list[int]) -> None:
        """Move a sequence from the queue to the running ones; it starts after its prefix hits."""
        self.waiting.discard(seq)
        self._kv.take_prefix(seq, hits)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            self._counters.count_admission(seq)
        if seq.admitted_s is None and seq.num_output_tokens == 0:
            seq.admitted_s = time.monotonic()
        seq.status = SequenceStatus.RUNNING
        self.running[seq.seq_id] = seq

    def queue_siblings(self, seq: Sequence, num_places: int) -> None:
        """Queue the siblings of a sequence for which there is no room, before it forks.

        They start later as sequences of their own, after the prompt's cached blocks. Prompt tokens
        that are not cached any more are computed again, and charged again.

        Args:
            seq: the first completion of a request.
            num_places: number of siblings for which there is room.
        """
        siblings = self.siblings.get(seq.seq_id, [])
        for sibling in siblings[num_places:]:
            sibling.num_cached_tokens = seq.num_cached_tokens
            self.waiting.add(sibling)
        del siblings[num_places:]

    def fork(self, seq: Sequence) -> list[Sequence]:
        """Start and return the other completions of a request after its prompt was computed."""
        siblings = self.siblings.pop(seq.seq_id, [])
        for sibling in siblings:
            self._kv.fork(seq, sibling)
            sibling.num_cached_tokens = seq.num_cached_tokens
            sibling.admitted_s = seq.admitted_s
            sibling.status = SequenceStatus.RUNNING
            self.running[sibling.seq_id] = sibling
        return siblings

    def fork_beam(self, parent: Sequence, child: Sequence) -> None:
        """Let an unused beam continue from the computed tokens of a running one."""
        self._kv.fork(parent, child)
        child.status = SequenceStatus.RUNNING
        self.running[child.seq_id] = child

    def preempt(self, seq: Sequence) -> None:
        """Return a running sequence to the queue; it recomputes its tokens when it starts again.

        A beam with candidates returns to the queue only if it goes on after the comparison.
        """
        self.park(seq)
        if not seq.awaits_beams:
            self.waiting.add(seq)
        self._counters.num_preemptions += 1

    def park(self, seq: Sequence) -> None:
        """Take a running sequence out of the steps, and free its blocks."""
        self._remove(seq)
        self._release(seq)
        seq.status = SequenceStatus.WAITING

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence, and free its blocks."""
        self.waiting.discard(seq)
        self._remove(seq)
        self.siblings.pop(seq.seq_id, None)
        self._release(seq)
        seq.status = SequenceStatus.FINISHED
        if seq.grammar is not None:
            self.num_constrained -= 1
            seq.grammar.close()
        if seq.index < seq.request.params.n:  # there may be more beams than answers
            self._counters.count_end(seq, reason)
        unfinished = self._by_request[seq.request.request_id]
        unfinished.remove(seq)
        if not unfinished:
            del self._by_request[seq.request.request_id]
            self.beam_groups.pop(seq.request.request_id, None)
            self.waiting.close(seq.request)

    def hold(self, seq: Sequence) -> None:
        """Take a running sequence out of the steps; the worker forgets it, but not its blocks."""
        del self.running[seq.seq_id]
        self.held[seq.seq_id] = seq
        self._forget(seq)

    def unhold(self, seq: Sequence) -> None:
        """Let a sequence that was held run again."""
        del self.held[seq.seq_id]
        self.running[seq.seq_id] = seq

    @property
    def started(self) -> list[Sequence]:
        """The sequences with blocks: the running ones and the held ones."""
        return [*self.running.values(), *self.held.values()]

    def abort(
        self, request_id: str, reason: FinishReason = FinishReason.ABORT, problem: str = ""
    ) -> list[SequenceOutput]:
        """End a request; returns a final output for each of its unfinished completions."""
        outputs: list[SequenceOutput] = []
        for seq in self.of(request_id):
            num_cached = seq.num_cached_tokens or 0
            if seq.index < seq.request.params.n:  # there may be more beams than answers
                outputs.append(
                    SequenceOutput(request_id, seq.index, [], reason, num_cached, problem=problem)
                )
            self.finish(seq, reason)
        return outputs

    def _remove(self, seq: Sequence) -> None:
        self.running.pop(seq.seq_id, None)
        self.held.pop(seq.seq_id, None)

    def _release(self, seq: Sequence) -> None:
        # A step in flight may still write to these blocks; their next owner writes later.
        self._kv.release(seq)
        self._forget(seq)

    def _forget(self, seq: Sequence) -> None:
        seq.num_sent_tokens = 0
        self.freed_seq_ids.append(seq.seq_id)

    # --- tokens ---------------------------------------------------------------------------

    def charge_prompt(self, seq: Sequence, num_tokens: int) -> None:
        """Charge the prompt tokens in the next ``num_tokens`` tokens that were not yet charged."""
        end = min(seq.num_computed_tokens + num_tokens, seq.num_prompt_tokens)
        start = max(seq.num_computed_tokens, seq.num_charged_tokens)
        if end > start:
            self.waiting.charge(seq.request, PROMPT_TOKEN_COST * (end - start))
            seq.num_charged_tokens = end

    def charge_output(self, seq: Sequence, num_tokens: int) -> None:
        """Charge and count new output tokens."""
        self._counters.num_generation_tokens += num_tokens
        self.waiting.charge(seq.request, OUTPUT_TOKEN_COST * num_tokens)

    def charge_decodes(self, requests: list[Request]) -> None:
        """Charge and count one output token of each of these open requests."""
        self._counters.num_generation_tokens += len(requests)
        self.waiting.charge_each(requests, OUTPUT_TOKEN_COST)

    def take_tokens(self, seq: Sequence, token_ids: list[int], num_drafts: int = 0) -> None:
        """Replace the placeholders of the earliest step in flight with its tokens.

        A state after wrong drafts is dropped, so that the right ones are computed again.

        Args:
            seq: the sequence.
            token_ids: the tokens.
            num_drafts: number of drafts of that step.
        """
        # The queue counts the tokens of a waiting sequence. Wrong drafts change their number if the
        # sequence was preempted while their step was in flight.
        recount = num_drafts > 0 and seq.status is SequenceStatus.WAITING
        if recount:
            self.waiting.discard(seq)
        seq.take_tokens(token_ids, num_drafts)
        if num_drafts > 0 and seq.states:
            self._kv.rewind(seq)
        if recount:
            self.waiting.add(seq)

    # --- state ----------------------------------------------------------------------------

    def view(self) -> EngineView:
        """Return the unfinished sequences and cached blocks, in time that grows with the pool."""
        return EngineView(
            block_size=self._kv.block_size,
            num_blocks=self._kv.pool.num_blocks,
            sequences=[_view(seq) for seqs in self._by_request.values() for seq in seqs],
            cached_block_ids=self._kv.pool.cached_block_ids(),
        )

    def check_empty(self) -> None:
        """Check that no sequence and no used block is left; takes constant time.

        Raises:
            RuntimeError: a block leaked, or a sequence was lost.
        """
        left = {
            "blocks": self._kv.pool.num_used,
            "running sequences": len(self.started),
            "waiting sequences": len(self.waiting),
            "siblings": len(self.siblings),
        }
        if any(left.values()):
            raise RuntimeError(f"no request is open, but there are still {left}")

    def check_invariants(self) -> None:
        """Check the queue, the pool and all block tables; takes time that grows with the pool.

        Raises:
            RuntimeError: a block leaked or belongs to the wrong sequence, or a sequence is lost.
        """
        for seq in self.waiting:
            if seq.block_ids:
                raise RuntimeError(f"waiting sequence {seq.seq_id} owns blocks")
        self.waiting.check_invariants()
        if not all(id_ in self.waiting or id_ in self.running for id_ in self.siblings):
            raise RuntimeError("siblings wait for a sequence that has ended")
        self._kv.check_invariants(self.started)


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
