"""Parts in plain PyTorch: layers for any device, and a model runner for devices without kernels.

The other platforms build on `linear`, `layers` and `attention`. Begin with `platform`.
"""
