"""A scheduler over a pool whose blocks hold token ids instead of K and V.

What a sequence would attend to is read through its block table, so a wrong block, a missed copy
or a stale cache shows as a wrong token. The worker's side knows encoded messages alone. With
`async_scheduling` a step is scheduled before the tokens of the previous one are known, as on a
device that must never wait.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace

import numpy as np

from paged_backend.core.block_pool import NULL_BLOCK, BlockPool
from paged_backend.core.drafter import Draft, Drafter
from paged_backend.core.fairness.fair_queue import FairQueue
from paged_backend.core.grammar import SharedLexer
from paged_backend.core.grammar_budget import StepTime
from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.scheduled_batch import ScheduledBatch, ScheduledSequence
from paged_backend.core.scheduler import Scheduler
from paged_backend.core.scheduler_config import SchedulerConfig
from paged_backend.core.scheduler_output import DrawnDrafts, ModelRunnerOutput, TokenMasks
from paged_backend.core.sequence import PLACEHOLDER, Sequence
from paged_backend.core.state_slots import ZERO_SLOT
from paged_backend.core.stopping import EndConditions
from paged_backend.core.worker_state import WorkerState
from paged_backend.executor.messages import decode_scheduler_output, encode
from paged_backend.platforms.drafts import keep_accepted
from paged_backend.platforms.input_batch import InputBatch, InputBatchBuilder
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.outputs import SequenceOutput, TokenLogprobs
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.windows import first_visible

EOS = 0
VOCAB = 50
HASH_KEY = bytes(32)
OUT_OF_SIGHT = -2


def next_token(context: list[int], index_seed: int) -> int:
    """The "model": any function of the whole context and the sequence's seed."""
    value = index_seed
    for token in context:
        value = (value * 31 + token + 7) % 1_000_003
    return value % VOCAB


def nearest(token: int, allowed: set[int] | None) -> int:
    """The token itself, or the first one after it that is allowed."""
    while allowed is not None and token not in allowed:
        token = (token + 1) % VOCAB
    return token


def registered_hashes(pool: BlockPool) -> set[bytes]:
    """The hashes of all registered blocks, used or free."""
    return set(pool._block_by_hash)


class EndlessTime(StepTime):
    """Makes steps that do not depend on how busy the machine is."""

    @property
    def is_left(self) -> bool:
        return True


class CalmLexer(SharedLexer):
    """Takes no notice of delays."""

    def delay(self) -> None:
        pass


