"""Samples the steps of a model runner, and keeps the results of the last one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from paged_kernels.token_masks import apply_token_masks
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec, ScheduledSequence
from paged_backend.core.scheduler_output import TokenMasks
from paged_backend.models.base import OutputConfig
from paged_backend.platforms.gpu.cuda_graphs import StepShape
from paged_backend.platforms.gpu.given_answers import GivenAnswers
from paged_backend.platforms.gpu.logprobs import DeviceLogprobs
from paged_backend.platforms.gpu.sampler import DeviceSampler
from paged_backend.platforms.gpu.step_inputs import DeviceInputs, StepInputs, max_num_samples
from paged_backend.platforms.gpu.texts import DeviceTexts
from paged_backend.platforms.gpu.transfer import Arrival, Transfer
from paged_backend.platforms.input_batch import InputBatch, Longs
from paged_backend.sampling.logprobs import places_with_logprobs, specs_of_samples
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.options.speculation import MAX_DRAFTS


class StepSampler:
    """Owns the sampler state of a device, and the logits and tokens of the last step.

    `sample` is a part of what a graph captures; `finish` follows it for each step.

    Args:
        config: the facts about the model's output.
        limits: the limits of a step.
        dtype: the dtype of logits.
        inputs: the inputs of the steps, which say what to sample.
        transfer: the way to the device.
        max_text: the longest text, if slices may depend on tokens in flight; otherwise 0.

    Attributes:
        num_wrong: [max_num_seqs + 1] int32, by how many tokens the slices of a row move back.
        texts: the texts of sequences, which set `num_wrong`; None for a draft model, where `follow`
            sets it, and for steps that are not scheduled ahead.
    """

    def __init__(
        self,
        config: OutputConfig,
        limits: StepLimits,
        dtype: torch.dtype,
        inputs: DeviceInputs,
        transfer: Transfer,
        max_text: int = 0,
    ) -> None:
        self._inputs = inputs
        self._transfer = transfer
        self._vocab_size = config.vocab_size
        self._sampled: set[int] = set()  # seq_ids of sequences with parameters on the device
        self._penalized: set[int] = set()  # the part of them with penalties or `min_tokens`
        self._with_text: set[int] = set()  # sequences with a text on the device
        num_rows = limits.max_num_seqs + 1
        # What takes the place of placeholders: the token of each row that was sampled last, then
        # the first draft of each row, and so on.
        self._known_tokens = torch.zeros(
            (1 + MAX_DRAFTS) * num_rows, dtype=torch.int32, device=transfer.device
        )
        self._sampler = DeviceSampler(
            self._known_tokens[:num_rows],
            config.vocab_size,
            frozenset(config.eos_token_ids),
            transfer,
        )
        self.num_wrong = torch.zeros(num_rows, dtype=torch.int32, device=transfer.device)
        self.texts: DeviceTexts | None = None
        if max_text:
            last_tokens = self._sampler.last_tokens
            self.texts = DeviceTexts(limits, max_text, last_tokens, self.num_wrong, transfer)
        # Results of the last step, at the same addresses for all graphs.
        num_samples = max_num_samples(limits) if config.has_output_layer else 0
        device = transfer.device
        self._logits = torch.empty(num_samples, config.vocab_size, dtype=dtype, device=device)
        self._tokens = torch.empty(num_samples, dtype=torch.int32, device=device)
        self._input_ids = torch.empty(inputs.max_num_tokens, dtype=torch.int64, device=device)

    def admit(self, inputs: StepInputs, items: Sequence[ScheduledSequence]) -> None:
        """Send the parameters of a step's sequences that are new, and new references.

        Args:
            inputs: the step.
            items: its sequences but the continued decodes.
        """
        self._forget_counts(items)
        new: dict[int, tuple[int, SampleSpec]] = {}
        for row, spec in zip(inputs.new_sample_rows, inputs.batch.scheduled_samples, strict=True):
            if spec.seq_id not in self._sampled:
                new.setdefault(spec.seq_id, (row, spec))  # the first one has no draft before it
        specs = [spec for _, spec in new.values()]
        rows = [row for row, _ in new.values()]
        self._sampler.admit(rows, specs)
        if self.texts is not None:
            self._admit_texts(self.texts, list(new.values()), items)
        self._sampled.update(spec.seq_id for spec in specs)
        self._penalized.update(
            spec.seq_id for spec in specs if spec.params.penalized or spec.params.min_tokens
        )

    def _admit_texts(
        self,
        texts: DeviceTexts,
        new: list[tuple[int, SampleSpec]],
        items: Sequence[ScheduledSequence],
    ) -> None:
        """Send the texts of new sequences, and what others have that the device has not sampled.

        Args:
            texts: the texts.
            new: rows and first samples of the sequences whose parameters are sent.
            items: see `admit`.
        """
        unknown = [(row, spec) for row, spec in new if spec.seq_id not in self._with_text]
        texts.admit([row for row, _ in unknown], [spec for _, spec in unknown])
        for item in items:
            row, num_tokens = self._inputs.rows[item.seq_id], len(item.token_ids)
            if _has_forced_tokens(item) and item.seq_id in self._with_text:
                forced = item.token_ids[1 : num_tokens - item.num_draft_tokens]
                texts.write(row, item.start + 1, forced)
            if item.reference_token_ids:
                texts.refer(row, item.reference_token_ids, item.start + num_tokens)
        self._with_text.update(spec.seq_id for _, spec in unknown)

    def give_answers(self, answers: GivenAnswers) -> None:
        """Let the tokens of these answers take the place of what is sampled."""
        self._sampler.answers = answers

    def release(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences."""
        for known in (self._sampled, self._penalized, self._with_text):
            known.difference_update(seq_ids)

    def input_ids(self, shape: StepShape) -> Tensor:
        """Return the input tokens of a step, [num_tokens] int64.

        What the last step has sampled takes the place of placeholders, and so do the drafts of a
        draft model.
        """
        sent = self._inputs.buffers(shape).part("input_ids", shape.num_tokens)
        input_ids = self._input_ids[: shape.num_tokens]
        known = self._known_tokens.index_select(0, (-1 - sent).clamp_(min=0))
        return torch.where(sent < 0, known, sent, out=input_ids)

    def newest_tokens(self, number: int) -> Tensor:
        """Return the first tokens of the last step, [number] int32."""
        return self._tokens[:number]

    def take_drafts(self, rows: Longs, place: int, tokens: Tensor) -> None:
        """Set a draft of some rows.

        Args:
            rows: [n] the rows.
            place: number of drafts before these.
            tokens: [n] int32, the drafts.
        """
        places = (1 + place) * len(self._sampler.last_tokens) + rows
        self._known_tokens.index_copy_(0, self._transfer.send(places), tokens)

    def follow(self, main: StepSampler, ends: Longs, width: int, num_penalized: int) -> None:
        """Let the next passes of a draft model begin where the texts of the model end.

        Args:
            main: the sampler of the model.
            ends: [4, n], of each sequence: its row in the model, its row here, the position of the
                first token to copy as if all drafts in flight were right, and 1 if there are any.
            width: number of tokens to copy.
            num_penalized: number of first sequences with penalties.
        """
        assert main.texts is not None
        of_main, rows, first, moves = self._transfer.send(ends)
        num_wrong = main.num_wrong.index_select(0, of_main)
        self.num_wrong.index_copy_(0, rows, num_wrong)
        places = torch.arange(width, device=rows.device)
        tokens = main.texts.read(of_main, (first - moves * num_wrong)[:, None] + places)
        known = self._known_tokens.view(-1, len(self.num_wrong))
        known[:width].index_copy_(1, rows, tokens.T)
        if num_penalized:
            sampler = main._sampler
            self._sampler.follow(sampler, of_main[:num_penalized], rows[:num_penalized])

    def sample(self, logits: Tensor, shape: StepShape) -> None:
        """Sample from the logits of a step [num_samples, vocab_size], which no request changes."""
        kept, tokens = self._results(shape)
        kept.copy_(logits)
        self._sampler.sample(kept, self._inputs.sample_rows(shape), tokens)
        self._keep(shape)

    @torch.inference_mode()
    def finish(
        self, batch: InputBatch, shape: StepShape, masks: TokenMasks | None
    ) -> tuple[Arrival, list[int], DeviceLogprobs | None]:
        """Launch the rest of the sampling of the step that was launched last.

        If a request changes its logits, the step is sampled again from the changed ones.

        Returns:
            The tokens, the places of those with logprobs, and their logprobs.
        """
        logits, tokens = self._results(shape)
        # Continued decodes have neither logprobs nor changes of single tokens' logits.
        new, num_continued = batch.scheduled_samples, len(batch.continued)
        places = [num_continued + place for place in places_with_logprobs(new)]
        index = self._transfer.send(np.array(places, np.int64)) if places else None
        untouched = None if index is None else logits.index_select(0, index)
        arrival = self._transfer.receive(self.draw(batch, shape, masks))
        if index is None or untouched is None:
            return arrival, [], None
        specs = specs_of_samples([new[place - num_continued] for place in places])
        chosen = tokens.index_select(0, index)
        return arrival, places, DeviceLogprobs(untouched, chosen, specs, self._transfer)

    def draw(self, batch: InputBatch, shape: StepShape, masks: TokenMasks | None) -> Tensor:
        """Do as `finish` does, but without logprobs; returns the tokens on the device."""
        is_adjusted = any(spec.params.adjusts_tokens for spec in batch.scheduled_samples)
        adjusted = batch.samples if is_adjusted else []
        if masks is not None or adjusted or self._penalized:
            self._change_and_sample(shape, masks, adjusted)
        return self._results(shape)[1]

    def forget_counts(self, seq_ids: Iterable[int]) -> None:
        """Let the tokens of sequences with penalties be counted anew, when they are admitted."""
        if self._penalized:
            self._sampled.difference_update(self._penalized.intersection(seq_ids))

    def tokens_before_samples(self, shape: StepShape) -> Tensor:
        """Return the token before each sample of a step, [num_samples] int64."""
        indices = self._inputs.buffers(shape).part("logits_indices", shape.num_samples)
        return self._input_ids.index_select(0, indices)

    def receive_drafts(self, shape: StepShape) -> Arrival:
        """Start to copy the drafts that were drawn from texts to the host, before the forward pass.

        The copy has the token before each sample. Only those that are drafts are valid.
        """
        part = self._inputs.buffers(shape).part
        indices = part("logits_indices", shape.num_samples)
        return self._transfer.receive(part("input_ids", shape.num_tokens).index_select(0, indices))

    def receive_inputs(self, shape: StepShape) -> Arrival:
        """Start to copy the token before each sample of the last step to the host."""
        return self._transfer.receive(self.tokens_before_samples(shape))

    def _keep(self, shape: StepShape) -> None:
        """Add the tokens of a step to the texts of its sequences."""
        if self.texts is not None:
            _, tokens = self._results(shape)
            rows = self._inputs.sample_rows(shape)
            self.texts.keep(rows, tokens, self.tokens_before_samples(shape))

    def _results(self, shape: StepShape) -> tuple[Tensor, Tensor]:
        """Return the logits and the tokens of a step."""
        return self._logits[: shape.num_samples], self._tokens[: shape.num_samples]

    def _forget_counts(self, items: Iterable[ScheduledSequence]) -> None:
        """Let the tokens of sequences be counted anew that a grammar has forced tokens upon.

        The device counts what it samples. A slice with known tokens after its first one has tokens
        that the device has not sampled.
        """
        if self._penalized:
            for item in items:
                if _has_forced_tokens(item) and item.seq_id in self._penalized:
                    self._sampled.discard(item.seq_id)

    def _change_and_sample(
        self, shape: StepShape, masks: TokenMasks | None, adjusted: list[SampleSpec]
    ) -> None:
        """Sample the last step again, from logits as the requests change them."""
        kept, tokens = self._results(shape)
        logits = kept.float()
        if masks is not None:
            self._apply_masks(logits, masks)
        self._sampler.change_and_sample(
            logits,
            adjusted,
            self.tokens_before_samples(shape),
            self._inputs.sample_rows(shape),
            tokens,
        )
        self._keep(shape)

    def _apply_masks(self, logits: Tensor, masks: TokenMasks) -> None:
        rows = np.array(masks.indices, np.int32)
        num_words = -(-self._vocab_size // 32)
        words = np.frombuffer(masks.bits, "<i4").reshape(len(rows), -1)[:, :num_words].copy()
        apply_token_masks(logits, self._transfer.send(rows), self._transfer.send(words))


def _has_forced_tokens(item: ScheduledSequence) -> bool:
    """Return True if known tokens follow the first one, which a grammar forces upon a decode."""
    return len(item.token_ids) - item.num_draft_tokens > 1
