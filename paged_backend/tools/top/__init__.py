"""A terminal view of a running server: its load, its latencies and its KV blocks."""
