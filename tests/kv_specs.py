"""What layers keep, for specs of KV caches in tests."""

from __future__ import annotations

from collections.abc import Sequence

from paged_backend.values.kv_cache_groups import KVCacheGroup, KVSizes


def alike(
    groups: Sequence[KVCacheGroup], num_heads: int, key_dim: int, value_dim: int | None = None
) -> dict[int, KVSizes]:
    """Return sizes that are the same for all layers of some groups; values are like keys."""
    sizes = KVSizes(num_heads, key_dim, key_dim if value_dim is None else value_dim)
    return {layer: sizes for group in groups for layer in group.layers}
