"""The attention backend of models without attention."""

from __future__ import annotations

from collections.abc import Sequence

from paged_backend.models.attention import AttentionBackend


class NoAttention(AttentionBackend):
    """Holds the states of sequences only; blocks have no memory."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do nothing, as blocks hold nothing."""
