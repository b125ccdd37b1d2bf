"""Options for computing attention scores, accepted by all attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_kernels.errors import check, check_tensor


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Scale, window, cap and biases of the scores, and the scales of a quantized cache."""

    scale: float  # factor on the dot products
    window: int | None = None  # number of positions that a token sees, including its own
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [num_heads] float32, score of an extra key without a value
    alibi_slopes: Tensor | None = None  # [num_heads] float32, times (key - query position)
    k_scale: Tensor | None = None  # [num_kv_heads] float32; key = stored key * scale
    v_scale: Tensor | None = None  # [num_kv_heads] float32; value = stored value * scale

    def check(self, q: Tensor, kv_cache: Tensor) -> None:
        """Check the options against `q` [T, num_heads, D] and a cache [N, 2, num_kv_heads, B, D].

        Raises:
            ArgumentError: an option has the wrong type, shape, device or range.
        """
        heads, kv_heads = q.shape[1], kv_cache.shape[2]
        check(0 < self.scale < float("inf"), "scale", f"must be above 0, got {self.scale}")
        if self.window is not None:
            check(self.window >= 1, "window", f"must be at least 1, got {self.window}")
        if self.softcap is not None:
            check(0 < self.softcap < 1e30, "softcap", f"must be above 0, got {self.softcap}")
        for name, size in (
            ("sinks", heads),
            ("alibi_slopes", heads),
            ("k_scale", kv_heads),
            ("v_scale", kv_heads),
        ):
            tensor = getattr(self, name)
            if tensor is not None:
                check_tensor(name, tensor, (size,), torch.float32, like=q)

    def without_sinks(self) -> AttentionParams:
        """Return a copy without sinks, for one part of the keys if another part counts them."""
        return replace(self, sinks=None)