class RandomLexer(SharedLexer):
    """Takes long for some tokens, so that others are worked on aside."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)
        self.num_after_delay = 1  # it is asked about each token

    def note(self, seconds: float) -> None:
        super().note(self._random.choice([0.0, 0.0, 1.0]))


class ToyGrammar:
    """After a multiple of 5 the next token is forced; some tokens never follow each other."""

    MAX_LENGTH = 12
    is_stuck = False
    problem = ""

    def __init__(
        self, ignore_eos: bool, tokens: Iterable[int] = (), lexer: SharedLexer | None = None
    ) -> None:
        self.lexer = lexer or CalmLexer()
        self.ignore_eos = ignore_eos
        self.tokens: list[int] = []
        assert self.accept(tokens)

    def recover(self) -> Iterator[None]:
        raise AssertionError("it is never stuck")

    @property
    def is_finished(self) -> bool:
        return self.allowed() == {EOS}

    @property
    def may_end(self) -> bool:
        return EOS in self.allowed()

    def allowed(self) -> set[int]:
        last = self.tokens[-1] if self.tokens else 1
        if len(self.tokens) >= self.MAX_LENGTH or (self.tokens and last == EOS):
            return {EOS}
        if last % 5 == 0:
            return {(last + 3) % VOCAB or 1}
        tokens = {token for token in range(1, VOCAB) if (token + last) % 3}
        return tokens if self.ignore_eos or len(self.tokens) < 2 else tokens | {EOS}

    def accept(self, token_ids: Iterable[int]) -> bool:
        for token_id in token_ids:
            if token_id not in self.allowed():
                return False
            self.tokens.append(token_id)
        return True

    def allows(self, token_id: int) -> bool:
        return token_id in self.allowed() - {EOS}

    def num_allowed(self, draft_token_ids: list[int]) -> int:
        return len(self.masks_along(draft_token_ids)) - 1

    def masks_along(self, draft_token_ids: Iterable[int], first: int = 0) -> list[bytes]:
        follower = ToyGrammar(self.ignore_eos, self.tokens)
        masks = [mask_of(follower.allowed())]
        for token_id in draft_token_ids:
            if not follower.accept([token_id]):
                break
            masks.append(mask_of(follower.allowed()))
        return masks[first:]

    def forced_token_ids(self) -> list[int]:
        follower = ToyGrammar(self.ignore_eos, self.tokens)
        if follower.is_finished:
            return [EOS]
        forced: list[int] = []
        while len(follower.allowed()) == 1 and not follower.is_finished:
            forced += follower.allowed()
            follower.accept(forced[-1:])
        return forced


def mask_of(allowed: set[int]) -> bytes:
    """A mask of the form of TokenMasks."""
    return sum(1 << token for token in allowed).to_bytes(4 * -(-VOCAB // 32), "little")


def mask_sets(masks: TokenMasks) -> list[set[int]]:
    """The tokens that each mask allows."""
    size = len(masks.bits) // len(masks.indices)
    numbers = [
        int.from_bytes(masks.bits[start : start + size], "little")
        for start in range(0, len(masks.bits), size)
    ]
    return [{token for token in range(VOCAB) if number >> token & 1} for number in numbers]


class PrecomputedDrafter(Drafter):
    """Guesses up to `length` tokens, of which it gets the first `num_right` right."""

    def __init__(self, length: int, num_right: int) -> None:
        self.length = length
        self.num_right = num_right
        self.num_proposed = 0

    def propose(self, sequences, budget):
        drafts = {}
        for seq in sequences:
            assert PLACEHOLDER not in seq.token_ids
            tokens = list(seq.token_ids)
            for index in range(self.length):
                token = next_token(tokens, seq.seed)
                tokens.append(token if index < self.num_right else (token + 1) % VOCAB)
            drafts[seq.seq_id] = Draft(tokens[seq.num_tokens :])
        self.num_proposed += len(drafts)
        return drafts

    def awaits(self, sequences):
        ids = {seq.seq_id for seq in sequences}
        return {seq_id for seq_id in ids if (seq_id + self.num_proposed) % 3}

    def observe_step(self, seconds, output):
        pass


class RandomDrafter(PrecomputedDrafter):
    """Guesses now and then another number of tokens, of which another number is right."""

    def __init__(self, seed: int) -> None:
        super().__init__(0, 0)
        self._random = random.Random(seed)

    def propose(self, sequences, budget):
        self.length = max(0, self._random.randrange(-8, 12))
        self.num_right = self._random.randrange(7)
        return super().propose(sequences, budget)


class AheadDrafter(RandomDrafter):
    """Also asks the device for drafts of sequences with steps in flight, with references."""

    draws_ahead = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.references: dict[int, list[int]] = {}  # the newest ones, by seq_id
        self.num_references = 0

    def propose(self, sequences, budget):
        sequences = list(sequences)
        ahead = [seq for seq in sequences if seq.num_output_placeholders]
        drafts = super().propose((seq for seq in sequences if seq not in ahead), budget)
        for seq in ahead:
            if self._random.random() < 0.3:
                self.num_references += 1
                self.references[seq.seq_id] = [self.num_references]
        number = self._random.randrange(9)
        return drafts | {
            seq.seq_id: Draft([PLACEHOLDER] * number, reference=self.references.get(seq.seq_id, []))
            for seq in ahead
        }

    def awaits(self, sequences):
        return {seq.seq_id for seq in sequences if self._random.random() < 0.2}


class WorkerDrafter(AheadDrafter):
    """Lets the worker draw all drafts, which draws fewer for some sequences."""

    waits_together = True

    def propose(self, sequences, budget):
        numbers = {seq.seq_id: self._random.randrange(9) for seq in sequences}
        return {seq_id: Draft([PLACEHOLDER] * number) for seq_id, number in numbers.items()}


class TogetherDrafter(RandomDrafter):
    """All sequences wait for the tokens in flight, or none."""

    waits_together = True

    def awaits(self, sequences):
        ids = {seq.seq_id for seq in sequences}
        return ids if self._random.random() < 0.7 else set()


def make_request(
    name,
    prompt,
    *,
    n=1,
    max_tokens=8,
    ignore_eos=False,
    salt="",
    seed=1,
    priority=0,
    tenant="",
    **params,
):
    return Request(
        name,
        list(prompt),
        SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=ignore_eos, seed=seed, **params),
        salt,
        priority,
        tenant,
    )


def make_sequence(seq_id: int, request: Request, max_model_len: int = 1000) -> Sequence:
    """The first completion of a request, with seed 0."""
    ends = EndConditions(frozenset(), max_model_len)
    return Sequence(seq_id, request, 0, 0, *ends)


class SchedulerOfSlices(Scheduler):
    """Sends a slice for each sequence of a step: what continued decodes must be equal to."""

    def _continue_decodes(self, step, drafts):
        pass


class EngineWithoutModel:
    """Same step as the engine's, with the pool's content checked at every position."""

    def __init__(
        self,
        *,
        num_blocks=64,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_model_len=64,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        async_scheduling=False,
        fair=True,
        tenant_weights=None,
        drafter=None,
        windows=(None,),
        states=None,
        scheduler_type=Scheduler,
        grammar_time=None,
        hash_key=HASH_KEY,
        has_journal=False,
    ):
        self.block_size = block_size
        self.num_groups = len(windows)
        self.scheduler = scheduler_type(
            SchedulerConfig(
                max_num_seqs,
                max_num_batched_tokens,
                max_model_len,
                enable_chunked_prefill,
                frozenset({EOS}),
                max_num_drafts=max_num_batched_tokens,
                draws_ahead=states is None and drafter is not None and drafter.draws_ahead,
                waits_together=getattr(drafter, "waits_together", False),
            ),
            KVCacheManager(
                num_blocks,
                KVCacheLayout(block_size, max_num_batched_tokens, tuple(windows), states),
                enable_prefix_caching=enable_prefix_caching,
                hash_key=hash_key,
                has_journal=has_journal,
            ),
            FairQueue(tenant_weights or {}, fair=fair),
            drafter,
        )
        self.scheduler.sequences.grammar_work.time = grammar_time or EndlessTime()
        self.depth = int(async_scheduling)
        self.results: deque[ModelRunnerOutput] = deque()
        # What a device keeps, by seq_id: the token that was sampled last, the wrong drafts of the
        # last step, the whole text, and the reference.
        self.last_token: dict[int, int] = {}
        self.num_wrong: dict[int, int] = {}
        self.texts: dict[int, list[int]] = {}
        self.random = random.Random(0)
        self.references: dict[int, list[int]] = {}
        self.drafts: dict[int, list[int]] = {}  # those of the newest step
        self.drafter = drafter
        self.draws_fewer = isinstance(drafter, WorkerDrafter)
        self.num_drawn = 0  # drafts that the device has drawn
        self.states = {ZERO_SLOT: []}  # the tokens that each slot stands for
        self.state_of = {}  # by seq_id, after the newest step
        self.content = [[None] * block_size for _ in range(num_blocks)]
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.prompt_logprobs: dict[str, list[float]] = {}
        self.worker_state = WorkerState()
        self.inputs = InputBatchBuilder(block_size, self.num_groups)
        self.plans: list[ScheduledBatch] = []

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request, 1)

    def step(self) -> list[SequenceOutput]:
        outputs = self.scheduler.end_early()
        output = self.scheduler.schedule()
        self.scheduler.check_invariants()
        if output.num_sequences:
            # The worker gets nothing but the encoded message.
            plan = self.worker_state.apply(decode_scheduler_output(encode(output)))
            self._check_arrays(plan)
            self.plans.append(replace(plan, scheduled=list(plan.all_sequences())))
            plan = self._on_device(plan)
            self._launch(plan)
            if self.scheduler.is_constrained:
                while self.results:
                    outputs += self.scheduler.update_from_output(self.results.popleft())
                if self.scheduler.masks_need_drafts:
                    self.scheduler.take_drafts(DrawnDrafts(self.drafts, []))
            masks = self.scheduler.token_masks(self._unmasked(plan))
            self.results.append(self._sample(plan, masks))
        elif not self.results and self.scheduler.has_unfinished:
            self.scheduler.wait_for_mask(1.0)
        if self.results and (not output.num_sequences or len(self.results) > self.depth):
            outputs += self.scheduler.update_from_output(self.results.popleft())
        self.scheduler.check_invariants()
        for out in outputs:
            key = (out.request_id, out.index)
            assert key not in self.reasons, "a finished sequence spoke again"
            self.tokens.setdefault(key, []).extend(out.new_token_ids)
            if out.prompt_logprobs is not None:
                assert out.request_id not in self.prompt_logprobs, "told twice"
                told = [entry.logprob for entry in out.prompt_logprobs]
                self.prompt_logprobs[out.request_id] = told
            if out.finish_reason is not None:
                self.reasons[key] = out.finish_reason
        return outputs

    def run(self, max_steps=2000) -> None:
        for _ in range(max_steps):
            if not self.has_unfinished:
                return
            self.step()
        raise AssertionError("a sequence starved")

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished or bool(self.results)

    def _on_device(self, plan: ScheduledBatch) -> ScheduledBatch:
        """The step as the device computes it, which knows the tokens of all steps before it."""
        for seq_id in plan.freed_seq_ids:  # a device forgets what gave up its blocks
            for of_sequence in (self.last_token, self.num_wrong, self.texts, self.references):
                of_sequence.pop(seq_id, None)
        if self.draws_fewer:
            self._check_waiting([item for item in plan.scheduled if item.draws_drafts])
        scheduled, drawn = [], {}
        for item in plan.scheduled:
            if item.max_move:
                assert 0 <= self.num_wrong[item.seq_id] <= item.max_move
                item = item.moved_back(self.num_wrong[item.seq_id])
            if item.reference_token_ids:
                assert self.references.get(item.seq_id) != item.reference_token_ids, "sent twice"
                self.references[item.seq_id] = item.reference_token_ids
            if item.draws_drafts and isinstance(self.drafter, AheadDrafter):
                wanted = self.drafter.references.get(item.seq_id)
                assert self.references.get(item.seq_id) == wanted, "the device has another one"
                if item.token_ids[0] != PLACEHOLDER:  # forced and resumed tokens were not sampled
                    self.texts[item.seq_id] = item.samples[0].context
                text = self.texts[item.seq_id]
                assert len(text) == item.start + 1
                drawn[item.seq_id] = drafts = self._drawn(text, item)
                item = item.with_drafts(drafts)
            scheduled.append(item)
        self.drafts = drawn
        if drawn and self.draws_fewer:
            self.scheduler.take_drafts(DrawnDrafts(drawn, []))
            self.scheduler.check_invariants()
        return replace(plan, scheduled=scheduled)

    def _check_waiting(self, drafted: list[ScheduledSequence]) -> None:
        """The host masks drafts one after another, so all tokens before them are known then."""
        running = self.scheduler.sequences.running
        if any(running[item.seq_id].grammar is not None for item in drafted):
            assert all(PLACEHOLDER not in item.token_ids[:1] for item in drafted)

    def _drawn(self, text: list[int], item: ScheduledSequence) -> list[int]:
        """Drafts of a sequence, of which one half is wrong from a random place on."""
        drawn, start = list(text), len(text)
        num_right = self.random.randrange(2 * item.num_draft_tokens + 1)
        for number in range(item.num_draft_tokens):
            token = next_token(drawn, item.samples[0].seed)
            drawn.append(token if number < num_right else (token + 1) % VOCAB)
        self.num_drawn += item.num_draft_tokens
        number = item.num_draft_tokens
        return drawn[start:][: self.random.randint(0, number) if self.draws_fewer else number]

    def _launch(self, plan: ScheduledBatch) -> None:
        for source, target in plan.block_copies:
            self.content[target] = list(self.content[source])
        for item in plan.all_sequences():
            for offset, token in enumerate(item.token_ids):
                block, slot = divmod(item.start + offset, self.block_size)
                if token == PLACEHOLDER:
                    token = self.last_token[item.seq_id]
                for block_id in item.block_ids[block * self.num_groups :][: self.num_groups]:
                    assert block_id != NULL_BLOCK
                    self.content[block_id][slot] = token
        if plan.state_slots:
            self._advance_states(plan)

    def _advance_states(self, plan: ScheduledBatch) -> None:
        items = list(plan.all_sequences())
        reads, writes = zip(*plan.state_slots, strict=True)
        assert len(items) == len(set(writes)) == len(reads)
        assert ZERO_SLOT not in writes
        self._check_cuts(items)
        written = {}
        for item, read, write in zip(items, reads, writes, strict=True):
            assert read == write or read not in writes, "another sequence overwrites it"
            state = self.states[read]
            assert len(state) == item.start, "a state of another position"
            known = [
                self.last_token[item.seq_id] if token == PLACEHOLDER else token
                for token in item.token_ids
            ]
            written[write] = self.state_of[item.seq_id] = state + known
        self.states |= written

    def _check_cuts(self, items: list[ScheduledSequence]) -> None:
        """No slice before the end of a text divides a chunk, and drafts are computed one by one."""
        chunks = self.scheduler.kv.layout.states.chunks
        if chunks is None:
            return
        for item in items:
            end = item.start + len(item.token_ids)
            assert item.samples or end % chunks.size == 0, "a chunk was divided"
            assert not item.num_draft_tokens or len(item.token_ids) <= chunks.few

    def _check_arrays(self, plan: ScheduledBatch) -> None:
        """Check that continued decodes give the same arrays as slices."""
        batch = self.inputs.build(plan)
        builder = InputBatchBuilder(self.block_size, self.num_groups)
        slices = ScheduledBatch.of(list(plan.all_sequences()))
        wanted = builder.build(replace(slices, state_slots=plan.state_slots))
        for field in fields(InputBatch):
            got = getattr(batch, field.name)
            if isinstance(got, np.ndarray):
                assert got.flags.c_contiguous, field.name
                other = getattr(wanted, field.name)
                assert got.dtype == other.dtype and got.tolist() == other.tolist(), field.name
        assert batch.num_decodes == wanted.num_decodes
        assert batch.samples == wanted.samples
        assert (batch.prompts, batch.pools) == (wanted.prompts, wanted.pools)

    def _visible(self, item: ScheduledSequence) -> list[list[int | None]]:
        """What the blocks of each group hold, as far as the first token of a slice sees it."""
        tables = []
        for group, window in enumerate(self.scheduler.kv.layout.windows):
            table = item.block_ids[group :: self.num_groups]
            row = [token for block_id in table for token in self.content[block_id]]
            if window is not None:
                first = first_visible(item.start, window)
                row[:first] = [OUT_OF_SIGHT] * first
            tables.append(row)
        return tables

    def _seen(self, tables: list[list[int | None]], context: list[int], seq_id: int) -> list[int]:
        """The context of a sample as the block tables hold it."""
        seen, text = [], self.texts.get(seq_id, [])
        for position, known in enumerate(context):
            found = {table[position] for table in tables} - {OUT_OF_SIGHT}
            if not found and known == PLACEHOLDER:  # as several tokens are in flight
                known = text[position]
            assert len(found) <= 1, "block tables differ"
            token = found.pop() if found else known
            assert token != PLACEHOLDER
            assert known in (PLACEHOLDER, token), "the block table holds others"
            seen.append(token)
        return seen

    def _unmasked(self, plan: ScheduledBatch) -> dict[int, int]:
        """Some of the tokens that the samples have if no mask forbids them."""
        samples = [(item, spec) for item in plan.all_sequences() for spec in item.samples]
        return {
            index: next_token(self._seen(self._visible(item), spec.context, item.seq_id), spec.seed)
            for index, (item, spec) in enumerate(samples)
            if spec.seed % 3 != 0
        }

    def _sample(self, plan: ScheduledBatch, masks: TokenMasks | None) -> ModelRunnerOutput:
        allowed = {} if masks is None else dict(zip(masks.indices, mask_sets(masks), strict=True))
        sampled = []
        for item in plan.all_sequences():
            tables = self._visible(item)
            end = item.start + len(item.token_ids)
            known = self.worker_state._sequences[item.seq_id].token_ids[:end]
            self._seen(tables, known, item.seq_id)
            for spec in item.samples:
                assert spec.num_output_tokens < spec.params.max_tokens, "a token too many"
                seen = self._seen(tables, spec.context, item.seq_id)
                if plan.state_slots:
                    state = self.state_of[item.seq_id]
                    assert len(state) == end
                    assert seen == state[: len(seen)], "the state is of other tokens"
                token = next_token(seen, spec.seed)
                sampled.append(nearest(token, allowed.get(len(sampled))))
                if spec is item.samples[0] or not item.num_draft_tokens:
                    self.texts[spec.seq_id] = seen
        assert len(self.last_token) <= self.scheduler.config.max_num_seqs
        # In place of a log-probability stands the token that it is of.
        prompt_logprobs = [
            [TokenLogprobs(token, 1, [], []) for token in item.prompt_logprobs.token_ids]
            for item in plan.all_sequences()
            if item.prompt_logprobs is not None
        ]
        kept, _ = keep_accepted(plan, sampled, {})
        self._keep(plan, kept)
        return ModelRunnerOutput(kept, {}, prompt_logprobs)

    def _keep(self, plan: ScheduledBatch, kept: list[list[int]]) -> None:
        """Let the device keep the tokens of a step."""
        tokens = iter(kept)
        for item in plan.all_sequences():
            drafted = item.num_draft_tokens > 0
            for spec in item.samples[:1] if drafted else item.samples:
                of_sequence = next(tokens)
                self.texts[spec.seq_id] += of_sequence
                self.last_token[spec.seq_id] = of_sequence[-1]
                self.num_wrong[spec.seq_id] = item.num_draft_tokens + 1 - len(of_sequence)


def expected_tokens(
    request: Request, seed: int, max_model_len: int, grammar: ToyGrammar | None = None
) -> list[int]:
    """What the sequence must generate, without any scheduling."""
    tokens = list(request.prompt_token_ids)
    out: list[int] = []
    while len(out) < request.params.max_tokens and len(tokens) < max_model_len:
        token = nearest(next_token(tokens, seed), None if grammar is None else grammar.allowed())
        tokens.append(token)
        out.append(token)
        if grammar is not None:
            assert grammar.accept([token])
        if token == EOS and not (request.params.ignore_eos and grammar is None):
            break
    return out
