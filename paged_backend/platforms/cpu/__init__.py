"""Platforms and model runners of CPUs, and layers and attention as kernels that numba compiles.

`torch_platform` serves any dtype without kernels, and `platform` builds on it. `model_runner`
computes steps, and `graph_runner` replays them; `threads` and `graphs` run the kernels.
"""
