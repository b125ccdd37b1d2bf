"""Other engines as peers: each file runs under the interpreter of that engine's environment.

They import nothing of this project. Begin with `vllm_peer`.
"""
