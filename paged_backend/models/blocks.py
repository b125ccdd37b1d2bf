"""Blocks that the layers of most decoders are made of: attention and a gated MLP."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import relu

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.shape import QKNormScope
from paged_backend.checkpoint.stored_tensor import Parameter, StoredTensor, StoredType
from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.head_order import head_order, row_order
from paged_backend.models.layers import Kernels, NormWeights, QKNorm
from paged_backend.models.linear import LinearMethod, LinearSpec, RowFunction


class Attention:
    """Self-attention; queries, keys and values are computed as one product.

    Args:
        config: sizes and variant of the model.
        index: the layer's number.
        layer_name: the name of the layer in the checkpoint.
        cos_sin_cache: the layer's rotary table, see `AttentionLayer`.
        kernels: the platform.
    """

    kept_state = None

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        layer_name: str,
        cos_sin_cache: Tensor,
        kernels: Kernels,
    ) -> None:
        variant, self.name = config.variant, config.variant.names.attention
        prefix = f"{layer_name}.{self.name}"
        layer = config.sizes_of(index)
        sizes = config.num_heads, layer.num_kv_heads, layer.head_dim
        shares = layer.shared_with is not None
        self._norms = NormWeights(kernels, unit_offset=variant.unit_offset)
        self._head_norm = self._token_norm = None
        self._has_norm_weights = variant.qk_norm is QKNormScope.HEAD
        is_rotated_head = variant.qk_norm is QKNormScope.ROTATED_HEAD
        if self._has_norm_weights or (is_rotated_head and variant.is_rotated(index)):
            kv_heads = 0 if shares else layer.num_kv_heads
            norm_sizes = config.num_heads, kv_heads, layer.head_dim
            self._head_norm = QKNorm(*norm_sizes, config.rms_norm_eps, self._norms)
            if not self._has_norm_weights:
                self._head_norm.fill(1.0)
        elif variant.qk_norm is QKNormScope.TOKEN:
            self._token_norm = TokenNorm(config, index, self._norms, kernels)
        sinks = torch.empty(config.num_heads, device=kernels.device) if variant.sinks else None
        self.layer = AttentionLayer(
            index,
            *sizes,
            scale=variant.attention_scale or layer.head_dim**-0.5,
            cos_sin_cache=cos_sin_cache,
            window=config.windows[index],
            qk_norm=self._head_norm,
            softcap=variant.attention_softcap,
            sinks=sinks,
            shared_with=layer.shared_with,
        )
        self._value_norm: ValueNorm | None = None
        if variant.value_norm and not shares:
            self._value_norm = ValueNorm(self.layer, config.rms_norm_eps, kernels)
        self._keys_as_values = layer.keys_as_values
        self._is_alone = not variant.parallel_mixers
        self._gated, self._names = variant.gated_attention, variant.names
        self._multiply_sigmoid = kernels.layers.multiply_sigmoid
        self._head_order = head_order(config.ropes[index], interleaved=variant.rotary.interleaved)
        self._query_size = config.num_heads * layer.head_dim
        self._query_scales = _query_scales(config, index, cos_sin_cache, kernels.dtype)
        scale = StoredType((layer.num_kv_heads,), optional=True, one_for_all=True)
        self._kv_scales = {name: StoredTensor(scale) for name in ("k_scale", "v_scale")}
        self._device = kernels.device
        hidden, biases = config.hidden_size, variant.biases
        order, parts = row_order(config, index), config.attention_parts(index)
        self.qkv_proj = kernels.linear(LinearSpec(hidden, parts, biases.qkv, prefix, order))
        output = LinearSpec(self._query_size, {variant.names.output: hidden}, biases.output, prefix)
        self.o_proj = kernels.linear(output)

    @property
    def reader(self) -> LinearMethod:
        """The layer that alone reads the input."""
        return self.qkv_proj

    @property
    def kept_tokens(self) -> AttentionLayer | None:
        """The layer's keys and values; None if another layer keeps them."""
        return self.layer if self.layer.keeps_tokens else None

    def share(self, keeper: AttentionLayer) -> None:
        """Read 8-bit keys and values with the scales of the layer that keeps them, after `pack`."""
        self.layer = replace(self.layer, k_scale=keeper.k_scale, v_scale=keeper.v_scale)

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to `self_attn`."""
        parameters = self.qkv_proj.parameters() | self.o_proj.parameters()
        norm = (self._head_norm if self._has_norm_weights else None) or self._token_norm
        if norm is not None:
            parameters[f"{self._names.q_norm}.weight"] = norm.query
            if self.layer.keeps_tokens:
                parameters[f"{self._names.k_norm}.weight"] = norm.key
        if self.layer.sinks is not None:
            parameters["sinks"] = self.layer.sinks
        return parameters | (self._kv_scales if self.layer.keeps_tokens else {})

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self._norms.pack()
        if self._head_norm is not None:
            self._head_norm.pack(self._head_order.to(self._device))
        self.qkv_proj.pack()
        self.o_proj.pack()
        k_scale, v_scale = (self._kv_scale(place) for place in self._kv_scales.values())
        reader = self.o_proj if self._is_alone and not self._gated else None
        self.layer = replace(self.layer, k_scale=k_scale, v_scale=v_scale, reader=reader)

    def _kv_scale(self, place: StoredTensor) -> Tensor | None:
        if not place.filled:
            return None
        place.check_scale()
        return place.value.to(self._device, torch.float32).contiguous()

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute attention without the output projection: [num_tokens, num_heads * head_dim]."""
        qkv = self.qkv_proj(x)
        if self._gated:
            gate, qkv = qkv[:, : self._query_size], qkv[:, self._query_size :]
            out = backend.attend(self.layer, qkv, meta)
            self._multiply_sigmoid(out, gate)
            return out
        if self._keys_as_values:
            qkv = torch.cat((qkv, qkv[:, self._query_size :]), dim=1)
        if self._token_norm is not None:
            self._token_norm.apply(qkv)
        if self._value_norm is not None:
            self._value_norm.apply(qkv)
        if self._query_scales is not None:
            qkv[:, : self._query_size] *= self._query_scales[meta.positions].unsqueeze(1)
        return backend.attend(self.layer, qkv, meta)


