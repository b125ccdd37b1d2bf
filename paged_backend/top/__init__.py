"""A view of a running server for a terminal: its load, its latencies and its blocks."""
