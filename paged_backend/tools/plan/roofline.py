"""The minimum time of a step on given GPUs, from the bytes to read and the operations to compute.

The roofline ignores launches, the host, and communication between GPUs that share a model. Real
steps are slower; `paged-backend bench` measures by how much.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.checkpoint.shape import ModelShape
from paged_backend.tools.plan.gpus import Gpu
from paged_backend.tools.plan.number_types import KvType, WeightType
from paged_backend.tools.plan.sizes import (
    KvSizes,
    attention_flops,
    count_parameters,
    prompt_attention_flops,
    share_of_experts,
)


@dataclass(frozen=True, slots=True)
class StepRoofline:
    """The minimum time of one step, and the resource that bounds it."""

    num_tokens: float  # that the step processes
    seconds: float
    bound: str  # memory or compute

    @property
    def tokens_per_s(self) -> float:
        """The number of tokens per second if each step takes the minimum time."""
        return self.num_tokens / self.seconds


class Roofline:
    """The roofline of one model on `num_gpus` GPUs that share each layer."""

    def __init__(
        self, shape: ModelShape, weights: WeightType, kv: KvType, gpu: Gpu, num_gpus: int
    ) -> None:
        parameters = count_parameters(shape)
        self._shape = shape
        self._parameters = parameters
        self._weights = weights
        self._num_gpus = num_gpus
        self._kv = KvSizes.of(shape, kv, num_gpus)
        self._bytes_per_s = gpu.bytes_per_s
        self._linear = parameters.linear + parameters.experts * share_of_experts(shape, 1)
        self._head = parameters.head or parameters.embedding
        self._linear_rate = gpu.flops_per_s(weights.compute) * num_gpus
        self._rest_rate = gpu.flops_per_s(weights.rest_compute) * num_gpus

    def decode(self, batch_size: float, num_tokens: float) -> StepRoofline:
        """A decode step of `batch_size` sequences that hold `num_tokens` tokens each."""
        read = self._weight_bytes(batch_size) + batch_size * self._kv.bytes_seen(num_tokens)
        rest = 2 * self._head + attention_flops(self._shape, num_tokens)
        compute = batch_size * (2 * self._linear / self._linear_rate + rest / self._rest_rate)
        return _step(batch_size, read / self._bytes_per_s, compute)

    def prefill(self, num_tokens: int) -> StepRoofline:
        """A step that computes one whole prompt; only its last token enters the output layer."""
        moved = self._weight_bytes(num_tokens) + self._kv.bytes_per_token * num_tokens
        rest = 2 * self._head + prompt_attention_flops(self._shape, num_tokens)
        compute = 2 * self._linear * num_tokens / self._linear_rate + rest / self._rest_rate
        return _step(num_tokens, moved / self._bytes_per_s, compute)

    def _weight_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that each GPU reads in a step of some tokens."""
        share = share_of_experts(self._shape, num_tokens)
        return self._parameters.bytes_of_step(self._weights, share) / self._num_gpus

    def request_seconds(
        self, batch_size: float, mean_input: float, mean_output: float, num_tokens: float
    ) -> float:
        """GPU time of one of `batch_size` requests: its prefill and its share of decode steps."""
        prefill = self.prefill(max(1, round(mean_input))).seconds
        return prefill + mean_output * self.decode(batch_size, num_tokens).seconds / batch_size


def _step(num_tokens: float, memory_s: float, compute_s: float) -> StepRoofline:
    bound = "memory" if memory_s >= compute_s else "compute"
    return StepRoofline(num_tokens, max(memory_s, compute_s), bound)
