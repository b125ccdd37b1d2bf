"""Samples tokens from logits on a CPU, by seed and position, and computes log-probabilities.

Begin with `sampler`. The GPU's sampler (`platforms/gpu`) draws the same tokens.
"""
