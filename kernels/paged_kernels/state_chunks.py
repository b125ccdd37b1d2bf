"""Sizes of the chunks in which kernels of layers with states compute prompts in 16 bits.

`_chunks.py` says what chunks mean for the bits of results.
"""

CHUNK_ROWS = 64
"""Rows of a chunk: as many as a warp group's tensor cores multiply at once."""

FEW_ROWS = 16
"""Rows of a sequence up to which it is computed row by row, as are drafts."""
