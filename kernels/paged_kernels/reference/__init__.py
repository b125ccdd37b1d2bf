"""Reference implementations of the kernels in plain torch and float64, one file per operation.

Tests compare the kernels with them. Begin with `paged_attention`.
"""
