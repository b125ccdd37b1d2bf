"""Launch configurations, chosen offline; nothing is tuned or compiled while serving.

There is a module for each kind of operation. Its functions are tables, keyed by architecture and
the values that determine the registers and shared memory of a program: the first line that fits
applies, the last is the default. `python -m paged_kernels.aot` shows the compiled result of each
configuration; `kernels/benchmarks/run_one.py paged_decode --sweep` (and `paged_prefill`) times
neighboring configurations on a device.
"""
