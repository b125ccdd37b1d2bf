"""Attention of transformers' models over the paged KV cache.

transformers calls a registered attention function with rotated queries, keys and values. It cannot
hand more to it in all models, so a context variable holds the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from paged_backend.models.alibi import COLUMNS, MAX_POSITIONS, with_columns
from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.attention_step import AttentionStep
from paged_backend.values.errors import ConfigError

NAME = "paged_backend"


_step: ContextVar[AttentionStep] = ContextVar("step")


@contextmanager
def attend_with(step: AttentionStep) -> Iterator[None]:
    """Let models of this thread attend with `step`, within the `with` block."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Attends over the paged KV cache; one step of a model runner."""

    backend: AttentionBackend
    meta: AttentionMetadata
    layers: Sequence[AttentionLayer]

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """See `AttentionStep.attend`."""
        layer = self.layers[module.layer_idx]
        head_dim, dtype = q.shape[-1], q.dtype
        slopes = options.get("alibi_slopes")
        if slopes is not None:
            q, k, v = with_columns(q, k, v, slopes, layer.scale, self.meta.positions)
        heads = torch.cat((q, k, v), dim=1) if layer.keeps_tokens else q
        qkv = heads[0].transpose(0, 1).flatten(1).contiguous()
        out = self.backend.attend(layer, qkv, self.meta)
        out = out.view(1, -1, layer.num_heads, layer.head_dim)
        return out[..., :head_dim].to(dtype)


class LayerFinder:
    """Collects a model's attention layers from a forward pass with attention outputs of zeros.

    Args:
        max_model_len: the number of positions.
    """

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._layers: dict[int, AttentionLayer] = {}
        self._keys: dict[int, Tensor] = {}  # keys of the layers that compute them

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """See `AttentionStep.attend`."""
        index = getattr(module, "layer_idx", None)
        name = type(module).__name__
        if not isinstance(index, int) or index in self._layers:
            raise _refused(f"{name} has no separate layer in the KV cache")
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise _refused(f"{name} is not causal")
        if options.get("attention_mask") is not None:
            raise _refused(f"{name} makes a separate attention mask")
        if q.shape[-1] != v.shape[-1]:
            raise _refused(f"{name} has values of {v.shape[-1]} elements and keys of {q.shape[-1]}")
        self._layers[index] = self._layer(index, q, k, options)
        return torch.zeros_like(q).transpose(1, 2)

    def _layer(self, index: int, q: Tensor, k: Tensor, options: dict[str, Any]) -> AttentionLayer:
        head_dim = q.shape[-1]
        scale = options.get("scaling") or head_dim**-0.5
        has_positions = options.get("alibi_slopes") is not None
        if has_positions:
            head_dim += COLUMNS
            if self._max_model_len > MAX_POSITIONS:
                raise _refused(f"its biases of positions end at {MAX_POSITIONS} tokens")
        # transformers has rotated the heads: cosines of 1 and sines of 0 leave them as they are.
        table = torch.zeros(self._max_model_len, head_dim, device=q.device)
        table[:, : head_dim // 2] = 1
        sinks = options.get("s_aux")
        # A layer that reads what another one keeps gets the keys that this one has computed.
        keeper = next((other for other, keys in self._keys.items() if keys is k), None)
        if keeper is None:
            self._keys[index] = k
        return AttentionLayer(
            index,
            q.shape[1],
            k.shape[1],
            head_dim,
            scale=scale,
            cos_sin_cache=table,
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            sinks=None if sinks is None else sinks.detach().float(),
            has_positions=has_positions,
            shared_with=keeper,
        )

    def layers(self, config: Any) -> list[AttentionLayer]:
        """Return the layers in order.

        Args:
            config: transformers' configuration of the decoder.

        Raises:
            ConfigError: a layer of the model is not an attention layer, or its window is not known.
        """
        if sorted(self._layers) != list(range(config.num_hidden_layers)):
            raise _refused(
                f"{len(self._layers)} of {config.num_hidden_layers} layers have attention, and the "
                "state of others is not in the KV cache"
            )
        layers = [self._layers[index] for index in sorted(self._layers)]
        kinds = getattr(config, "layer_types", None) or []
        for layer, kind in zip(layers, kinds, strict=False):
            if kind not in ("full_attention", "sliding_attention"):
                raise _refused(f"config.json: layer_types has {kind}")
            if (kind == "sliding_attention") != (layer.window is not None):
                raise _refused(f"layer {layer.index} is {kind}, but its window is {layer.window}")
        return layers


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"the model cannot use the paged KV cache: {reason}")


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' registered functions do; see `AttentionStep.attend`."""
    options["attention_mask"] = attention_mask
    return _step.get().attend(module, query, key, value, options), None


AttentionInterface.register(NAME, attention)
