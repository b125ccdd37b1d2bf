"""Bidirectional attention over whole prompts, which lie one after the other without padding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class PackedPrompts:
    """The prompts of one step; see `models.attention_step.AttentionStep`.

    Prompts of the same length are attended in one call.

    Args:
        lengths: the number of tokens of each prompt.
        device: device of the queries.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        starts: defaultdict[int, list[int]] = defaultdict(list)  # by length
        end = 0
        for length in lengths:
            starts[length].append(end)
            end += length
        self._rows = [  # for each length [prompts, length]
            (torch.tensor(first)[:, None] + torch.arange(length)).to(device)
            for length, first in starts.items()
        ]

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> Tensor:
        """See `AttentionStep.attend`; a window reaches as far to both sides."""
        out = torch.empty_like(q[0].transpose(0, 1))
        for rows in self._rows:
            queries, keys, values = (x[0].transpose(0, 1)[rows].transpose(1, 2) for x in (q, k, v))
            attended = scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=_within(options.get("sliding_window"), rows),
                scale=options.get("scaling"),
                enable_gqa=True,
            )
            out[rows] = attended.transpose(1, 2)
        return out.unsqueeze(0)


def _within(window: int | None, rows: Tensor) -> Tensor | None:
    """Return which tokens [length, length] are less than `window` apart; None if all are."""
    length = rows.shape[1]
    if window is None or length <= window:
        return None
    places = torch.arange(length, device=rows.device)
    return (places[:, None] - places).abs() < window
