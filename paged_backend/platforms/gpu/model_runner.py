"""The model runner of a GPU: it launches steps without waiting for them.

The host sends what has changed, launches the step and continues. If the previous step is still
sampling an input token, the host sends a placeholder, and the device looks the token up. Decodes,
short parts of prompts, and both together replay the model as one CUDA graph, padded to the next
captured shape. The graph also samples. If a request changes its logits, the step is sampled again
from the changed ones, by separate launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from paged_kernels.errors import trusted_tensors
from paged_kernels.token_masks import apply_token_masks
from torch import Tensor

from paged_backend.core.scheduled_batch import (
    PoolSpec,
    PromptLogprobsSpec,
    SampleSpec,
    ScheduledBatch,
    ScheduledSequence,
)
from paged_backend.core.scheduler_output import LaunchedStep, ModelRunnerOutput, TokenMasks
from paged_backend.models.attention import AttentionBackend
from paged_backend.models.base import Model
from paged_backend.models.kv_cache import KVCacheSpec
from paged_backend.models.step_context import IDLE_ADAPTER, StepContext
from paged_backend.platforms.drafts import keep_accepted
from paged_backend.platforms.gpu.cuda_graphs import (
    StepGraphs,
    StepShape,
    captured_shapes,
)
from paged_backend.platforms.gpu.device import GpuDevice, Replay
from paged_backend.platforms.gpu.logprobs import DeviceLogprobs
from paged_backend.platforms.gpu.sampler import DeviceSampler
from paged_backend.platforms.gpu.shared_prefix import MIN_SEQS, count_shared_blocks
from paged_backend.platforms.gpu.step_inputs import DeviceInputs, StepInputs, max_num_samples
from paged_backend.platforms.gpu.transfer import Arrival, Transfer
from paged_backend.platforms.input_batch import InputBatch
from paged_backend.platforms.pooling import Pooler, pooled_bytes
from paged_backend.sampling.logprobs import (
    ROWS_AT_ONCE,
    cut_prompts,
    places_with_logprobs,
    specs_of_samples,
    split_by_prompt,
)
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.sampling_params import SamplingParams

IntArray = TypeVar("IntArray", bound=NDArray[np.signedinteger[Any]])


@dataclass(frozen=True, slots=True)
class InFlightOutput:
    """The output of a step that the device may still compute or copy to the host.

    `tokens` has one token for each sample of `batch`, then padding.
    """

    tokens: Arrival
    scheduled_batch: ScheduledBatch
    batch: InputBatch
    places: list[int]  # indices of the samples with logprobs
    logprobs: DeviceLogprobs | None
    prompt_logprobs: list[DeviceLogprobs]

    def result(self) -> ModelRunnerOutput:
        """Wait for the device."""
        tokens = self.tokens.wait()[: len(self.batch.sample_positions)]
        logprobs = [] if self.logprobs is None else self.logprobs.wait()
        by_place = dict(zip(self.places, logprobs, strict=True))
        of_prompts = [row for part in self.prompt_logprobs for row in part.wait()]
        return ModelRunnerOutput(
            *keep_accepted(self.scheduled_batch, tokens, by_place),
            split_by_prompt(self.batch.prompts, of_prompts),
        )


@dataclass(frozen=True, slots=True)
class LaunchedGpuStep(LaunchedStep):
    """A step with a forward pass that is on its way; see LaunchedStep."""

    runner: GpuModelRunner
    scheduled_batch: ScheduledBatch
    batch: InputBatch
    shape: StepShape
    prompt_logprobs: list[DeviceLogprobs]

    def sample(self, masks: TokenMasks | None = None) -> InFlightOutput:
        """Launch the rest of the sampling of the step."""
        batch = self.batch
        tokens, places, logprobs = self.runner.sample(batch, self.shape, masks)
        return InFlightOutput(
            tokens, self.scheduled_batch, batch, places, logprobs, self.prompt_logprobs
        )


@dataclass(frozen=True, slots=True)
class InFlightEmbeddings:
    """The embeddings of a step that the device may still compute; see PendingOutput."""

    pooled: Arrival | None  # None if no prompt ends in the step

    def result(self) -> ModelRunnerOutput:
        """Wait for the device."""
        rows = [] if self.pooled is None else pooled_bytes(self.pooled.wait_for_array())
        return ModelRunnerOutput([], pooled=rows)


@dataclass(frozen=True, slots=True)
class LaunchedEmbeddings(LaunchedStep):
    """A step of a model that makes embeddings; see LaunchedStep."""

    pooled: Arrival | None

    def sample(self, masks: TokenMasks | None = None) -> InFlightEmbeddings:
        """Return the embeddings to wait for; there is nothing to sample."""
        return InFlightEmbeddings(self.pooled)


class GpuModelRunner:
    """Owns the persistent buffers, the sampler state and the graphs of one model."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        spec: KVCacheSpec,
        limits: StepLimits,
        dtype: torch.dtype,
        transfer: Transfer,
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
        self._num_groups = len(spec.groups)
        self._transfer = transfer
        self._limits = limits
        self._max_num_seqs = limits.max_num_seqs
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._makes_embeddings = not model.config.has_output_layer
        self._pooler = Pooler(transfer.send, model.head)
        self._inputs = DeviceInputs(
            spec.block_size,
            self._num_groups,
            limits,
            model.max_model_len if spec.keeps_tokens else 0,  # no layer reads block tables
            transfer,
            context,
            has_states=spec.states is not None,
        )
        self._sampled: set[int] = set()  # seq_ids of sequences with parameters on the device
        self._penalized: set[int] = set()  # the part of them with penalties or `min_tokens`
        self._sampler = DeviceSampler(
            self._max_num_seqs + 1,
            model.config.vocab_size,
            frozenset(model.config.eos_token_ids),
            transfer,
        )
        # Results of the last step, at the same addresses for all graphs.
        num_samples = 0 if self._makes_embeddings else max_num_samples(limits)
        device, vocab_size = transfer.device, model.config.vocab_size
        self._logits = torch.empty(num_samples, vocab_size, dtype=dtype, device=device)
        self._tokens = torch.empty(num_samples, dtype=torch.int32, device=device)
        self._input_ids = torch.empty(self._inputs.max_num_tokens, dtype=torch.int64, device=device)
        self._graphs: StepGraphs | None = None
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
        self._release(scheduled_batch.freed_seq_ids)
        inputs = self._inputs.update(scheduled_batch)
        batch = inputs.batch
        self._forget_counts(scheduled_batch.scheduled)
        self._admit(inputs.new_sample_rows, batch.scheduled_samples)
        if scheduled_batch.block_copies:
            self._attention.copy_blocks(scheduled_batch.block_copies)
        shape, before_prompts = self._launch(inputs, scheduled_batch)
        if self._makes_embeddings:
            return LaunchedEmbeddings(self._pool(before_prompts, batch.pools))
        prompts = list(self._prompt_logprobs(before_prompts, batch.prompts))
        return LaunchedGpuStep(self, scheduled_batch, batch, shape, prompts)

    @torch.inference_mode()
    def sample(
        self, batch: InputBatch, shape: StepShape, masks: TokenMasks | None
    ) -> tuple[Arrival, list[int], DeviceLogprobs | None]:
        """Launch the rest of the sampling of the step that was launched last.

        Returns the tokens, the places of those with logprobs, and their logprobs.
        """
        logits, tokens = self._logits[: shape.num_samples], self._tokens[: shape.num_samples]
        # Continued decodes have neither logprobs nor changes of single tokens' logits.
        new, num_continued = batch.scheduled_samples, len(batch.continued)
        places = [num_continued + place for place in places_with_logprobs(new)]
        adjusted = batch.samples if any(spec.params.adjusts_tokens for spec in new) else []
        index = self._transfer.send(np.array(places, np.int64)) if places else None
        untouched = None if index is None else logits.index_select(0, index)
        if masks is not None or adjusted or self._penalized:
            self._change_and_sample(shape, masks, adjusted)
        arrival = self._transfer.receive(tokens)
        if index is None or untouched is None:
            return arrival, [], None
        specs = specs_of_samples([new[place - num_continued] for place in places])
        chosen = tokens.index_select(0, index)
        return arrival, places, DeviceLogprobs(untouched, chosen, specs, self._transfer)

    def warm_up(self) -> None:
        """Run each kind of step once on the null block, so that every kernel is compiled.

        Products and experts have kernels for few rows, for more, and for many. The rows are tokens,
        and samples or tokens with prompt logprobs in the output layer. All powers of two are run,
        because dense products of 32 rows may need a kernel that neither 16 nor 64 rows need.
        `run_largest` has the most tokens.
        """
        most_tokens, most_seqs = self._max_num_batched_tokens, self._max_num_seqs
        for num_seqs in (*_powers_of_two(most_seqs), most_seqs):
            self._run_idle(num_seqs, num_seqs)
        for num_tokens in (2, most_seqs + 1):  # one prompt; the keys of a short one are split
            self._run_idle(min(most_tokens, num_tokens), 1)
        for num_tokens in _powers_of_two(most_tokens):
            if num_tokens > most_seqs:
                num_seqs = -(-num_tokens // self._model.max_model_len)
                self._run_idle(num_tokens, min(num_seqs, most_seqs))
        self._attention.copy_blocks([(0, 0)])
        if not self._makes_embeddings:
            for num_rows in (32, ROWS_AT_ONCE):
                self._warm_up_options(num_rows)
        if self._cascade and self._model.max_model_len > self._block_size:
            self._warm_up_cascade()
        self._is_warm = True

    def run_largest(self) -> None:
        """Run a step with the maximum number of tokens and samples, on the null block."""
        self._run_idle(self._max_num_batched_tokens, self._max_num_seqs)

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
        pool = gpu.new_graph_pool()
        nothing = self._inputs.update(ScheduledBatch.of([]))

        def capture(shape: StepShape) -> Replay:
            self._inputs.send(nothing, shape)
            return gpu.capture(lambda: self._run(shape), pool)

        self._graphs = StepGraphs(shapes, capture)

    def _run_idle(self, num_tokens: int, num_seqs: int) -> None:
        """Run tokens, spread over sequences with only the null block; no request is affected.

        Where the layers have adapters, the tokens run without them, and with the kernels of them.
        """
        self._run_idle_with("", num_tokens, num_seqs)
        if self._context is not None:
            self._run_idle_with(IDLE_ADAPTER, num_tokens, num_seqs)

    def _run_idle_with(self, adapter: str, num_tokens: int, num_seqs: int) -> None:
        params = SamplingParams(temperature=1.0, top_k=8, top_p=0.9, logprobs=1)
        lengths = np.diff(np.linspace(0, num_tokens, num_seqs + 1).astype(int)).tolist()
        scheduled = []
        for index, length in enumerate(lengths):
            length = min(length, self._model.max_model_len)
            seq_id, tokens = -1 - index, [0] * length
            blocks = [0] * (-(-length // self._block_size) * self._num_groups)
            if self._makes_embeddings:
                pool = PoolSpec(seq_id, 0, length, True, length)
                scheduled.append(ScheduledSequence(seq_id, tokens, 0, blocks, (), pool=pool))
            else:
                spec = SampleSpec(seq_id, params, 0, length, length, tokens)
                scheduled.append(
                    ScheduledSequence(seq_id, tokens, 0, blocks, (spec,), adapter=adapter)
                )
        everything = TokenMasks([0], b"\xff" * (-(-self._model.config.vocab_size // 32) * 4))
        self.launch(ScheduledBatch.of(scheduled)).sample(everything).result()
        self._release([item.seq_id for item in scheduled])

    def _warm_up_options(self, num_rows: int) -> None:
        """Run a prompt with logprobs of `num_rows` tokens, and options that need torch's kernels.

        These are loaded when they first run, which would delay the first such request.
        """
        length = min(num_rows + 1, self._max_num_batched_tokens, self._model.max_model_len)
        params = SamplingParams(
            logprobs=1,
            prompt_logprobs=1,
            return_generation_logits=True,
            presence_penalty=1.0,
            logit_bias=((0, 1.0),),
            allowed_token_ids=(0, 1),
            bad_words_token_ids=((0,), (0, 0)),
        )
        tokens, blocks = [0] * length, [0] * (-(-length // self._block_size) * self._num_groups)
        # The last token counts as output: bad words lie in the output.
        sample = SampleSpec(-1, params, 0, length, length - 1, tokens)
        # Logits of the whole prompt would keep much pinned memory; the sample's are enough.
        prompt = PromptLogprobsSpec(1, tokens[1:])
        item = ScheduledSequence(-1, tokens, 0, blocks, (sample,), prompt)
        self.launch(ScheduledBatch.of([item])).sample().result()
        self._release([item.seq_id])

    @torch.inference_mode()
    def _warm_up_cascade(self) -> None:
        """Run decodes that share the null block; each power of two may need other kernels."""
        sizes = {MIN_SEQS << shift for shift in range(12)} | {self._max_num_seqs}
        for size in sorted(size for size in sizes if MIN_SEQS <= size <= self._max_num_seqs):
            item = ScheduledSequence(-1, [0], self._block_size, [0, 0] * self._num_groups, ())
            inputs = self._inputs.update(ScheduledBatch.of([item] * size))
            shape = StepShape(size, size, 0, size)
            self._inputs.send(inputs, shape)
            self._run(shape, 1)
        self._inputs.rows.release([-1])

    def _release(self, seq_ids: list[int]) -> None:
        self._sampled.difference_update(seq_ids)
        self._penalized.difference_update(seq_ids)
        self._pooler.release(seq_ids)
        self._inputs.rows.release(seq_ids)

    def _forget_counts(self, items: list[ScheduledSequence]) -> None:
        """Let the tokens of sequences be counted anew that a grammar has forced tokens upon.

        The device counts what it samples. A slice with known tokens after its first one has tokens
        that the device has not sampled.
        """
        if self._penalized:
            for item in items:
                if len(item.token_ids) - item.num_draft_tokens > 1:
                    self._sampled.discard(item.seq_id)

    def _admit(self, rows: list[int], samples: list[SampleSpec]) -> None:
        new: dict[int, tuple[int, SampleSpec]] = {}
        for row, spec in zip(rows, samples, strict=True):
            if spec.seq_id not in self._sampled:
                new.setdefault(spec.seq_id, (row, spec))  # the first one has no draft before it
        specs = [spec for _, spec in new.values()]
        self._sampler.admit([row for row, _ in new.values()], specs)
        self._sampled.update(spec.seq_id for spec in specs)
        self._penalized.update(
            spec.seq_id for spec in specs if spec.params.penalized or spec.params.min_tokens
        )

    def _launch(
        self, inputs: StepInputs, scheduled_batch: ScheduledBatch
    ) -> tuple[StepShape, Tensor]:
        """Send a step's inputs and launch the model; returns its shape and the result of `_run`."""
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
        if self._graphs is not None and captured is not None:
            return captured, self._graphs.replay(captured)
        # All kinds of calls have been made with checks by the warm-up.
        with trusted_tensors() if self._is_warm else nullcontext():
            return shape, self._run(shape, shared)

    def _run(self, shape: StepShape, num_shared_blocks: int = 0) -> Tensor:
        """Launch the model on the contents of the buffers, and sample from its logits.

        Returns the last hidden states [num_prompt_rows, hidden_size] of the other rows.
        """
        part = self._inputs.buffers(shape).part
        meta = self._inputs.metadata(shape, num_shared_blocks)
        sent, input_ids = part("input_ids", shape.num_tokens), self._input_ids[: shape.num_tokens]
        last_tokens = self._sampler.last_tokens.index_select(0, (-1 - sent).clamp_(min=0))
        torch.where(sent < 0, last_tokens, sent, out=input_ids)
        needed = part("logits_indices", shape.num_samples + shape.num_prompt_rows)
        if self._context is not None:
            self._context.has_adapters = shape.has_adapters
            if shape.has_adapters:
                self._context.copy_from(part("adapter_slots", shape.num_tokens), needed)
        hidden = self._model.forward(input_ids, self._attention, meta, needed)
        num_samples = shape.num_samples
        if num_samples:
            logits = self._logits[:num_samples]
            logits.copy_(self._model.compute_logits(hidden[:num_samples]))
            to = self._inputs.sample_rows(shape)
            self._sampler.sample(logits, to, self._tokens[:num_samples])
        return hidden[num_samples:]

    def _pool(self, hidden: Tensor, specs: list[PoolSpec]) -> Arrival | None:
        if not specs:
            return None
        return self._transfer.receive(self._pooler.pool(hidden, specs))

    def _change_and_sample(
        self, shape: StepShape, masks: TokenMasks | None, adjusted: list[SampleSpec]
    ) -> None:
        """Sample the last step again, from logits as the requests change them."""
        logits = self._logits[: shape.num_samples].float()
        if masks is not None:
            self._apply_masks(logits, masks)
        indices = self._inputs.buffers(shape).part("logits_indices", shape.num_samples)
        self._sampler.change_and_sample(
            logits,
            adjusted,
            self._input_ids.index_select(0, indices),
            self._inputs.sample_rows(shape),
            self._tokens[: shape.num_samples],
        )

    def _apply_masks(self, logits: Tensor, masks: TokenMasks) -> None:
        rows = np.array(masks.indices, np.int32)
        num_words = -(-self._model.config.vocab_size // 32)
        words = np.frombuffer(masks.bits, "<i4").reshape(len(rows), -1)[:, :num_words].copy()
        apply_token_masks(logits, self._transfer.send(rows), self._transfer.send(words))

    def _prompt_logprobs(
        self, hidden: Tensor, prompts: list[PromptLogprobsSpec]
    ) -> Iterator[DeviceLogprobs]:
        done = 0
        for token_ids, specs in cut_prompts(prompts):
            part = hidden[done : done + len(token_ids)]
            done += len(token_ids)
            logits = self._model.compute_logits(part)
            sent = self._transfer.send(np.array(token_ids, np.int32))
            yield DeviceLogprobs(logits, sent, specs, self._transfer)


def _powers_of_two(largest: int) -> list[int]:
    """Return the powers of two below a number."""
    return [1 << exponent for exponent in range((largest - 1).bit_length())]
