"""Makes embeddings and scores of the hidden states that a step has pooled.

It needs NumPy only, because Triton's stubs use it, too. Begin with `vectors`.
"""
