"""The least time of a step on given GPUs: what must be read, and what must be computed.

Nothing is counted for launches, the host, or what GPUs that share a model tell each other: real
steps are slower, by how much is what `paged-backend bench` measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.checkpoint.shape import ModelShape
from paged_backend.plan.gpus import Gpu
from paged_backend.plan.number_types import KvType, WeightType
from paged_backend.plan.sizes import (
    KvSizes,
    attention_flops,
    count_parameters,
    prompt_attention_flops,
)


@dataclass(frozen=True, slots=True)
class Step:
    """The least time of one step, and which of the two demands it is."""

    num_tokens: float  # that the step brings forward
    seconds: float
    bound: str  # memory or compute

    @property
    def tokens_per_s(self) -> float:
        """At that time."""
        return self.num_tokens / self.seconds


class Roofline:
    """Of one model on `num_gpus` GPUs that share each layer between them."""

    def __init__(
        self, shape: ModelShape, weights: WeightType, kv: KvType, gpu: Gpu, num_gpus: int
    ) -> None:
        parameters = count_parameters(shape)
        self._shape = shape
        self._weight_bytes = parameters.bytes_of_step(weights) / num_gpus
        self._kv = KvSizes.of(shape, kv, num_gpus)
        self._bytes_per_s = gpu.bytes_per_s
        self._linear = parameters.linear
        self._head = parameters.head or parameters.embedding
        self._linear_rate = gpu.flops_per_s(weights.compute) * num_gpus
        self._rest_rate = gpu.flops_per_s(weights.rest_compute) * num_gpus

    def decode(self, batch_size: float, num_tokens: float) -> Step:
        """A token for each of `batch_size` sequences that hold `num_tokens` tokens each."""
        read = self._weight_bytes + batch_size * self._kv.bytes_seen(num_tokens)
        rest = 2 * self._head + attention_flops(self._shape, num_tokens)
        compute = batch_size * (2 * self._linear / self._linear_rate + rest / self._rest_rate)
        return _step(batch_size, read / self._bytes_per_s, compute)

    def prefill(self, num_tokens: int) -> Step:
        """A whole prompt alone; only its last token passes through the output layer."""
        moved = self._weight_bytes + self._kv.bytes_per_token * num_tokens
        rest = 2 * self._head + prompt_attention_flops(self._shape, num_tokens)
        compute = 2 * self._linear * num_tokens / self._linear_rate + rest / self._rest_rate
        return _step(num_tokens, moved / self._bytes_per_s, compute)

    def request_seconds(
        self, batch_size: float, mean_input: float, mean_output: float, num_tokens: float
    ) -> float:
        """GPU time of one request among `batch_size`: its prefill and its share of the steps."""
        prefill = self.prefill(max(1, round(mean_input))).seconds
        return prefill + mean_output * self.decode(batch_size, num_tokens).seconds / batch_size


def _step(num_tokens: float, memory_s: float, compute_s: float) -> Step:
    bound = "memory" if memory_s >= compute_s else "compute"
    return Step(num_tokens, max(memory_s, compute_s), bound)
