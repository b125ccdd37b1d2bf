"""Triton-lang kernels over a paged KV cache: tensors in, tensors out.

Each operation has its own file, and its torch reference has the same name in
`paged_kernels.reference`. `kernels/README.md` has the cache layout and each kernel's contract.
"""
