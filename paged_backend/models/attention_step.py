"""The interface through which models of transformers call our attention."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class AttentionStep(Protocol):
    """Computes attention for the queries, keys and values of a layer."""

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """Compute attention.

        Args:
            module: the attention module that calls; it has a `layer_idx`.
            q: [1, num_heads, num_tokens, head_dim].
            k: [1, num_kv_heads, num_tokens, head_dim].
            v: the same.
            options: the other arguments: scaling, sliding_window, softcap, s_aux ...; and
                `alibi_slopes` [num_heads] float32, see `models.alibi`

        Returns:
            [1, num_tokens, num_heads, head_dim].
        """
        ...
