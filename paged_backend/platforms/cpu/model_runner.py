"""The model runner of a CPU: a forward pass is computed before `launch` returns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paged_backend.core.scheduled_batch import (
    PoolSpec,
    PromptLogprobsSpec,
    SampleSpec,
    ScheduledBatch,
)
from paged_backend.core.scheduler_output import LaunchedStep, ModelRunnerOutput, TokenMasks
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.base import Model
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.step_context import StepContext
from paged_backend.platforms.drafts import keep_accepted
from paged_backend.platforms.input_batch import (
    InputBatch,
    InputBatchBuilder,
    Ints,
    block_tables,
)
from paged_backend.platforms.pooling import Pooler, pooled_bytes
from paged_backend.platforms.portable.threads import one_torch_thread
from paged_backend.sampling.logprobs import (
    HostLogprobs,
    cut_prompts,
    places_with_logprobs,
    specs_of_samples,
    split_by_prompt,
)
from paged_backend.sampling.sampler import Sampler
from paged_backend.sampling.token_masks import apply_token_masks, draw_greedy_allowed
from paged_backend.values.outputs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Done:
    """The output of a step that is over."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """Return the output at once."""
        return self.output


@dataclass(slots=True)
class ComputedStep(LaunchedStep):
    """A step with computed logits; see LaunchedStep."""

    sampler: Sampler
    scheduled_batch: ScheduledBatch
    samples: list[SampleSpec]
    logits: Tensor  # [num_samples, vocab_size] float32
    prompt_logprobs: list[list[TokenLogprobs]]
    _greedy: dict[int, int] = field(default_factory=dict)  # tokens that are sampled already

    def greedy_token_ids(self) -> dict[int, int]:
        """Sample the tokens that only a mask can change."""
        self._greedy = self.sampler.sample_greedily(self.logits, self.samples)
        return self._greedy

    @torch.inference_mode()
    def sample(self, masks: TokenMasks | None = None) -> Done:
        """Sample the tokens of the step."""
        with one_torch_thread():
            token_ids, logprobs = self._sample(masks)
        kept = keep_accepted(self.scheduled_batch, token_ids, logprobs)
        return Done(ModelRunnerOutput(*kept, self.prompt_logprobs))

    def _sample(self, masks: TokenMasks | None) -> tuple[list[int], dict[int, TokenLogprobs]]:
        places = places_with_logprobs(self.samples)
        untouched = self.logits[places] if places else self.logits[:0]
        if masks is not None:
            self._apply(masks)
        token_ids = self._sample_others()
        if not places:
            return token_ids, {}
        chosen = [token_ids[place] for place in places]
        specs = specs_of_samples([self.samples[place] for place in places])
        rows = HostLogprobs(untouched, chosen, specs).wait()
        return token_ids, dict(zip(places, rows, strict=True))

    def _apply(self, masks: TokenMasks) -> None:
        """Sample the rows of the masks again if all are greedy; otherwise change their logits."""
        if self._greedy.keys() >= set(masks.indices):
            tokens = draw_greedy_allowed(self.logits, masks)
            self._greedy.update(zip(masks.indices, tokens, strict=True))
            return
        apply_token_masks(self.logits, masks)
        for row in masks.indices:
            self._greedy.pop(row, None)

    def _sample_others(self) -> list[int]:
        """Sample the tokens that are not sampled yet; return all of them."""
        if not self._greedy:
            return self.sampler.sample(self.logits, self.samples)
        tokens = self._greedy
        others = [row for row in range(len(self.samples)) if row not in tokens]
        if others:
            samples = [self.samples[row] for row in others]
            sampled = self.sampler.sample(self.logits[others], samples)
            tokens |= zip(others, sampled, strict=True)
        return [tokens[row] for row in range(len(self.samples))]


@dataclass(frozen=True, slots=True)
class PooledStep(LaunchedStep):
    """A step of a model that makes embeddings; see LaunchedStep."""

    output: ModelRunnerOutput

    def sample(self, masks: TokenMasks | None = None) -> Done:
        """Return the embeddings; there is nothing to sample."""
        return Done(self.output)


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """The tokens of a pass of a draft model; see PendingTokens."""

    token_ids: list[int]
    seconds: float

    def wait(self) -> list[int]:
        """Return the tokens."""
        return self.token_ids


class CpuModelRunner:
    """Carries out steps on the calling thread."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        spec: KVCacheSpec,
        context: StepContext | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self._attention = attention
        self._has_states = spec.states is not None
        self._num_groups = len(spec.groups)
        self._inputs = InputBatchBuilder(spec.block_size, self._num_groups)
        self.sampler = Sampler(frozenset(model.config.eos_token_ids))
        self._pooler = Pooler(torch.from_numpy, model.head)
        self.model_seconds = 0.0  # spent in forward passes so far

    @property
    def attention_backend(self) -> str:
        """The name of the attention backend."""
        return type(self._attention).__name__

    @property
    def num_graphs(self) -> int:
        """The number of captured CUDA graphs."""
        return 0

    @torch.inference_mode()
    def launch(self, scheduled_batch: ScheduledBatch) -> ComputedStep | PooledStep:
        """Copy blocks, and compute the hidden states and logits of a step."""
        with one_torch_thread():
            return self._run(scheduled_batch)

    @torch.inference_mode()
    def draw(self, scheduled_batch: ScheduledBatch, masks: TokenMasks | None = None) -> DrawnTokens:
        """Compute a step, and sample without log-probabilities."""
        started_s = time.perf_counter()
        step = self.launch(scheduled_batch)
        assert isinstance(step, ComputedStep)
        with one_torch_thread():
            if masks is not None:
                apply_token_masks(step.logits, masks)
            token_ids = self.sampler.sample(step.logits, step.samples)
        return DrawnTokens(token_ids, time.perf_counter() - started_s)

    @torch.inference_mode()
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, each pair from the first to the second, in this order."""
        self._attention.copy_blocks(pairs)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Do nothing: what a step needs of its sequences comes with the step."""

    def _run(self, scheduled_batch: ScheduledBatch) -> ComputedStep | PooledStep:
        self._pooler.release(scheduled_batch.freed_seq_ids)
        batch = self._inputs.build(scheduled_batch)
        if self._context is not None:
            self._context.begin(scheduled_batch.adapters, np.diff(batch.query_start_loc))
        if scheduled_batch.block_copies:
            self._attention.copy_blocks(scheduled_batch.block_copies)
        tables = block_tables(scheduled_batch, self._num_groups)
        started = time.perf_counter()
        if not self._model.config.has_output_layer:
            hidden = self._forward(batch, tables)
            self.model_seconds += time.perf_counter() - started
            return self._pool(hidden, batch.pools)
        logits, others = self._compute(batch, tables)
        self.model_seconds += time.perf_counter() - started
        prompt_logprobs = self._prompt_logprobs(others, batch.prompts)
        return ComputedStep(self.sampler, scheduled_batch, batch.samples, logits, prompt_logprobs)

    def _forward(self, batch: InputBatch, tables: Ints) -> Tensor:
        """Return the hidden states of `batch.needed_indices`."""
        meta = AttentionMetadata(
            query_start_loc=torch.from_numpy(batch.query_start_loc),
            seq_lens=torch.from_numpy(batch.seq_lens),
            block_tables=torch.from_numpy(tables).unbind(),
            slot_mappings=torch.from_numpy(batch.slot_mappings).unbind(),
            positions=torch.from_numpy(batch.positions),
            num_decodes=batch.num_decodes,
            state_slots=torch.from_numpy(batch.state_slots) if self._has_states else None,
        )
        if self._context is not None:
            self._context.need(batch.needed_indices)
        return self._model.forward(
            torch.from_numpy(batch.input_ids),
            self._attention,
            meta,
            torch.from_numpy(batch.needed_indices),
        )

    def _compute(self, batch: InputBatch, tables: Ints) -> tuple[Tensor, Tensor]:
        """Return the logits of the samples, and the other hidden states that are needed."""
        hidden = self._forward(batch, tables)
        num_samples = len(batch.logits_indices)
        return self._model.compute_logits(hidden[:num_samples]).float(), hidden[num_samples:]

    def _pool(self, hidden: Tensor, specs: list[PoolSpec]) -> PooledStep:
        pooled = self._pooler.pool(hidden, specs).numpy() if specs else np.zeros((0, 0), np.float32)
        return PooledStep(ModelRunnerOutput([], pooled=pooled_bytes(pooled)))

    def _prompt_logprobs(
        self, hidden: Tensor, prompts: list[PromptLogprobsSpec]
    ) -> list[list[TokenLogprobs]]:
        rows: list[TokenLogprobs] = []
        for token_ids, specs in cut_prompts(prompts):
            part = hidden[len(rows) : len(rows) + len(token_ids)]
            logits = self._model.compute_logits(part).float()
            rows += HostLogprobs(logits, token_ids, specs).wait()
        return split_by_prompt(prompts, rows)
