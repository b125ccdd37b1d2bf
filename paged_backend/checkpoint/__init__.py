"""Reads what a checkpoint's files say: its shape, its settings, and where its tensors are.

It may import values only, and computes nothing. Begin with `model_config`, which returns the
configuration of a folder; `registry` lists the families, and `weights` yields tensors. Keys that
families share, such as those of rotary embeddings, have modules here (`rope`), the rest is in
`families`.
"""
