"""The decoder: Llama and the models that differ from it by a bias, a norm or a window."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.models.layers import HeadNorm, layer_functions
from paged_backend.models.linear import Linear

Meta = TypeVar("Meta", contravariant=True)


class Attention(Protocol[Meta]):
    """What the decoder needs of an attention backend; `AttentionBackend` says what it means."""

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        rotary: Tensor,
        meta: Meta,
        window: int | None = None,
        head_norm: HeadNorm | None = None,
    ) -> Tensor: ...


class DecoderLayer:
    """One layer's weights; queries, keys and values are one product, gate and up another."""

    def __init__(
        self, config: ModelConfig, window: int | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias=bias, dtype=dtype, device=device)

        hidden, inner = config.hidden_size, config.intermediate_size
        query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        biases = config.biases
        self.window = window
        self.attention_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.qkv = linear(hidden, query + 2 * key_value, biases.qkv)
        self.output = linear(query, hidden, biases.output)
        self.mlp_norm = torch.empty(hidden, dtype=dtype, device=device)
        self.gate_up = linear(hidden, 2 * inner, biases.mlp)
        self.down = linear(inner, hidden, biases.mlp)
        self.head_norm: HeadNorm | None = None
        if config.qk_norm:
            sizes = config.num_heads, config.num_kv_heads, config.head_dim
            self.head_norm = HeadNorm(*sizes, config.rms_norm_eps, dtype, device)
        self._qkv_sizes = (query, key_value, key_value)

    def weight_slots(self) -> dict[str, Tensor]:
        """The memory of each tensor that a checkpoint has for this layer, by its name there."""
        query, key, value = self._qkv_sizes
        hidden, inner = self.down.weight.shape
        slots = {
            "input_layernorm.weight": self.attention_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
            **_parts(
                self.qkv,
                {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value},
            ),
            **_parts(self.output, {"self_attn.o_proj": hidden}),
            **_parts(self.gate_up, {"mlp.gate_proj": inner, "mlp.up_proj": inner}),
            **_parts(self.down, {"mlp.down_proj": hidden}),
        }
        if self.head_norm is not None:
            slots["self_attn.q_norm.weight"] = self.head_norm.query
            slots["self_attn.k_norm.weight"] = self.head_norm.key
        return slots

    def pack(self) -> None:
        """Bring the filled weights into the form that the device's kernels read."""
        if self.head_norm is not None:
            self.head_norm.pack()
        for linear in (self.qkv, self.output, self.gate_up, self.down):
            linear.pack()


class LlamaModel:
    """A decoder on one device, for inference only.

    Made with its memory unfilled: fill `weight_slots`, then call `pack` once.
    """

    def __init__(
        self, config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.device = device
        vocab_size, hidden_size = config.vocab_size, config.hidden_size
        self._embedding: Tensor | None = None  # [vocab_size, hidden_size], None if it is lm_head's
        if not config.tied_embeddings:
            self._embedding = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self._layers = [DecoderLayer(config, window, dtype, device) for window in config.windows]
        self._norm = torch.empty(hidden_size, dtype=dtype, device=device)
        self._lm_head = Linear(hidden_size, vocab_size, bias=False, dtype=dtype, device=device)
        self._functions = layer_functions(device, dtype)
        self._rotary = config.rope.table(max_model_len, device)

    def weight_slots(self) -> dict[str, Tensor]:
        """The memory of each tensor of a checkpoint, by its name there; gone after `pack`."""
        if self._embedding is None:
            slots = {"model.embed_tokens.weight": self._lm_head.weight}
        else:
            slots = {
                "model.embed_tokens.weight": self._embedding,
                "lm_head.weight": self._lm_head.weight,
            }
        slots["model.norm.weight"] = self._norm
        for index, layer in enumerate(self._layers):
            for name, slot in layer.weight_slots().items():
                slots[f"model.layers.{index}.{name}"] = slot
        return slots

    def pack(self) -> None:
        """Bring the filled weights into the form that the device's kernels read."""
        for layer in self._layers:
            layer.pack()
        self._lm_head.pack()

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        attention: Attention[Meta],
        meta: Meta,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Last hidden states [num_rows, hidden_size] of the rows whose logits are wanted.

        `input_ids` [num_tokens] are the step's tokens as `meta` lays them out, `logits_indices`
        int64 rows of them, or None for all; `attention` writes this step's keys and values to its
        cache.
        """
        functions, eps = self._functions, self.config.rms_norm_eps
        last = len(self._layers) - 1
        norms = [layer.attention_norm for layer in self._layers[1:]] + [self._norm]
        hidden = self._embed(input_ids)
        normed = functions.rms_norm(hidden, self._layers[0].attention_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            attended = attention.attend(
                index, layer.qkv(normed), self._rotary, meta, layer.window, layer.head_norm
            )
            if index == last and logits_indices is not None:  # only these rows matter
                attended, hidden = attended[logits_indices], hidden[logits_indices]
            normed = functions.add_norm(hidden, layer.output, attended, layer.mlp_norm, eps)
            activated = functions.silu_and_mul(layer.gate_up(normed))
            normed = functions.add_norm(hidden, layer.down, activated, next_norm, eps)
        return normed

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Logits [num_rows, vocab_size] in the model's dtype of what `forward` gave."""
        return self._lm_head(hidden)

    def _embed(self, input_ids: Tensor) -> Tensor:
        """The tokens' embeddings [num_tokens, hidden_size]."""
        if self._embedding is None:
            return self._lm_head.rows(input_ids)
        return F.embedding(input_ids, self._embedding)


def _parts(linear: Linear, sizes: dict[str, int]) -> dict[str, Tensor]:
    """A fused product's weight, and bias if it has one, cut into a checkpoint's tensors."""
    slots = {}
    for kind, fused in (("weight", linear.weight), ("bias", linear.bias)):
        if fused is not None:
            for name, part in zip(sizes, torch.split(fused, list(sizes.values())), strict=True):
                slots[f"{name}.{kind}"] = part
    return slots
