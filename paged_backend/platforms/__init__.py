"""Where steps are computed: the parts of models for each kind of device, and model runners.

`base` is what a platform offers, and `select` alone chooses one. `cpu`, `gpu` and `simulated` build
on `torch`.
"""
