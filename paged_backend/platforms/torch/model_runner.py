"""The model runner of a CPU: a step is computed and sampled before `submit` returns."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.core.scheduled_batch import PromptLogprobsSpec, SampleSpec, ScheduledBatch
from paged_backend.core.scheduler_output import ModelRunnerOutput
from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.base import Model
from paged_backend.outputs import TokenLogprobs
from paged_backend.platforms.input_batch import InputBatch, block_table
from paged_backend.platforms.torch.threads import one_torch_thread
from paged_backend.sampling.logprobs import (
    HostLogprobs,
    cut_prompts,
    join_prompts,
    places_with_logprobs,
)
from paged_backend.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Done:
    """The output of a step that is over."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """Return it at once."""
        return self.output


class TorchModelRunner:
    """Carries out steps on the calling thread."""

    def __init__(self, model: Model, attention: AttentionBackend, block_size: int) -> None:
        self._model = model
        self._attention = attention
        self._block_size = block_size
        self._sampler = Sampler(frozenset(model.config.eos_token_ids))
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
    def submit(self, scheduled_batch: ScheduledBatch) -> Done:
        """Copy blocks, compute the tokens of a step, and sample."""
        with one_torch_thread():
            return Done(self._run(scheduled_batch))

    def _run(self, scheduled_batch: ScheduledBatch) -> ModelRunnerOutput:
        batch = InputBatch.build(scheduled_batch, self._block_size)
        if scheduled_batch.block_copies:
            self._attention.copy_blocks(scheduled_batch.block_copies)
        meta = AttentionMetadata(
            query_start_loc=torch.from_numpy(batch.query_start_loc),
            seq_lens=torch.from_numpy(batch.seq_lens),
            block_table=torch.from_numpy(block_table(scheduled_batch.scheduled)),
            slot_mapping=torch.from_numpy(batch.slot_mapping),
            positions=torch.from_numpy(batch.positions),
            num_decodes=batch.num_decodes,
        )
        started = time.perf_counter()
        hidden = self._model.forward(
            torch.from_numpy(batch.input_ids),
            self._attention,
            meta,
            torch.from_numpy(batch.needed_indices),
        )
        num_samples = len(batch.samples)
        logits = self._model.compute_logits(hidden[:num_samples]).float()
        self.model_seconds += time.perf_counter() - started
        token_ids, logprobs = self._sample(logits, batch.samples)
        return ModelRunnerOutput(
            token_ids, logprobs, self._prompt_logprobs(hidden[num_samples:], batch.prompts)
        )

    def _sample(
        self, logits: Tensor, samples: list[SampleSpec]
    ) -> tuple[list[int], dict[int, TokenLogprobs]]:
        places = places_with_logprobs(samples)
        if not places:
            return self._sampler.sample(logits, samples), {}
        untouched = logits[places]
        token_ids = self._sampler.sample(logits, samples)
        chosen = [token_ids[place] for place in places]
        num_top = [samples[place].params.logprobs or 0 for place in places]
        rows = HostLogprobs(untouched, chosen, num_top).wait()
        return token_ids, dict(zip(places, rows, strict=True))

    def _prompt_logprobs(
        self, hidden: Tensor, specs: list[PromptLogprobsSpec]
    ) -> list[list[TokenLogprobs]]:
        rows: list[TokenLogprobs] = []
        for token_ids, num_top in cut_prompts(specs):
            part = hidden[len(rows) : len(rows) + len(token_ids)]
            logits = self._model.compute_logits(part).float()
            rows += HostLogprobs(logits, token_ids, num_top).wait()
        return join_prompts(specs, rows)
