"""Where steps are computed: the parts of models for each kind of device, and model runners.

`base` is what a platform offers, and `select` alone chooses one. `portable` has the parts that run
on any device; `cpu`, `gpu` and `simulated` build on them, and never on each other, except that
`simulated` prepares steps as `gpu` does.
"""
