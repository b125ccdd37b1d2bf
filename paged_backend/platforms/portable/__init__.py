"""Parts in plain PyTorch, for any device: layers, attention, experts, and the runner of encoders.

They are the references of the kernels in `cpu` and `gpu`, which use them where they have none of
their own. They import no other platform. Begin with `layers` and `linear`.
"""
