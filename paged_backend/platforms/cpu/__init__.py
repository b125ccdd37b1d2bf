"""Layers, attention and the model runner for CPUs, as kernels that numba compiles.

Begin with `platform`; `threads` and `graphs` run the kernels.
"""
