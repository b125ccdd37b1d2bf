"""Models with the names and tensors of tensorrtllm_backend, on top of `serving.requests`.

Begin with `model`; `specs` lists the tensors.
"""
