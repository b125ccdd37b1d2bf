"""Latent attention with the up-projections of keys and values moved to queries and results.

A key of a head is a product of the token's latent vector, so the score of a query with it equals
that of another query with the latent vector itself. All heads then attend to the same rows of the
cache: latent vectors, each with the rotary key. Their sums become values afterwards. DeepSeek-AI,
"DeepSeek-V2" (2024), section 2.1.2, describes how the weights are absorbed.

Prompts are computed in this way, too. With the keys and values of all heads, a pair of tokens of
DeepSeek-V3 would take a third of the arithmetic. But a token's bits would then depend on whether it
is in a prompt or decoded, and decodes cannot have them: to compute a head's key and value takes 120
times the arithmetic of attending to the latent vector once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata, LatentLayer
from paged_backend.models.layers import Kernels, NormWeights
from paged_backend.models.linear import LinearMethod, LinearSpec

_QUERY_NORM, _LATENT_NORM = "q_a_layernorm", "kv_a_layernorm"


class LatentAttention:
    """Self-attention over latent vectors.

    Args:
        config: sizes and variant of the model, with latent attention.
        index: the layer's number.
        layer_name: the name of the layer in the checkpoint.
        cos_sin_cache: the layer's rotary table, see `LatentLayer`.
        kernels: the platform.
    """

    name = "self_attn"
    kept_state = None

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        layer_name: str,
        cos_sin_cache: Tensor,
        kernels: Kernels,
    ) -> None:
        prefix = f"{layer_name}.{self.name}"
        variant, shape = config.variant, config.variant.latent
        assert shape is not None and variant.attention_scale is not None
        self._shape, self._num_heads = shape, config.num_heads
        self._interleaved = variant.rotary.interleaved
        self._functions, self._dtype, self._device = kernels.layers, kernels.dtype, kernels.device
        self.layer = LatentLayer(
            index,
            config.num_heads,
            shape.rank,
            shape.rotary_dim,
            scale=variant.attention_scale,
            cos_sin_cache=cos_sin_cache,
        )
        weights = NormWeights(kernels, unit_offset=False)
        self._norms = {name: weights.empty(size) for name, size in shape.norms.items()}
        hidden, queries = config.hidden_size, config.num_heads * shape.query_dim
        down = shape.down_parts
        self._query_up: LinearMethod | None = None
        if shape.query_rank is None:  # all layers that read hidden states are one product
            down = {shape.query_name: queries, **down}
        else:
            spec = LinearSpec(shape.query_rank, {shape.query_name: queries}, prefix=prefix)
            self._query_up = kernels.linear(spec)
        self.reader = kernels.linear(LinearSpec(hidden, down, variant.biases.qkv, prefix))
        outputs = config.num_heads * (shape.plain_dim + shape.value_dim)
        up = LinearSpec(shape.rank, {"kv_b_proj": outputs}, prefix=prefix, full_precision=True)
        self._up: LinearMethod | None = kernels.linear(up)
        self._key_weight = self._value_weight = torch.empty(0)
        values = config.num_heads * shape.value_dim
        output = LinearSpec(values, {"o_proj": hidden}, variant.biases.output, prefix)
        self.o_proj = kernels.linear(output)

    @property
    def kept_tokens(self) -> LatentLayer:
        """The layer's rows of the cache."""
        return self.layer

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to `self_attn`."""
        parameters: dict[str, Parameter] = {
            f"{name}.weight": weight for name, weight in self._norms.items()
        }
        for linear in (self.reader, self._query_up, self._up, self.o_proj):
            if linear is not None:
                parameters |= linear.parameters()
        return parameters

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read.

        The up-projection of keys and values is kept as two dense weights, [heads, plain_dim, rank]
        and [heads, rank, value_dim].
        """
        for linear in (self.reader, self._query_up, self._up, self.o_proj):
            if linear is not None:
                linear.pack()
        assert self._up is not None
        shape, heads = self._shape, self._num_heads
        sizes = [shape.plain_dim, shape.value_dim]
        index = torch.arange(heads * sum(sizes), device=self._device)
        weight = self._up.rows(index).to(self._dtype)
        by_head = weight.view(heads, sum(sizes), shape.rank)
        keys, values = torch.split(by_head, sizes, dim=1)
        self._key_weight = keys.contiguous()
        self._value_weight = values.transpose(1, 2).contiguous()
        self._up = None

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute attention without the output projection: [num_tokens, num_heads * value_dim]."""
        shape, heads, down = self._shape, self._num_heads, self.reader(x)
        first = down.shape[1] - shape.row_size
        queries = self._queries(down[:, :first]).view(len(x), heads, shape.query_dim)
        rows = down.new_empty(len(x), shape.row_size)
        rows[:, : shape.rank] = self._normed(down[:, first : first + shape.rank], _LATENT_NORM)
        self._copy_rotary(rows[:, shape.rank :], down[:, first + shape.rank :])
        absorbed = down.new_empty(len(x), heads, shape.row_size)
        plain = queries[..., : shape.plain_dim]
        self._functions.multiply_heads(absorbed[..., : shape.rank], plain, self._key_weight)
        self._copy_rotary(absorbed[..., shape.rank :], queries[..., shape.plain_dim :])
        attended = backend.attend_latent(self.layer, absorbed, rows, meta)
        out = down.new_empty(len(x), heads, shape.value_dim)
        self._functions.multiply_heads(out, attended, self._value_weight)
        return out.flatten(1)

    def _queries(self, down: Tensor) -> Tensor:
        """Return the queries [num_tokens, num_heads * query_dim].

        Args:
            down: [num_tokens, query_rank] the vectors that they are made of; or the queries.
        """
        if self._query_up is None:
            return down
        return self._query_up(self._normed(down, _QUERY_NORM))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self._norms[name]
        return self._functions.rms_norm(x.contiguous(), weight, self._shape.norm_eps)

    def _copy_rotary(self, out: Tensor, x: Tensor) -> None:
        """Copy `x` [..., rotary_dim] to `out`, the first numbers of all turning pairs first."""
        if not self._interleaved:
            out.copy_(x)
            return
        half = x.shape[-1] // 2
        out[..., :half] = x[..., 0::2]
        out[..., half:] = x[..., 1::2]
