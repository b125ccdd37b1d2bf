"""Refuses contexts that no KV pool holds, before anything is made for each of their positions."""

from __future__ import annotations

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.values.errors import ConfigError

MAX_TABLE_BYTES = 2**28  # size of rotary tables that are made whatever the size of the pool
_NUMBER_BYTES = 4  # size of a number of a rotary table, where a position has as many as a head


def check_positions(model: ModelConfig, max_model_len: int, pool_bytes: int) -> None:
    """Check that a KV pool can hold the longest sequence, if its rotary tables are large.

    The exact check, of any context, needs the model, which has a row in these tables for each
    position. A window bounds the keys and values of a sequence, but not the tables.

    Args:
        model: the sizes.
        max_model_len: tokens of the longest sequence.
        pool_bytes: the size of the pool.

    Raises:
        ConfigError: the pool cannot hold it, in the smallest of all formats.
    """
    numbers = sum(rope.head_dim for rope in set(model.ropes))
    tables = numbers * _NUMBER_BYTES * max_model_len
    layers = (layer for layer in model.keeping_layers if model.windows[layer] is None)
    keys_and_values = sum(model.kept_of(layer).numbers for layer in layers) * max_model_len
    needed = max(tables, keys_and_values)
    if tables > MAX_TABLE_BYTES and needed > pool_bytes:
        raise ConfigError(
            f"option kv_cache_memory_bytes: {pool_bytes} bytes are too few for max_model_len "
            f"({max_model_len}), which takes {needed} at least; give more, or lower max_model_len"
        )
