"""The order of a head's dimensions in the attention kernels.

The kernels rotate dimension i together with dimension i + head_dim / 2, in all families. Scores do
not depend on the order of a head's dimensions if queries and keys have the same one. For other
pairs, the rows of their weights are therefore reordered when a checkpoint is loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.rope import Rope
from paged_backend.checkpoint.shape import QKNormScope


def row_order(config: ModelConfig, layer: int) -> dict[str, Tensor]:
    """Return the row of the checkpoint's weight for each output of queries, keys and values.

    The result has the names of `ModelShape.attention_parts`. It is empty if the checkpoint's order
    is that of the kernels.
    """
    rope, num_kv_heads = config.ropes[layer], config.sizes_of(layer).num_kv_heads
    head = head_order(rope, interleaved=config.variant.rotary.interleaved)
    if config.variant.gated_attention:
        keys = _repeated(head, num_kv_heads)
        return {"q_proj": _gates_first(head, config.num_heads), "k_proj": keys}
    if torch.equal(head, torch.arange(rope.head_dim)):
        return {}
    if config.variant.qk_norm is QKNormScope.TOKEN:
        raise ValueError("a norm of all queries needs the same pairs as the kernels")
    queries, keys = _repeated(head, config.num_heads), _repeated(head, num_kv_heads)
    if not config.variant.fused_qkv:
        return {"q_proj": queries, "k_proj": keys}
    values = torch.arange(len(keys))
    parts = queries, keys + len(queries), values + len(queries) + len(keys)
    return {"qkv_proj": torch.cat(parts)}


def head_order(rope: Rope, *, interleaved: bool) -> Tensor:
    """Return the checkpoint's dimension for each dimension of a head, [head_dim] int64.

    The first halves of the turning pairs come first, then half of the other dimensions, then the
    second halves and the rest.
    """
    turning = torch.arange(rope.dim)
    still = torch.arange(rope.dim, rope.head_dim)
    first, second = (turning[0::2], turning[1::2]) if interleaved else turning.chunk(2)
    return torch.cat((first, still[: len(still) // 2], second, still[len(still) // 2 :]))


def _gates_first(head: Tensor, count: int) -> Tensor:
    """Return the order of the rows of several heads, each of which has a query and then a gate.

    The gates of all heads come first, and then all queries.
    """
    size = len(head)
    starts = torch.arange(count).unsqueeze(1) * 2 * size
    gates = starts + size + torch.arange(size)
    return torch.cat((gates.flatten(), (starts + head).flatten()))


def _repeated(head: Tensor, count: int) -> Tensor:
    """Return the order of the rows of several heads."""
    return (torch.arange(count).unsqueeze(1) * len(head) + head).flatten()
