"""A terminal view of a running server: its load, its latencies and its KV blocks.

`source` reads a server's status, `figures` computes what is shown, and `screen` draws it.
"""
