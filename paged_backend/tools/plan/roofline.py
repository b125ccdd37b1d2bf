"""The minimum time of a step on given GPUs, from the bytes to read and the operations to compute.

The roofline ignores launches, the host, the arithmetic of states, and the latency of links between
GPUs. Real steps are slower; `paged-backend bench` measures by how much.
"""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.checkpoint.decoder_tensors import num_read_again
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.tools.plan.gpus import Gpu
from paged_backend.tools.plan.groups import Group, Links
from paged_backend.tools.plan.number_types import KvType, WeightType
from paged_backend.tools.plan.sizes import (
    KvSizes,
    attention_flops,
    count_parameters,
    prompt_attention_flops,
    share_of_experts,
    state_bytes,
)


@dataclass(frozen=True, slots=True)
class StepRoofline:
    """The minimum time of one step, and the resource that bounds it."""

    num_tokens: float  # that the step processes
    seconds: float
    bound: str  # memory, compute or links

    @property
    def tokens_per_s(self) -> float:
        """The number of tokens per second if each step takes the minimum time."""
        return self.num_tokens / self.seconds


class Roofline:
    """The roofline of one model on a group of GPUs.

    With several stages, a batch is cut into as many parts, each of which is in another stage; a
    step lasts until every part has passed all stages.

    Args:
        shape: the model.
        weights: format of its weights.
        kv: format of keys and values.
        gpu: each of the GPUs.
        group: how they share the model.
        network_bytes_per_s: what a GPU can send to other nodes.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: WeightType,
        kv: KvType,
        gpu: Gpu,
        group: Group,
        network_bytes_per_s: float,
    ) -> None:
        parameters = count_parameters(shape)
        self._shape = shape
        self._parameters = parameters
        self._weights = weights
        self._group = group
        self._links = Links(gpu.link_gb_s * 1e9, network_bytes_per_s)
        self._kv = KvSizes.of(shape, kv, group.tensor)
        self._state_bytes = state_bytes(shape, weights, group.tensor)
        self._bytes_per_s = gpu.bytes_per_s
        self._read_again = num_read_again(shape)
        linear = parameters.linear + self._read_again
        self._linear = linear + parameters.experts * share_of_experts(shape, 1)
        self._head = parameters.head or parameters.embedding
        self._linear_rate = gpu.flops_per_s(weights.compute) * group.tensor
        self._rest_rate = gpu.flops_per_s(weights.rest_compute) * group.tensor

    def decode(self, batch_size: float, num_tokens: float) -> StepRoofline:
        """A decode step of `batch_size` sequences that hold `num_tokens` tokens each."""
        # A state is read and written.
        read = batch_size * (self._kv.bytes_seen(num_tokens) + 2 * self._state_bytes)
        attention = batch_size * attention_flops(self._shape, num_tokens)
        return self._step(batch_size, batch_size, read, attention)

    def prefill(self, num_tokens: int) -> StepRoofline:
        """A step that computes one whole prompt; only its last token enters the output layer."""
        written = self._kv.bytes_per_token * num_tokens + self._state_bytes
        attention = prompt_attention_flops(self._shape, num_tokens)
        return self._step(num_tokens, 1, written, attention)

    def request_seconds(
        self, batch_size: float, mean_input: float, mean_output: float, num_tokens: float
    ) -> float:
        """GPU time of one of `batch_size` requests: its prefill and its share of decode steps."""
        prefill = self.prefill(max(1, round(mean_input))).seconds
        return prefill + mean_output * self.decode(batch_size, num_tokens).seconds / batch_size

    def _step(
        self, num_tokens: float, num_outputs: float, kv_bytes: float, attention: float
    ) -> StepRoofline:
        """The time of a step, in which the stages compute one after another.

        Args:
            num_tokens: tokens that it computes.
            num_outputs: tokens that enter the output layer.
            kv_bytes: keys, values and states that each GPU reads or writes.
            attention: operations of attention in all layers of the model.
        """
        memory_s = (self._weight_bytes(num_tokens) + kv_bytes) / self._bytes_per_s
        rest = 2 * self._head * num_outputs + attention
        linear = 2 * self._linear * num_tokens
        compute_s = linear / self._linear_rate + rest / self._rest_rate
        hidden_bytes = num_tokens * self._shape.hidden_size * self._weights.rest_bits / 8
        links_s = (
            2 * self._shape.num_layers * self._links.all_reduce_seconds(self._group, hidden_bytes)
        )
        logits_bytes = num_outputs * self._shape.vocab_size * self._weights.rest_bits / 8
        links_s += self._links.send_seconds(self._group, hidden_bytes + logits_bytes)
        times = {"memory": memory_s, "compute": compute_s, "links": links_s}
        seconds = max(memory_s, compute_s) + links_s
        return StepRoofline(num_tokens, seconds, max(times, key=times.__getitem__))

    def _weight_bytes(self, num_tokens: float) -> float:
        """Bytes of weights that each GPU reads for some tokens, one GPU of each stage together."""
        share = share_of_experts(self._shape, num_tokens)
        again = self._read_again * self._weights.bits / 8
        return (self._parameters.bytes_of_step(self._weights, share) + again) / self._group.tensor
