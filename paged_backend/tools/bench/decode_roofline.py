"""The roofline of a decode step: the minimum time that memory and arithmetic of a device allow.

A decode step must read each weight once, multiply by it once for each sequence, read the keys and
values of each sequence, and read and write its states. The roofline is the longer of the first two
times plus the last two: a layer's matrix products and its attention run one after the other. A
block of weights that several layers use counts once for each of them. Quantized weights, keys and
values count with the bytes that they are stored in.
"""

from __future__ import annotations

import torch

from paged_backend.checkpoint.decoder_tensors import num_read_again
from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.tensors import Role
from paged_backend.values.windows import num_visible


class DecodeRoofline:
    """The minimum time of a decode step on a device of a given speed.

    Args:
        config: configuration of the model.
        dtype: type of weights, keys and values that are not quantized.
        bytes_per_s: bandwidth of the device's memory.
        flops_per_s: speed of its matrix products; infinite if unknown.
        held_bytes: all bytes of the weights of a quantized model; None: they have `dtype`.
        kv_bytes_per_token: size of the keys and values of all layers; None: they have `dtype`.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        bytes_per_s: float,
        flops_per_s: float,
        *,
        held_bytes: int | None = None,
        kv_bytes_per_token: int | None = None,
    ) -> None:
        # A lookup reads only a few rows of an embedding; a tied output layer reads it whole.
        looked_up = {Role.LAYER_EMBEDDING}
        if not config.tied_embeddings:
            looked_up.add(Role.EMBEDDING)
        weights = tensors_of(config).values()
        skipped = sum(spec.num_elements for spec in weights if spec.role in looked_up)
        self._num_read = sum(spec.num_elements for spec in weights) - skipped
        again = num_read_again(config)
        self._num_read += again
        self._num_experts = sum(spec.num_elements for spec in weights if spec.role is Role.EXPERT)
        if held_bytes is None:
            self.weight_bytes = self._num_read * dtype.itemsize
        else:  # embeddings that are looked up are not quantized
            held = held_bytes - skipped * dtype.itemsize
            self.weight_bytes = round(held * self._num_read / (self._num_read - again))
        kept = sum(config.kept_of(layer).numbers for layer in config.keeping_layers)
        if kv_bytes_per_token is None:
            kv_bytes_per_token = kept * dtype.itemsize
        self.kv_bytes_per_token = kv_bytes_per_token
        kept_by_states = (mixer.kept_numbers for mixer in config.variant.state_mixers if mixer)
        self.state_bytes = sum(own * dtype.itemsize + 4 * exact for own, exact in kept_by_states)
        self.bytes_per_s = bytes_per_s
        self.flops_per_s = flops_per_s
        self._moe = config.moe
        # The share of a token's bytes that each layer with attention reads, and its window.
        self._layers = [
            (config.kept_of(layer).numbers / kept, config.windows[layer])
            for layer in config.attention_layers
        ]

    def step_seconds(self, batch_size: int, kv_tokens: int) -> float:
        """The minimum time with `kv_tokens` tokens in total; a layer reads at most its window."""
        length = kv_tokens / batch_size
        read = sum(share * num_visible(length, window) for share, window in self._layers)
        moved = read * self.kv_bytes_per_token + 2 * self.state_bytes
        attention = batch_size * moved / self.bytes_per_s
        reading = self.weight_bytes * self._share_used(batch_size) / self.bytes_per_s
        flops = 2 * batch_size * self._num_read * self._share_used(1)
        return max(reading, flops / self.flops_per_s) + attention

    def _share_used(self, num_tokens: int) -> float:
        """The share of the weights that some tokens use, as each of them chooses some experts."""
        share = 1.0 if self._moe is None else self._moe.share_of_experts(num_tokens)
        return 1 - (1 - share) * self._num_experts / self._num_read
