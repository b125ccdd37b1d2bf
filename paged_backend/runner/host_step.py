"""Steps on the CPU: built, computed and sampled before `submit` returns."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from paged_backend.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paged_backend.models.llama import LlamaModel
from paged_backend.runner.attention import AttentionBackend, AttentionMetadata
from paged_backend.runner.input_batch import InputBatch, block_table
from paged_backend.runner.sampler import Sampler
from paged_backend.runner.torch_threads import one_torch_thread


@dataclass(frozen=True, slots=True)
class Done:
    """The output of a step that is over."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        """At once."""
        return self.output


class HostStepRunner:
    """Carries out steps on the calling thread."""

    def __init__(self, model: LlamaModel, attention: AttentionBackend, block_size: int) -> None:
        self._model = model
        self._attention = attention
        self._block_size = block_size
        self._sampler = Sampler(frozenset(model.config.eos_token_ids))
        self.model_seconds = 0.0  # spent in forward passes so far

    @torch.inference_mode()
    def submit(self, plan: SchedulerOutput) -> Done:
        """Make the plan's copies, compute its tokens and sample."""
        with one_torch_thread(self._model.device):
            return Done(ModelRunnerOutput(self._run(plan)))

    def _run(self, plan: SchedulerOutput) -> list[int]:
        batch = InputBatch.build(plan, self._block_size)
        if plan.block_copies:
            self._attention.copy_blocks(plan.block_copies)
        meta = AttentionMetadata(
            query_start_loc=torch.from_numpy(batch.query_start_loc),
            seq_lens=torch.from_numpy(batch.seq_lens),
            block_table=torch.from_numpy(block_table(plan.scheduled)),
            slot_mapping=torch.from_numpy(batch.slot_mapping),
            positions=torch.from_numpy(batch.positions),
            num_decodes=batch.num_decodes,
        )
        started = time.perf_counter()
        logits = self._model.forward(
            torch.from_numpy(batch.input_ids),
            self._attention,
            meta,
            torch.from_numpy(batch.logits_indices),
        )
        self.model_seconds += time.perf_counter() - started
        return self._sampler.sample(logits, batch.samples)
