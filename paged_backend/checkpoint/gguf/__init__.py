"""Reads GGUF files: header, configuration, vocabulary and tensors.

Begin with `source`, which yields tensors under the names that safetensors files use.
"""
