"""Formats of quantized weights: how files store them, and what they mean as numbers.

It may import `checkpoint`. Begin with `read`, which finds the format of a checkpoint; `forms` lists
what kernels multiply with.
"""