class TokenNorm:
    """An RMS norm of all queries of a token together, and one of its keys (OLMo 2).

    The constructor allocates the weights without values. Fill `query` [num_heads * head_dim] and
    `key` [num_kv_heads * head_dim].
    """

    def __init__(
        self, config: ModelConfig, index: int, norms: NormWeights, kernels: Kernels
    ) -> None:
        sizes = config.qk_norm_sizes(index)
        self.query, self.key = (norms.empty(size) for size in sizes.values())
        self._eps = config.rms_norm_eps
        self._norm = kernels.token_norm

    def apply(self, qkv: Tensor) -> None:
        """Apply the norms to the queries and keys of `qkv` [num_tokens, size], in place."""
        start = 0
        for weight in (self.query, self.key):
            part = qkv[:, start : start + len(weight)]
            part.copy_(self._norm(part, weight, self._eps))
            start += len(weight)


class ValueNorm:
    """An RMS norm without a weight of each head of the values (Gemma 4)."""

    def __init__(self, layer: AttentionLayer, eps: float, kernels: Kernels) -> None:
        self._size, self._eps = layer.num_kv_heads * layer.head_dim, eps
        self._ones = torch.ones(layer.head_dim, dtype=kernels.dtype, device=kernels.device)
        self._norm = kernels.layers.rms_norm

    def apply(self, qkv: Tensor) -> None:
        """Apply the norm to the values of `qkv` [num_tokens, size], in place."""
        values = qkv[:, -self._size :]
        heads = values.reshape(-1, len(self._ones))
        values.copy_(self._norm(heads, self._ones, self._eps).view(values.shape))


