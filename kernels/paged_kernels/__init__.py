"""Triton-lang kernels over a paged KV cache: tensors in, tensors out.

One operation a file, with its torch reference in `paged_kernels.reference` under the same name;
`kernels/README.md` has the cache's layout and what each kernel promises.
"""
