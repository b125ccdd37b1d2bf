"""Layers, attention, sampling and the model runner for NVIDIA GPUs, around `paged_kernels`.

Begin with `platform`, then `model_runner`, `step_sampler` and `cuda_graphs`.
"""
