"""Options for computing attention scores, accepted by all attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_kernels.dtypes import QUANTIZED_DTYPES
from paged_kernels.errors import check, check_blocks, check_tensor
from paged_kernels.windows import Window, WindowConstants

MAX_HEAD_DIM = 512
"""The most numbers of a head."""


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Scale, window, cap and sinks of the scores, and the scales of a quantized cache."""

    scale: float  # factor on the dot products
    window: Window | None = None  # positions that a token sees; None for all up to its own
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # [num_heads] float32, score of an extra key without a value
    k_scale: Tensor | None = None  # [num_kv_heads] float32; key = stored key * scale
    v_scale: Tensor | None = None  # [num_kv_heads] float32; value = stored value * scale
    # [num_blocks, 2, num_kv_heads, block_size] float32 instead: a scale for each token and head,
    # scales of the keys first, at the places of the tokens in the cache
    kv_scales: Tensor | None = None

    def check(self, q: Tensor, kv_cache: Tensor) -> None:
        """Check the options against `q` [T, num_heads, D] and a cache [N, 2, num_kv_heads, B, D].

        Raises:
            ArgumentError: an option has the wrong type, shape, device or range.
        """
        heads = q.shape[1]
        check(0 < self.scale < float("inf"), "scale", f"must be above 0, got {self.scale}")
        size = WindowConstants.of(self.window).WINDOW
        check(size is None or size >= 1, "window", f"must be at least 1, got {size}")
        if self.softcap is not None:
            check(0 < self.softcap < 1e30, "softcap", f"must be above 0, got {self.softcap}")
        if self.sinks is not None:
            check_tensor("sinks", self.sinks, (heads,), torch.float32, like=q)
        check_scales(kv_cache, self.k_scale, self.v_scale, self.kv_scales)

    def without_sinks(self) -> AttentionParams:
        """Return a copy without sinks, for one part of the keys if another part counts them."""
        return replace(self, sinks=None)


def check_scales(
    kv_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, kv_scales: Tensor | None
) -> None:
    """Check the scales, as far as there are any, of a cache [N, 2, num_kv_heads, B, D].

    Raises:
        ArgumentError: scales have the wrong shape, dtype, device or layout, the cache is not
            quantized, or there are scales of both kinds.
    """
    static = (("k_scale", k_scale), ("v_scale", v_scale))
    stored = str(kv_cache.dtype).removeprefix("torch.")
    for name, scale in (*static, ("kv_scales", kv_scales)):
        if scale is None:
            continue
        check(kv_cache.dtype in QUANTIZED_DTYPES, name, f"must be None for a cache in {stored}")
        shape = kv_cache.shape[:4] if name == "kv_scales" else kv_cache.shape[2:3]
        check_blocks(name, scale, shape, torch.float32, like=kv_cache)
    alone = kv_scales is None or (k_scale is None and v_scale is None)
    check(alone, "kv_scales", "does not go with k_scale and v_scale")
