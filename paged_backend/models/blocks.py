"""Blocks that the layers of most decoders are made of: attention and a gated MLP."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.stored_tensor import Parameter, StoredTensor, StoredType
from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.layers import Kernels, QKNorm
from paged_backend.models.linear import LinearSpec


class Attention:
    """Self-attention; queries, keys and values are computed as one product.

    Args:
        config: sizes and variants of the model.
        index: the layer's number.
        prefix: the name of the module in the checkpoint.
        cos_sin_cache: the layer's rotary table, see `AttentionLayer`.
        kernels: the platform.
    """

    def __init__(
        self, config: ModelConfig, index: int, prefix: str, cos_sin_cache: Tensor, kernels: Kernels
    ) -> None:
        sizes = config.num_heads, config.num_kv_heads, config.head_dim
        query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qk_norm = QKNorm(*sizes, config.rms_norm_eps, kernels) if config.qk_norm else None
        self.layer = AttentionLayer(
            index,
            *sizes,
            scale=config.head_dim**-0.5,
            cos_sin_cache=cos_sin_cache,
            window=config.windows[index],
            qk_norm=self.qk_norm,
        )
        scale = StoredType((config.num_kv_heads,), optional=True, one_for_all=True)
        self._kv_scales = {name: StoredTensor(scale) for name in ("k_scale", "v_scale")}
        self._device = kernels.device
        parts = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
        hidden, biases = config.hidden_size, config.biases
        self.qkv_proj = kernels.linear(LinearSpec(hidden, parts, biases.qkv, prefix))
        output = LinearSpec(query, {"o_proj": hidden}, biases.output, prefix)
        self.o_proj = kernels.linear(output)

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to `self_attn`."""
        parameters = self.qkv_proj.parameters() | self.o_proj.parameters()
        if self.qk_norm is not None:
            parameters["q_norm.weight"] = self.qk_norm.query
            parameters["k_norm.weight"] = self.qk_norm.key
        return parameters | self._kv_scales

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        if self.qk_norm is not None:
            self.qk_norm.pack()
        self.qkv_proj.pack()
        self.o_proj.pack()
        k_scale, v_scale = (self._kv_scale(place) for place in self._kv_scales.values())
        self.layer = replace(self.layer, k_scale=k_scale, v_scale=v_scale)

    def _kv_scale(self, place: StoredTensor) -> Tensor | None:
        if not place.filled:
            return None
        place.check_scale()
        return place.value.to(self._device, torch.float32).contiguous()

    def attend(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute attention without the output projection: [num_tokens, num_heads * head_dim]."""
        return backend.attend(self.layer, self.qkv_proj(x), meta)


class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up are computed as one product."""

    def __init__(self, config: ModelConfig, prefix: str, kernels: Kernels) -> None:
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.biases.mlp
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = kernels.linear(LinearSpec(hidden, parts, bias, prefix))
        self.down_proj = kernels.linear(LinearSpec(inner, {"down_proj": hidden}, bias, prefix))
        self._silu_and_mul = kernels.layers.silu_and_mul

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to `mlp`."""
        return self.gate_up_proj.parameters() | self.down_proj.parameters()

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self.gate_up_proj.pack()
        self.down_proj.pack()

    def activate(self, x: Tensor) -> Tensor:
        """Compute the input of `down_proj`, silu(gate(x)) * up(x): [rows, intermediate_size]."""
        return self._silu_and_mul(self.gate_up_proj(x))


def prefixed(prefix: str, parameters: dict[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters with a prefix and a dot in front of each name."""
    return {f"{prefix}.{name}": parameter for name, parameter in parameters.items()}
