"""The steps of a model runner that a device may still compute, and their outputs."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.core.scheduled_batch import ScheduledBatch
from paged_backend.core.scheduler_output import LaunchedStep, ModelRunnerOutput, TokenMasks
from paged_backend.platforms.drafts import keep_accepted
from paged_backend.platforms.gpu.cuda_graphs import StepShape
from paged_backend.platforms.gpu.logprobs import DeviceLogprobs
from paged_backend.platforms.gpu.step_sampler import StepSampler
from paged_backend.platforms.gpu.transfer import Arrival, Timer
from paged_backend.platforms.input_batch import InputBatch
from paged_backend.platforms.pooling import pooled_bytes
from paged_backend.sampling.logprobs import split_by_prompt


@dataclass(frozen=True, slots=True)
class PredictedDrafts:
    """The number of drafts of each sequence that the device has taken from its prediction."""

    seq_ids: list[int]
    numbers: Arrival

    def wait(self) -> dict[int, int]:
        """Wait for the device; returns the numbers by ``seq_id``, without zeros."""
        pairs = zip(self.seq_ids, self.numbers.wait(), strict=True)
        return {seq_id: number for seq_id, number in pairs if number}


@dataclass(frozen=True, slots=True)
class InFlightOutput:
    """The output of a step that the device may still compute or copy to the host.

    `tokens` has one token for each sample of `batch`, then padding, and so has `inputs`: the tokens
    before the samples, if the device has drawn drafts.
    """

    tokens: Arrival
    inputs: Arrival | None
    scheduled_batch: ScheduledBatch
    batch: InputBatch
    places: list[int]  # indices of the samples with logprobs
    logprobs: DeviceLogprobs | None
    prompt_logprobs: list[DeviceLogprobs]
    predicted: PredictedDrafts | None  # None without predictions

    def result(self) -> ModelRunnerOutput:
        """Wait for the device."""
        tokens = self.tokens.wait()[: len(self.batch.sample_positions)]
        logprobs = [] if self.logprobs is None else self.logprobs.wait()
        scheduled_batch = self.scheduled_batch
        if self.inputs is not None:
            drawn = _drawn(scheduled_batch, self.inputs.wait())
            scheduled_batch = scheduled_batch.with_drafts(drawn)
        by_place = dict(zip(self.places, logprobs, strict=True))
        of_prompts = [row for part in self.prompt_logprobs for row in part.wait()]
        return ModelRunnerOutput(
            *keep_accepted(scheduled_batch, tokens, by_place),
            split_by_prompt(self.batch.prompts, of_prompts),
            num_predicted={} if self.predicted is None else self.predicted.wait(),
        )


def _draws(scheduled_batch: ScheduledBatch) -> bool:
    """Return True if the device draws drafts for the step."""
    return any(item.draws_drafts for item in scheduled_batch.scheduled)


def _drawn(scheduled_batch: ScheduledBatch, inputs: list[int]) -> dict[int, list[int]]:
    """Return the drafts that the device has drawn, by ``seq_id``.

    Args:
        scheduled_batch: the step.
        inputs: the token before each sample.
    """
    drawn: dict[int, list[int]] = {}
    place = len(scheduled_batch.continued.sequences)
    for item in scheduled_batch.scheduled:
        end = place + len(item.samples)
        if item.draws_drafts:
            drawn[item.seq_id] = inputs[place + 1 : end]
        place = end
    return drawn


@dataclass(frozen=True, slots=True)
class LaunchedGpuStep(LaunchedStep):
    """A step with a forward pass that is on its way; see LaunchedStep."""

    sampler: StepSampler
    scheduled_batch: ScheduledBatch
    batch: InputBatch
    shape: StepShape
    prompt_logprobs: list[DeviceLogprobs]
    predicted: PredictedDrafts | None
    # The tokens before the samples, of which only drafts from texts are known; None without these.
    drafts: Arrival | None

    def drafts_from_texts(self) -> dict[int, list[int]]:
        """Wait for the step before this one, and for the drafts that follow it."""
        return {} if self.drafts is None else _drawn(self.scheduled_batch, self.drafts.wait())

    def sample(self, masks: TokenMasks | None = None) -> InFlightOutput:
        """Launch the rest of the sampling of the step."""
        batch = self.batch
        tokens, places, logprobs = self.sampler.finish(batch, self.shape, masks)
        inputs = self.drafts
        if inputs is None and _draws(self.scheduled_batch):
            inputs = self.sampler.receive_inputs(self.shape)
        return InFlightOutput(
            *(tokens, inputs, self.scheduled_batch, batch, places, logprobs),
            self.prompt_logprobs,
            self.predicted,
        )


@dataclass(frozen=True, slots=True)
class DrawnPass:
    """Tokens of a draft model that the device may still compute; see PendingTokens."""

    tokens: Arrival
    timer: Timer

    def wait(self) -> list[int]:
        """Wait for the device."""
        return self.tokens.wait()

    @property
    def seconds(self) -> float:
        """Seconds that the device has taken."""
        return self.timer.seconds


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
