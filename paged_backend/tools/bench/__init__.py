"""Measures the engine without a server, alone and against other engines.

Begin with `offline`. `peers` runs the others, and `engine_run` is our side.
"""
