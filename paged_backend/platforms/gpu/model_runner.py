"""The model runner of a GPU: it launches steps without waiting for them.

The host sends what has changed, launches the step and continues. If the previous step is still
sampling an input token, the host sends a placeholder, and the device looks the token up. Decodes,
short parts of prompts, and both together replay the model as one CUDA graph, padded to the next
captured shape. The graph also samples. If a request changes its logits, the step is sampled again
from the changed ones, by separate launches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice

import numpy as np
import torch
from paged_kernels.errors import trusted_tensors
from torch import Tensor

from paged_backend.core.scheduled_batch import PoolSpec, PromptLogprobsSpec, ScheduledBatch
from paged_backend.core.scheduler_output import TokenMasks
from paged_backend.core.sequence import PLACEHOLDER
from paged_backend.models.attention import AttentionBackend
from paged_backend.models.base import Model
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.step_context import IDLE_ADAPTER, StepContext
from paged_backend.platforms.base import ModelRunner
from paged_backend.platforms.gpu.cuda_graphs import StepGraphs, StepShape, captured_shapes
from paged_backend.platforms.gpu.device import GpuDevice, Replay
from paged_backend.platforms.gpu.given_answers import GivenAnswers
from paged_backend.platforms.gpu.idle_batches import IdleBatches
from paged_backend.platforms.gpu.launched_steps import (
    DrawnPass,
    LaunchedEmbeddings,
    LaunchedGpuStep,
    PredictedDrafts,
)
from paged_backend.platforms.gpu.logprobs import DeviceLogprobs
from paged_backend.platforms.gpu.shared_prefix import count_shared_blocks
from paged_backend.platforms.gpu.step_inputs import DeviceInputs, StepInputs
from paged_backend.platforms.gpu.step_rows import StepRows
from paged_backend.platforms.gpu.step_sampler import StepSampler
from paged_backend.platforms.gpu.transfer import Arrival, Transfer
from paged_backend.platforms.pooling import Pooler
from paged_backend.sampling.logprobs import ROWS_AT_ONCE, cut_prompts
from paged_backend.values.options.scheduling import StepLimits


class GpuModelRunner:
    """Owns the inputs on the device, the sampler and the graphs of one model."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        spec: KVCacheSpec,
        limits: StepLimits,
        dtype: torch.dtype,
        transfer: Transfer,
        rows: StepRows,
        *,
        cascade: bool = False,
        context: StepContext | None = None,
    ) -> None:
        self._model = model
        self._context = context  # what the layers know about rows; None without adapters
        self._cascade = cascade  # read blocks that all decodes share once for all of them
        self._attention = attention
        self._block_size = spec.block_size
        self._windows = [group.window for group in spec.groups]
        self._transfer = transfer
        self._rows = rows
        self._keeps_tokens = spec.keeps_tokens
        self._has_states = spec.states is not None
        self._limits = limits
        self._makes_embeddings = not model.config.has_output_layer
        self._pooler = Pooler(transfer.send, model.head)
        self._inputs = DeviceInputs(
            spec.block_size,
            len(spec.groups),
            limits,
            model.max_model_len if spec.keeps_tokens else 0,  # no layer reads block tables
            transfer,
            context,
            has_states=self._has_states,
        )
        # Layers with states have none to go back to after wrong drafts in flight.
        has_texts = limits.draws_ahead and not (self._has_states or self._makes_embeddings)
        max_text = model.max_model_len if has_texts else 0
        self._sampler = StepSampler(model.config, limits, dtype, self._inputs, transfer, max_text)
        self._idle = IdleBatches(
            limits,
            model.max_model_len,
            spec.block_size,
            len(spec.groups),
            model.config.vocab_size,
            self._makes_embeddings,
        )
        self._graphs: StepGraphs | None = None
        self._gpu: GpuDevice | None = None  # captures the graphs
        self._is_warm = False

    @property
    def model_seconds(self) -> float | None:
        """None: the host does not wait for forward passes."""
        return None

    @property
    def attention_backend(self) -> str:
        """The name of the attention backend."""
        return type(self._attention).__name__

    @property
    def num_graphs(self) -> int:
        """The number of captured CUDA graphs."""
        return 0 if self._graphs is None else len(self._graphs)

    @torch.inference_mode()
    def launch(self, scheduled_batch: ScheduledBatch) -> LaunchedGpuStep | LaunchedEmbeddings:
        """Launch the forward pass of a step."""
        self.release(scheduled_batch.freed_seq_ids)
        inputs = self._inputs.update(scheduled_batch)
        batch = inputs.batch
        self._sampler.admit(inputs, scheduled_batch.scheduled)
        if scheduled_batch.block_copies:
            self.copy_blocks(scheduled_batch.block_copies)
        shape, drafts, before_prompts = self._launch(inputs, scheduled_batch)
        if self._makes_embeddings:
            return LaunchedEmbeddings(self._pool(before_prompts, batch.pools))
        prompts = list(self._prompt_logprobs(before_prompts, batch.prompts))
        predicted = self._receive_num_predicted(scheduled_batch)
        return LaunchedGpuStep(
            self._sampler, scheduled_batch, batch, shape, prompts, predicted, drafts
        )

    @torch.inference_mode()
    def draw(self, scheduled_batch: ScheduledBatch, masks: TokenMasks | None = None) -> DrawnPass:
        """Launch a step of a draft model, and the copy of its tokens to the host."""
        timer = self._transfer.start_timer()
        items = scheduled_batch.scheduled
        # The counts of penalties have drafts that were wrong, until the host knows all tokens.
        self._sampler.forget_counts(
            item.seq_id for item in items if item.token_ids[-1] != PLACEHOLDER
        )
        inputs = self._inputs.update(scheduled_batch)
        self._sampler.admit(inputs, items)
        shape, _, _ = self._launch(inputs, scheduled_batch)
        tokens = self._sampler.draw(inputs.batch, shape, masks)
        timer.stop()  # before the copy: once the tokens have arrived, the time is known, too
        return DrawnPass(self._transfer.receive(tokens), timer)

    @torch.inference_mode()
    def follow(self, main: ModelRunner, scheduled_batch: ScheduledBatch) -> None:
        """Let the next passes begin where the texts of the model end; see ChainingRunner."""
        assert isinstance(main, GpuModelRunner)
        items = [item for item in scheduled_batch.scheduled if item.token_ids[-1] == PLACEHOLDER]
        if not items:
            return
        items.sort(key=lambda item: not item.samples[0].params.penalized)
        widths = [item.token_ids.count(PLACEHOLDER) for item in items]
        ends = [
            (
                main._inputs.rows[item.seq_id],
                self._inputs.rows[item.seq_id],
                item.start + scheduled_batch.lead + len(item.token_ids) - width,
                item.max_move > 0,
            )
            for item, width in zip(items, widths, strict=True)
        ]
        num_penalized = sum(item.samples[0].params.penalized for item in items)
        sent = np.array(ends, np.int64).T.copy()
        self._sampler.follow(main._sampler, sent, max(widths), num_penalized)

    @torch.inference_mode()
    def give_drafts(self, main: ModelRunner, seq_ids: Sequence[int], place: int) -> None:
        """Let the next step of the model have the tokens of the newest pass as drafts."""
        assert isinstance(main, GpuModelRunner)
        rows = np.array([main._inputs.rows[seq_id] for seq_id in seq_ids], np.int64)
        main._sampler.take_drafts(rows, place, self._sampler.newest_tokens(len(rows)))

    @torch.inference_mode()
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, each pair from the first to the second, in this order."""
        self._attention.copy_blocks(pairs)

    def warm_up(self) -> None:
        """Run each kind of step once on the null block, so that every kernel is compiled.

        `run_largest` has the most tokens.
        """
        for num_tokens, num_seqs in self._idle.sizes():
            self._run_idle(num_tokens, num_seqs)
        self._attention.copy_blocks([(0, 0)])
        if not self._makes_embeddings:
            for num_rows in (32, ROWS_AT_ONCE):
                self._run_alone(self._idle.with_options(num_rows))
        can_move = self._limits.max_num_drafts > 0 and not self._has_states
        if can_move and self._limits.max_num_batched_tokens > 1:
            self._run_alone(self._idle.with_drafts_in_flight())
        if self._cascade and self._model.max_model_len > self._block_size:
            self._warm_up_cascade()
        self._is_warm = True

    def run_largest(self) -> None:
        """Run a step with the maximum number of tokens and samples, on the null block."""
        self._run_idle(self._limits.max_num_batched_tokens, self._limits.max_num_seqs)

    @torch.inference_mode()
    def capture(self, gpu: GpuDevice) -> None:
        """Capture CUDA graphs on a GPU, on buffers that contain padding only.

        A model that makes embeddings has none: its steps are prompts of any length.
        """
        if self._makes_embeddings:
            return
        shapes = captured_shapes(self._limits)
        if self._context is not None:
            shapes += [replace(shape, has_adapters=True) for shape in shapes]
        self._gpu, self._graphs = gpu, None
        pool = gpu.new_graph_pool()
        nothing = self._inputs.update(ScheduledBatch.of([]))

        def capture(shape: StepShape) -> Replay:
            self._inputs.send(nothing, shape)
            return gpu.capture(lambda: self._run(shape), pool)

        self._graphs = StepGraphs(shapes, capture)

    def give_answers(self, number: int, length: int) -> GivenAnswers:
        """Return answers whose tokens benchmarks set; no step samples others.

        The arguments are those of `GivenAnswers`.
        """
        answers = GivenAnswers(number, length, self._transfer.device)
        self._sampler.give_answers(answers)
        if self._gpu is not None:
            self.capture(self._gpu)
        return answers

    def _run_idle(self, num_tokens: int, num_seqs: int) -> None:
        """Run tokens, spread over sequences with only the null block; no request is affected.

        Where the layers have adapters, the tokens run without them, and with the kernels of them.
        """
        adapters = ("",) if self._context is None else ("", IDLE_ADAPTER)
        for adapter in adapters:
            batch = self._idle.spread(num_tokens, num_seqs, adapter)
            self._run_alone(batch, self._idle.masks())

    def _run_alone(self, batch: ScheduledBatch, masks: TokenMasks | None = None) -> None:
        """Run a step, and forget its sequences."""
        self.launch(batch).sample(masks).result()
        self.release([item.seq_id for item in batch.scheduled])

    @torch.inference_mode()
    def _warm_up_cascade(self) -> None:
        """Run decodes that share the null block."""
        for batch in self._idle.decodes_of_a_prefix():
            size = len(batch.scheduled)
            inputs, shape = self._inputs.update(batch), StepShape(size, size, 0, size)
            self._inputs.send(inputs, shape)
            self._run(shape, 1)
        self._inputs.rows.release([-1])

    def release(self, seq_ids: Sequence[int]) -> None:
        """Forget sequences."""
        self._sampler.release(seq_ids)
        self._pooler.release(seq_ids)
        self._inputs.rows.release(seq_ids)

    def _launch(
        self, inputs: StepInputs, scheduled_batch: ScheduledBatch
    ) -> tuple[StepShape, Arrival | None, Tensor]:
        """Send a step's inputs and launch the model.

        Returns:
            The shape, the drafts from texts (see LaunchedGpuStep), and the result of `_run`.
        """
        shape = inputs.shape
        captured = None if self._graphs is None else self._graphs.fit(shape)
        shared = 0
        if self._cascade:
            has_graph = captured is not None
            decodes = list(islice(scheduled_batch.all_sequences(), shape.num_decodes))
            shared = count_shared_blocks(decodes, self._block_size, has_graph, self._windows)
        if shared:
            captured = None
        self._inputs.send(inputs, captured or shape)
        sampler = self._sampler
        is_drawn = self._inputs.prepare(inputs, captured or shape, sampler.num_wrong, sampler.texts)
        drafts = sampler.receive_drafts(captured or shape) if is_drawn else None
        if self._graphs is not None and captured is not None:
            return captured, drafts, self._graphs.replay(captured)
        # All kinds of calls have been made with checks by the warm-up.
        with trusted_tensors() if self._is_warm else nullcontext():
            return shape, drafts, self._run(shape, shared)

    def _run(self, shape: StepShape, num_shared_blocks: int = 0) -> Tensor:
        """Launch the model on the contents of the buffers, and sample from its logits.

        Returns the last hidden states [num_prompt_rows, hidden_size] of the other rows.
        """
        part = self._inputs.buffers(shape).part
        meta = self._inputs.metadata(shape, num_shared_blocks)
        self._rows.slots = meta.slot_mappings[0] if self._keeps_tokens else None
        input_ids = self._sampler.input_ids(shape)
        needed = part("logits_indices", shape.num_samples + shape.num_prompt_rows)
        if self._context is not None:
            self._context.has_adapters = shape.has_adapters
            if shape.has_adapters:
                self._context.copy_from(part("adapter_slots", shape.num_tokens), needed)
        hidden = self._model.forward(input_ids, self._attention, meta, needed)
        num_samples = shape.num_samples
        if num_samples:
            self._sampler.sample(self._model.compute_logits(hidden[:num_samples]), shape)
        return hidden[num_samples:]

    def _receive_num_predicted(self, scheduled_batch: ScheduledBatch) -> PredictedDrafts | None:
        """Start to copy how many drafts of each sequence are from its prediction."""
        texts = self._sampler.texts
        seq_ids = [
            item.seq_id
            for item in scheduled_batch.scheduled
            if item.draws_drafts and item.samples[0].predicted_token_ids
        ]
        if texts is None or not texts.draws or not seq_ids:
            return None
        rows = np.array([self._inputs.rows[seq_id] for seq_id in seq_ids], np.int64)
        return PredictedDrafts(seq_ids, texts.receive_num_predicted(rows))

    def _pool(self, hidden: Tensor, specs: list[PoolSpec]) -> Arrival | None:
        if not specs:
            return None
        return self._transfer.receive(self._pooler.pool(hidden, specs))

    def _prompt_logprobs(
        self, hidden: Tensor, prompts: list[PromptLogprobsSpec]
    ) -> Iterator[DeviceLogprobs]:
        done = 0
        for token_ids, specs in cut_prompts(prompts):
            # A copy, because the last hidden states of some models are logits: a row of them may
            # begin at an address that kernels do not read from.
            part = hidden[done : done + len(token_ids)].clone()
            done += len(token_ids)
            logits = self._model.compute_logits(part)
            sent = self._transfer.send(np.array(token_ids, np.int32))
            yield DeviceLogprobs(logits, sent, specs, self._transfer)
