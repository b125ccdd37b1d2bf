"""Models of transformers that compute attention by themselves, without the registered function.

An adapter takes the place of the `forward` method of an attention module: it makes the same
queries, keys and values, and hands them to our attention.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import (
    BaseModelOutputWithPastAndCrossAttentions as ModelOutput,
)

from paged_backend.models.alibi import halving_slopes, interleaved_slopes
from paged_backend.models.transformers_attention import attention

Forward = Callable[..., Any]
Parts = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values, each [1, num_tokens, its heads, head_dim]."""


def adapters_of(name: str) -> dict[str, Forward] | None:
    """Return the `forward` methods that replace those of a model's modules, by their classes.

    Args:
        name: the class of the model in transformers.

    Returns:
        None for a model without an adapter. The methods are empty for a model that calls the
        registered function without saying so.
    """
    return _ADAPTERS.get(name)


def adapt(model: nn.Module, forwards: dict[str, Forward]) -> None:
    """Replace methods of a model's modules, from `adapters_of`."""
    for module in model.modules():
        forward = forwards.get(type(module).__name__)
        if forward is not None:
            module.forward = MethodType(forward, module)


def prepare_falcon(model: Any) -> None:
    """Let Falcon compute as others do, before it is compared with our attention.

    Its linear layers become usual ones, which differ in rounding only. With "eager" attention,
    transformers adds the biases of positions twice, so "sdpa" takes its place.
    """
    if type(model).__name__ != "FalconForCausalLM":
        return
    model.config._attn_implementation = "sdpa"
    for module in model.modules():
        if type(module).__name__ == "FalconLinear":
            module.__class__ = nn.Linear


def _attend(module: Any, parts: Parts, **options: Any) -> Tensor:
    """Return attention [1, num_tokens, hidden_size]."""
    q, k, v = (part.transpose(1, 2) for part in parts)
    return attention(module, q, k, v, None, **options)[0].flatten(2)


def _bloom(
    self: Any, hidden_states: Tensor, residual: Tensor, **others: Any
) -> tuple[Tensor, None]:
    fused = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
    slopes = halving_slopes(self.num_heads)
    out = _attend(self, fused.unbind(3), scaling=self.inv_norm_factor, alibi_slopes=slopes)
    return self.dense(out) + residual, None


def _falcon(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    q, k, v = _falcon_parts(self, self.query_key_value(hidden_states))
    options: dict[str, Any] = {"scaling": self.inv_norm_factor}
    if alibi is None and position_embeddings is not None:
        cos, sin = (table[:, :, None] for table in position_embeddings)
        q, k = (part * cos + _rotate_half(part) * sin for part in (q, k))
    else:
        # Falcon rounds its slopes, and scales the biases with the scores.
        slopes = halving_slopes(self.num_heads).bfloat16().float()
        options["alibi_slopes"] = slopes * self.inv_norm_factor
    return self.dense(_attend(self, (q, k, v), **options)), None


def _falcon_parts(module: Any, fused: Tensor) -> Parts:
    if module.new_decoder_architecture or module.multi_query:
        # Groups of queries, each with its key and its value.
        groups = module.num_kv_heads
        heads = fused.view(*fused.shape[:2], groups, -1, module.head_dim)
        return heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :]
    q, k, v = fused.view(*fused.shape[:2], module.num_heads, 3, module.head_dim).unbind(3)
    return q, k, v


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return nn.functional.pad(first, (second.shape[-1], 0)) - nn.functional.pad(
        second, (0, first.shape[-1])
    )


def _mpt(self: Any, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
    fused = self.Wqkv(hidden_states)
    if self.clip_qkv:
        fused = fused.clamp(-self.clip_qkv, self.clip_qkv)
    q, k, v = fused.unflatten(-1, (3, self.n_heads, self.head_dim)).unbind(2)
    slopes = interleaved_slopes(self.n_heads, 8)
    out = _attend(self, (q, k, v), scaling=self.softmax_scale, alibi_slopes=slopes)
    return self.out_proj(out), None


def _mpt_model(self: Any, input_ids: Tensor, **others: Any) -> ModelOutput:
    """Compute MPT's layers without the table of biases and the mask, of [tokens, tokens] each."""
    hidden: Tensor = self.wte(input_ids)
    for block in self.blocks:
        hidden = block(hidden, position_bias=None, attention_mask=None)[0]
    return ModelOutput(last_hidden_state=self.norm_f(hidden))


def _xglm(self: Any, hidden_states: Tensor, **others: Any) -> tuple[Tensor, None]:
    sizes = (self.num_heads, self.head_dim)
    q = self.q_proj(hidden_states).unflatten(-1, sizes)
    k = self.k_proj(hidden_states).unflatten(-1, sizes)
    v = self.v_proj(hidden_states).unflatten(-1, sizes)
    return self.out_proj(_attend(self, (q, k, v), scaling=self.scaling)), None


_ADAPTERS: dict[str, dict[str, Forward]] = {
    "BloomForCausalLM": {"BloomAttention": _bloom},
    "FalconForCausalLM": {"FalconAttention": _falcon},
    "MptForCausalLM": {"MptAttention": _mpt, "MptModel": _mpt_model},
    "StableLmForCausalLM": {},
    "XGLMForCausalLM": {"XGLMAttention": _xglm},
}