class GatedMLP:
    """down(act(gate(x)) * up(x)); gate and up are computed as one product.

    Args:
        config: sizes and variant of the model.
        index: the layer's number.
        prefix: the name of the module in the checkpoint.
        kernels: the platform.
    """

    def __init__(self, config: ModelConfig, index: int, prefix: str, kernels: Kernels) -> None:
        hidden, inner = config.hidden_size, config.sizes_of(index).intermediate_size
        bias, down = config.variant.biases.mlp, config.variant.names.down
        self._factors = config.variant.factors
        gated = self._factors.mlp_gate == 1
        gate_up = LinearSpec(hidden, config.mlp_parts(index), bias, prefix, gated=gated)
        self.gate_up_proj = kernels.linear(gate_up)
        self.down_proj = kernels.linear(LinearSpec(inner, {down: hidden}, bias, prefix))
        self._gated, self._activation = kernels.layers.gated, config.variant.activation

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to `mlp`."""
        return self.gate_up_proj.parameters() | self.down_proj.parameters()

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self.gate_up_proj.pack()
        self.down_proj.pack()

    @property
    def reader(self) -> LinearMethod:
        """The layer that alone reads the input."""
        return self.gate_up_proj

    def activate(self, x: Tensor) -> Tensor:
        """Compute the input of `down_proj`, act(gate(x)) * up(x): [rows, intermediate_size]."""
        linear: RowFunction = self.gate_up_proj
        if self._factors.mlp_gate != 1:
            linear = _ScaledGate(linear, self._factors.mlp_gate)
        return self._gated(linear, x, self._activation)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the output [rows, hidden_size] for `x` [rows, hidden_size]."""
        output = self.down_proj(self.activate(x))
        return output if self._factors.mlp_output == 1 else output * self._factors.mlp_output

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` [rows, hidden_size] in place."""
        if self._factors.mlp_output == 1:
            self.down_proj.add_to(out, self.activate(x))
        else:
            out += self(x)


class _ScaledGate:
    """Gate and up of an MLP with a factor on the gate; see `models.linear.RowFunction`."""

    def __init__(self, linear: RowFunction, factor: float) -> None:
        self._linear, self._factor = linear, factor

    def __call__(self, x: Tensor) -> Tensor:
        """Compute gate * factor, and then up, for each row of `x`."""
        gate_up = self._linear(x)
        gate_up[:, : gate_up.shape[1] // 2] *= self._factor
        return gate_up

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` in place."""
        out += self(x)


class PlainMLP:
    """down(max(up(x), 0) ** 2), an MLP without a gate (Nemotron-H)."""

    def __init__(self, config: ModelConfig, index: int, prefix: str, kernels: Kernels) -> None:
        hidden, inner = config.hidden_size, config.sizes_of(index).intermediate_size
        bias, down = config.variant.biases.mlp, config.variant.names.down
        self.up_proj = kernels.linear(LinearSpec(hidden, config.mlp_parts(index), bias, prefix))
        self.down_proj = kernels.linear(LinearSpec(inner, {down: hidden}, bias, prefix))

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        return self.up_proj.parameters() | self.down_proj.parameters()

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self.up_proj.pack()
        self.down_proj.pack()

    @property
    def reader(self) -> LinearMethod:
        """The layer that alone reads the input."""
        return self.up_proj

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the output [rows, hidden_size] for `x` [rows, hidden_size]."""
        return self.down_proj(relu(self.up_proj(x)).square_())

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` [rows, hidden_size] in place."""
        self.down_proj.add_to(out, relu(self.up_proj(x)).square_())


def prefixed(prefix: str, parameters: dict[str, Parameter]) -> dict[str, Parameter]:
    """Return the parameters with a prefix and a dot in front of each name, if there is a prefix."""
    if not prefix:
        return parameters
    return {f"{prefix}.{name}": parameter for name, parameter in parameters.items()}


def _query_scales(
    config: ModelConfig, index: int, table: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """Return the factor on the queries of a layer at each position of its rotary table."""
    growth = config.variant.query_growth
    if growth is None or (growth.only_unrotated and config.variant.is_rotated(index)):
        return None
    periods = (torch.arange(len(table), device=table.device) + growth.first) // growth.period
    return (1 + growth.rate * torch.log(1 + periods.float())).to(dtype)
