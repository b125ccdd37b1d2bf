"""Llama, and the families that differ from it by a bias, a norm of the heads or a window."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.blocks import Attention, GatedMLP, prefixed
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearSpec


class DecoderLayer:
    """The weights of one layer."""

    def __init__(
        self, config: ModelConfig, index: int, prefix: str, cos_sin_cache: Tensor, kernels: Kernels
    ) -> None:
        def norm() -> Tensor:
            return torch.empty(config.hidden_size, dtype=kernels.dtype, device=kernels.device)

        self.input_layernorm = norm()
        self.attention = Attention(config, index, f"{prefix}.self_attn", cos_sin_cache, kernels)
        self.post_attention_layernorm = norm()
        self.mlp = GatedMLP(config, f"{prefix}.mlp", kernels)

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the layer."""
        return {
            "input_layernorm.weight": self.input_layernorm,
            **prefixed("self_attn", self.attention.parameters()),
            "post_attention_layernorm.weight": self.post_attention_layernorm,
            **prefixed("mlp", self.mlp.parameters()),
        }

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self.attention.pack()
        self.mlp.pack()


class LlamaModel:
    """A decoder of pre-norm layers; see :class:`~paged_backend.models.base.Model`."""

    def __init__(self, config: ModelConfig, max_model_len: int, kernels: Kernels) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self._functions = kernels.layers
        vocab_size, hidden_size = config.vocab_size, config.hidden_size

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=kernels.dtype, device=kernels.device)

        # [vocab_size, hidden_size]; None if tied: `_embed` then reads the output layer's weight.
        self._embedding = None if config.tied_embeddings else empty(vocab_size, hidden_size)
        cos_sin_cache = config.rope.table(max_model_len, kernels.device)
        self._layers = [
            DecoderLayer(config, index, _layer(index), cos_sin_cache, kernels)
            for index in range(config.num_layers)
        ]
        self._norm = empty(hidden_size)
        name = "model.embed_tokens" if config.tied_embeddings else "lm_head"
        self._lm_head = kernels.linear(LinearSpec(hidden_size, {name: vocab_size}))

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]:
        """The attention layers, in order."""
        return [layer.attention.layer for layer in self._layers]

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        parameters = self._lm_head.parameters() | {"model.norm.weight": self._norm}
        if self._embedding is not None:
            parameters["model.embed_tokens.weight"] = self._embedding
        for index, layer in enumerate(self._layers):
            parameters |= prefixed(_layer(index), layer.parameters())
        return parameters

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        for layer in self._layers:
            layer.pack()
        self._lm_head.pack()

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Compute the last hidden states, see `Model.forward`."""
        add_norm, eps = self._functions.add_norm, self.config.rms_norm_eps
        last = len(self._layers) - 1
        norms = [layer.input_layernorm for layer in self._layers[1:]] + [self._norm]
        hidden = self._embed(input_ids)
        normed = self._functions.rms_norm(hidden, self._layers[0].input_layernorm, eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            attended = layer.attention.attend(normed, attention, meta)
            if index == last and logits_indices is not None:  # only these rows matter
                attended, hidden = attended[logits_indices], hidden[logits_indices]
            o_proj, norm = layer.attention.o_proj, layer.post_attention_layernorm
            normed = add_norm(hidden, o_proj, attended, norm, eps)
            activated = layer.mlp.activate(normed)
            normed = add_norm(hidden, layer.mlp.down_proj, activated, next_norm, eps)
        return normed

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [num_rows, vocab_size] in the model's dtype from `forward`'s result."""
        return self._lm_head(hidden)

    def _embed(self, input_ids: Tensor) -> Tensor:
        """The tokens' embeddings [num_tokens, hidden_size]."""
        if self._embedding is None:
            return self._lm_head.rows(input_ids)
        return F.embedding(input_ids, self._embedding)


def _layer(index: int) -> str:
    """Return the name of a layer in the checkpoint."""
    return f"model.layers.{index}"
